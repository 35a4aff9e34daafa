"""Similarity of position embeddings of every kind, and filters of the patch projection."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compare import randomized
from small_models import small

from vitrail.config import BiTConfig, StemConfig
from vitrail.errors import ModelError
from vitrail.explain import filter_components, position_similarity
from vitrail.explain.positions import SIMILARITY_MEANING
from vitrail.models import build


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


@pytest.mark.parametrize("kind", SIMILARITY_MEANING)
@pytest.mark.parametrize("shape", [{"image_size": (32, 48)}, {"num_registers": 2}])
def test_position_is_most_similar_to_itself(kind: str, shape: dict):
    net = randomized(build(small(position=kind, **shape)))
    similarity = position_similarity(net)
    rows, columns = net.config.grid
    assert similarity.shape == (rows, columns, rows, columns)
    for i in range(rows):
        for j in range(columns):
            assert similarity[i, j, i, j] == pytest.approx(1)
            assert similarity[i, j].max() == pytest.approx(1)
    assert similarity.min() >= -1 - 1e-9


def test_learned_positions_are_compared_by_cosine():
    net = randomized(build(small(num_registers=1)))
    table = net.positions[0].table.detach().double().numpy()  # patches only, h w D
    similarity = position_similarity(net)
    for i, j, k, m in [(0, 1, 2, 3), (3, 3, 0, 0), (1, 1, 1, 2)]:
        assert similarity[i, j, k, m] == pytest.approx(cosine(table[i, j], table[k, m]))


def test_rope_similarity_is_the_mean_dot_product_of_rotated_vectors():
    """Mean over random vectors q of q(position 1) . q(position 2) / |q|^2."""
    net = build(small(position="rope-2d"))
    rotate = net.positions[0](net.config.grid, torch.zeros(1, dtype=torch.float64))
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(4000, 1, 1, 64, dtype=torch.float64, generator=generator)
    rotated = rotate(q.expand(-1, -1, 17, -1), q.expand(-1, -1, 17, -1))[0][:, 0, 1:]  # M N K
    expected = torch.einsum("mak,mbk->ab", rotated, rotated) / q.square().sum()
    got = position_similarity(net).reshape(16, 16)
    np.testing.assert_allclose(got, expected.numpy(), atol=0.02)
    assert got.min() < 0.5


def test_relative_positions_are_compared_with_offset_zero():
    net = randomized(build(small(position="relative")))
    offsets = net.positions[0].offsets.detach().double().numpy()
    similarity = position_similarity(net).reshape(16, 16)
    for q, k in [(0, 5), (5, 0), (15, 2), (7, 7)]:
        assert similarity[q, k] == pytest.approx(cosine(offsets[q - k + 15], offsets[15]))


def test_layers_can_have_separate_positions():
    net = randomized(build(small(position_at="layers")))
    first, second = position_similarity(net, 0), position_similarity(net, 1)
    assert not np.allclose(first, second)
    with pytest.raises(ModelError, match="no position embeddings in layer 3: this network has them in layers 1 to 2"):
        position_similarity(net, 2)
    with pytest.raises(ModelError, match="once, for all layers"):
        position_similarity(build(small()), 1)


def test_positions_are_resampled_for_another_image_size():
    net = randomized(build(small()))
    got = position_similarity(net, image_size=64)
    np.testing.assert_allclose(got, position_similarity(net.resized(64)))
    with pytest.raises(ModelError, match="cannot be resampled"):
        position_similarity(build(small(position="relative")), image_size=64)


def test_network_without_positions_is_an_error():
    with pytest.raises(ModelError, match="no position embeddings"):
        position_similarity(build(small(position="none")))
    with pytest.raises(ModelError, match="a BiT has no position embeddings"):
        position_similarity(build(BiTConfig(image_size=32, num_classes=2, layers=(1, 1, 1, 1), width_factor=0.5)))


def test_filters_are_the_principal_components_of_the_patch_projection():
    net = randomized(build(small()))
    patterns, shares = filter_components(net, 5)
    matrix = net.patch.weight.detach().double().flatten(1).numpy()
    values, vectors = np.linalg.eigh(np.cov(matrix.T, bias=True))
    np.testing.assert_allclose(shares, values[::-1][:5] / values.sum(), rtol=1e-6)
    for pattern, vector in zip(patterns, vectors.T[::-1], strict=False):
        flat = pattern.transpose(2, 0, 1).ravel()
        assert abs(flat @ vector) == pytest.approx(1, abs=1e-6)


def test_filters_of_a_hybrid_are_an_error():
    net = build(small(image_size=64, patch_size=1, stem=StemConfig(layers=(1, 1), width_factor=0.5)))
    with pytest.raises(ModelError, match="those of a ResNet"):
        filter_components(net)
