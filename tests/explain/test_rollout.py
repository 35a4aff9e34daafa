"""Rollout against its definition, and what the head reads for every way of pooling."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compare import randomized
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import small
from torch import Tensor

from vitrail.config import BiTConfig, StemConfig, ViTConfig
from vitrail.errors import ModelError
from vitrail.explain import rollout, rollout_map
from vitrail.models import ViT, build

POOLS = {
    "token": small(),
    "registers": small(num_registers=3),
    "distilled": small(distilled=True),
    "gap": small(pool="gap", class_token=False),
    "token+gap": small(pool="token+gap"),
    "map": small(pool="map", class_token=False),
    "coca": small(pool="coca", pool_width=6, pool_heads=3),
    "hybrid": small(image_size=64, patch_size=1, stem=StemConfig(layers=(1, 1), width_factor=0.5)),
}


def layers(count: int, batch: int, heads: int, tokens: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, heads, tokens, tokens, generator=generator, dtype=torch.float64).softmax(-1)
        for _ in range(count)
    ]


def by_hand(attention: list[np.ndarray]) -> np.ndarray:
    """One image, H T T a layer: the recursion, entry by entry."""
    tokens = attention[0].shape[-1]
    joint = np.eye(tokens)
    for layer in attention:
        mean = sum(layer[h] for h in range(len(layer))) / len(layer)
        after = np.zeros((tokens, tokens))
        for i in range(tokens):
            for j in range(tokens):
                after[i, j] = sum((0.5 * mean[i, k] + 0.5 * (i == k)) * joint[k, j] for k in range(tokens))
        joint = after
    return joint


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 6), st.integers(0, 99))
def test_rollout_is_its_definition_and_rows_are_distributions(
    count: int, batch: int, heads: int, tokens: int, seed: int
):
    attention = layers(count, batch, heads, tokens, seed)
    got = rollout(attention)
    for b in range(batch):
        np.testing.assert_allclose(got[b].numpy(), by_hand([a[b].numpy() for a in attention]), atol=1e-12)
    torch.testing.assert_close(got.sum(-1), torch.ones(batch, tokens, dtype=torch.float64))


def test_tokens_that_look_at_themselves_only_stay_themselves():
    self_only = torch.eye(5).expand(2, 3, 5, 5)
    torch.testing.assert_close(rollout([self_only] * 4), torch.eye(5).expand(2, 5, 5))


def test_rollout_reads_a_stream():
    attention = layers(3, 1, 2, 4)
    assert torch.equal(rollout(iter(attention)), rollout(attention))


def test_no_layer_is_refused():
    with pytest.raises(ModelError, match="no layer"):
        rollout([])


@pytest.mark.parametrize("name", POOLS)
def test_the_view_is_what_the_head_reads(name: str):
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
    view = rollout_map(net, images)
    assert view.shape == (2, *config.grid)
    torch.testing.assert_close(view.flatten(1), rows[name][:, special:])
    assert (view.sum((1, 2)) <= 1 + 1e-5).all()


def test_other_sizes_have_other_grids():
    net = randomized(build(small()))
    assert rollout_map(net, torch.randn(1, 3, 48, 24)).shape == (1, 6, 3)


def test_a_network_in_training_is_looked_at_as_in_evaluation_and_goes_on_training():
    net = randomized(build(ViTConfig(**small().to_dict() | {"dropout": 0.5, "drop_path": 0.5})))
    images = torch.randn(1, 3, 32, 32)
    expected = rollout_map(net.eval(), images)
    assert isinstance(net.train(), ViT)
    assert torch.equal(rollout_map(net, images), expected)
    assert net.training
    assert not expected.requires_grad


def test_a_network_without_attention_is_refused():
    net = build(BiTConfig(image_size=32, num_classes=2, layers=(1, 1, 1, 1), width_factor=0.5))
    with pytest.raises(ModelError, match="no attention"):
        rollout_map(net, torch.randn(1, 3, 32, 32))
