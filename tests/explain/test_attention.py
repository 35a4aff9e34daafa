"""Attention one layer at a time: equal to that of the network, with one layer in memory."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from compare import randomized
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import POOLS, small

from vitrail.config import BiTConfig, ViTConfig
from vitrail.errors import ModelError
from vitrail.explain import attention as attention_module
from vitrail.explain import attention_distance, rollout_map
from vitrail.explain.attention import (
    AttentionIterator,
    attention_maps,
    layer_index,
    parse_query,
    query_weights,
    token_index,
)
from vitrail.models import build

CONFIGS = POOLS | {
    "relative": small(position="relative"),
    "rope": small(position="rope-2d"),
    "every layer": small(position="learned-1d", position_at="layers"),
    "qk-norm": small(qk_norm=True, layer_scale=0.1),
}


def random_images(config: ViTConfig, count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, *config.image_size)


@pytest.mark.parametrize("name", CONFIGS)
def test_attention_iterator_yields_the_attention_of_the_network(name: str):
    config = CONFIGS[name]
    net = randomized(build(config)).eval()
    images = random_images(config)
    want = ("attention", "logits", *(["pool_attention"] if net.pool is not None else []))
    with torch.no_grad():
        out = net.features(images, outputs=want)
        plain = net(images)
    iterator = AttentionIterator(net, images)
    for got, expected in zip(iterator, out.attention, strict=True):
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(got.sum(-1), torch.ones(got.shape[:3]))
    torch.testing.assert_close(iterator.logits, plain, atol=2e-5, rtol=1e-4)
    if config.pool == "map":
        torch.testing.assert_close(iterator.pool_attention, out.pool_attention)


def test_attention_weights_are_stored_only_for_requested_layers(monkeypatch: pytest.MonkeyPatch):
    net = randomized(build(small(depth=4))).eval()
    images = random_images(net.config)
    stored = []
    for block in net.blocks:
        original = block.attention.forward

        def forward(x, qk_transform=None, weights_out=None, *others, original=original):
            stored.append(weights_out is not None)
            return original(x, qk_transform, weights_out, *others)

        monkeypatch.setattr(block.attention, "forward", forward)
    (got,) = AttentionIterator(net, images, layers=(2,))
    assert stored == [False, False, True, False]
    torch.testing.assert_close(got, net.features(images, outputs=("attention",)).attention[2])


def test_layer_is_freed_before_the_next_one_is_computed():
    """Any depth needs the memory of one layer only."""
    net = randomized(build(small(depth=5))).eval()
    references: list[weakref.ref] = []
    for attention in AttentionIterator(net, random_images(net.config)):
        references.append(weakref.ref(attention))
        del attention
        gc.collect()
        assert [ref() is not None for ref in references] == [False] * len(references)


def test_rollout_maps_and_distances_keep_one_layer_at_a_time(monkeypatch: pytest.MonkeyPatch):
    net = randomized(build(small(depth=5))).eval()
    references: list[weakref.ref] = []
    alive_counts = []

    def counted(attention: torch.Tensor, original=attention_module.full_precision) -> torch.Tensor:
        alive_counts.append(sum(ref() is not None for ref in references))  # before this one
        weights = original(attention).clone()
        references.append(weakref.ref(weights))
        return weights

    monkeypatch.setattr(attention_module, "full_precision", counted)
    for function in (rollout_map, attention_maps, attention_distance):
        function(net, random_images(net.config))
    assert alive_counts == [0] * 15


def test_training_mode_is_restored_between_layers():
    net = randomized(build(small(dropout=0.5))).train()
    images = random_images(net.config)
    expected = [a.clone() for a in AttentionIterator(net.eval(), images)]
    net.train()
    for got, want in zip(AttentionIterator(net, images), expected, strict=True):
        assert net.training  # between two layers
        assert torch.equal(got, want)
    assert torch.is_grad_enabled()


def test_rows_sum_to_one_in_half_precision():
    net = randomized(build(small())).eval().bfloat16()
    for attention in AttentionIterator(net, random_images(net.config).bfloat16()):
        assert attention.dtype == torch.float32
        torch.testing.assert_close(attention.sum(-1), torch.ones(attention.shape[:3]))


@pytest.mark.parametrize("name", CONFIGS)
def test_attention_to_patches_and_prefix_tokens_sums_to_one(name: str):
    config = CONFIGS[name]
    net = randomized(build(config)).eval()
    views, prefix = attention_maps(net, random_images(config))
    assert views.shape == (config.depth, 2, config.num_heads, *config.grid)
    assert prefix.shape == (config.depth, 2, config.num_heads, config.num_prefix_tokens)
    torch.testing.assert_close(views.sum((3, 4)) + prefix.sum(3), torch.ones(config.depth, 2, config.num_heads))


def test_query_is_a_patch_row_and_column():
    config = small(num_registers=2)
    net = randomized(build(config)).eval()
    images = random_images(config)
    attention = net.features(images, outputs=("attention",)).attention
    views, prefix = attention_maps(net, images, query=(2, 3))
    token = 3 + 1 * config.grid[1] + 2
    for layer, weights in enumerate(attention):
        torch.testing.assert_close(views[layer].flatten(2), weights[:, :, token, 3:])
        torch.testing.assert_close(prefix[layer], weights[:, :, token, :3])


def test_prefix_tokens_have_names():
    net = build(small(distilled=True, num_registers=2))
    assert net.config.prefix_token_names == ("class", "distill", "register 1", "register 2")
    assert [token_index(net, name, (4, 4)) for name in net.config.prefix_token_names] == [0, 1, 2, 3]
    assert token_index(net, (1, 1), (4, 4)) == 4


@settings(max_examples=25)
@given(st.sampled_from(sorted(CONFIGS)), st.integers(0, 20))
def test_query_weights_are_a_distribution_over_tokens(name: str, seed: int):
    config = CONFIGS[name]
    torch.manual_seed(seed)
    weights = query_weights(randomized(build(config)), random_images(config))
    np.testing.assert_allclose(weights.sum(1).numpy(), 1, atol=1e-5)
    assert (weights >= 0).all()


@pytest.mark.parametrize(("text", "query"), [("7,3", (7, 3)), (" 0 x 12", (0, 12)), ("Register-2", "register 2")])
def test_queries_are_parsed(text: str, query: object):
    assert parse_query(text) == query


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("distill", "unknown query 'distill'; expected pooled, class, register 1, or a patch"),
        ((5, 1), "no patch in row 5, column 1: the grid has rows 1 to 4 and columns 1 to 4"),
        ((0, 1), "no patch in row 0, column 1"),
    ],
)
def test_unknown_token_is_an_error(query: object, message: str):
    net = build(small(num_registers=1))
    with pytest.raises(ModelError, match=message):
        attention_maps(net, random_images(net.config), query=query)


@pytest.mark.parametrize("layer", [0, 3, -3, 99])
def test_unknown_layer_is_an_error(layer: int):
    with pytest.raises(ModelError, match=f"there is no layer {layer}: this network has layers 1 to 2"):
        layer_index(build(small()), layer)


def test_layers_count_from_one_or_from_the_end():
    net = build(small(depth=4))
    assert [layer_index(net, n) for n in (1, 4, -1, -4)] == [0, 3, 3, 0]


def test_network_without_attention_is_an_error():
    net = build(BiTConfig(image_size=32, num_classes=2, layers=(1, 1, 1, 1), width_factor=0.5))
    with pytest.raises(ModelError, match="BiT has no attention"):
        AttentionIterator(net, torch.randn(1, 3, 32, 32))
