"""Attention rollout compared with its definition, and rollout maps for every kind of pooling."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compare import randomized
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import POOLS, small
from torch import Tensor

from vitrail.config import BiTConfig, ViTConfig
from vitrail.errors import ModelError
from vitrail.explain import rollout, rollout_map
from vitrail.models import ViT, build


def random_attention(count: int, batch: int, heads: int, tokens: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, heads, tokens, tokens, generator=generator, dtype=torch.float64).softmax(-1)
        for _ in range(count)
    ]


def reference_rollout(attention: list[np.ndarray]) -> np.ndarray:
    """Rollout of one image (H T T per layer), one entry at a time."""
    tokens = attention[0].shape[-1]
    joint = np.eye(tokens)
    for layer in attention:
        mean = sum(layer[h] for h in range(len(layer))) / len(layer)
        product = np.zeros((tokens, tokens))
        for i in range(tokens):
            for j in range(tokens):
                product[i, j] = sum((0.5 * mean[i, k] + 0.5 * (i == k)) * joint[k, j] for k in range(tokens))
        joint = product
    return joint


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 6), st.integers(0, 99))
def test_rollout_equals_the_reference_and_rows_sum_to_one(count: int, batch: int, heads: int, tokens: int, seed: int):
    attention = random_attention(count, batch, heads, tokens, seed)
    got = rollout(attention)
    for b in range(batch):
        np.testing.assert_allclose(got[b].numpy(), reference_rollout([a[b].numpy() for a in attention]), atol=1e-12)
    torch.testing.assert_close(got.sum(-1), torch.ones(batch, tokens, dtype=torch.float64))


def test_rollout_of_identity_attention_is_the_identity():
    identity = torch.eye(5).expand(2, 3, 5, 5)
    torch.testing.assert_close(rollout([identity] * 4), torch.eye(5).expand(2, 5, 5))


def test_rollout_accepts_an_iterator():
    attention = random_attention(3, 1, 2, 4)
    assert torch.equal(rollout(iter(attention)), rollout(attention))


def test_rollout_of_no_layers_is_an_error():
    with pytest.raises(ModelError, match="got no attention"):
        rollout([])


@pytest.mark.parametrize("name", POOLS)
def test_rollout_map_is_the_row_that_the_head_reads(name: str):
    config = POOLS[name]
    net = randomized(build(config))
    images = torch.randn(2, 3, *config.image_size)
    out = net.features(images, outputs=("attention", "pool_attention") if net.pool is not None else ("attention",))
    joint, special = rollout(out.attention), config.num_prefix_tokens
    patches = joint[:, special:].mean(1)
    rows = {
        "token": joint[:, 0],
        "registers": joint[:, 0],
        "distilled": (joint[:, 0] + joint[:, 1]) / 2,
        "gap": patches,
        "token+gap": (joint[:, 0] + patches) / 2,
        "hybrid": joint[:, 0],
    }
    if out.pool_attention is not None:
        rows[name] = (out.pool_attention.mean(1)[:, :, None] * joint).sum(1)
    heatmap = rollout_map(net, images)
    assert heatmap.shape == (2, *config.grid)
    torch.testing.assert_close(heatmap.flatten(1), rows[name][:, special:])
    assert (heatmap.sum((1, 2)) <= 1 + 1e-5).all()


def test_grid_follows_the_image_size():
    net = randomized(build(small()))
    assert rollout_map(net, torch.randn(1, 3, 48, 24)).shape == (1, 6, 3)


def test_rollout_uses_evaluation_mode_and_restores_training_mode():
    net = randomized(build(ViTConfig(**small().to_dict() | {"dropout": 0.5, "drop_path": 0.5})))
    images = torch.randn(1, 3, 32, 32)
    expected = rollout_map(net.eval(), images)
    assert isinstance(net.train(), ViT)
    assert torch.equal(rollout_map(net, images), expected)
    assert net.training
    assert not expected.requires_grad


def test_network_without_attention_is_an_error():
    net = build(BiTConfig(image_size=32, num_classes=2, layers=(1, 1, 1, 1), width_factor=0.5))
    with pytest.raises(ModelError, match="no attention"):
        rollout_map(net, torch.randn(1, 3, 32, 32))
