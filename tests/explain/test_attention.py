"""Attention one layer at a time: the same as the network's own, without keeping what was seen."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from compare import randomized
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import small

from vitrail.config import BiTConfig, StemConfig, ViTConfig
from vitrail.errors import ModelError
from vitrail.explain import attention as attention_module
from vitrail.explain import attention_distance, rollout_map
from vitrail.explain.attention import (
    AttentionIterator,
    attention_maps,
    layer_index,
    parse_query,
    query_weights,
    special_token_names,
    token_index,
)
from vitrail.models import build

KINDS = {
    "token": small(),
    "registers": small(num_registers=3),
    "distilled": small(distilled=True),
    "gap": small(pool="gap", class_token=False),
    "token+gap": small(pool="token+gap"),
    "map": small(pool="map", class_token=False),
    "coca": small(pool="coca", pool_width=6, pool_heads=3),
    "relative": small(position="relative"),
    "rope": small(position="rope-2d"),
    "every layer": small(position="learned-1d", position_at="layers"),
    "hybrid": small(image_size=64, patch_size=1, stem=StemConfig(layers=(1, 1), width_factor=0.5)),
    "qk-norm": small(qk_norm=True, layer_scale=0.1),
}


def image(config: ViTConfig, count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, *config.image_size)


@pytest.mark.parametrize("name", KINDS)
def test_a_walk_sees_what_the_network_computes(name: str):
    config = KINDS[name]
    net = randomized(build(config)).eval()
    images = image(config)
    want = ("attention", "logits", *(["pool_attention"] if net.pool is not None else []))
    with torch.no_grad():
        out = net.features(images, outputs=want)
        plain = net(images)
    walk = AttentionIterator(net, images)
    for got, expected in zip(walk, out.attention, strict=True):
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(got.sum(-1), torch.ones(got.shape[:3]))
    torch.testing.assert_close(walk.logits, plain, atol=2e-5, rtol=1e-4)
    if config.pool == "map":
        torch.testing.assert_close(walk.pool_attention, out.pool_attention)


def test_only_the_layers_asked_for_are_written_out(monkeypatch: pytest.MonkeyPatch):
    net = randomized(build(small(depth=4))).eval()
    images = image(net.config)
    seen = []
    for block in net.blocks:
        plain = block.attention.forward

        def watched(x, place=None, keep=None, seed=None, plain=plain):
            seen.append(keep is not None)
            return plain(x, place, keep, seed)

        monkeypatch.setattr(block.attention, "forward", watched)
    (got,) = AttentionIterator(net, images, layers=(2,))
    assert seen == [False, False, True, False]
    torch.testing.assert_close(got, net.features(images, outputs=("attention",)).attention[2])


def test_a_layer_is_gone_when_the_next_one_is_computed():
    """So that any depth needs the memory of one layer."""
    net = randomized(build(small(depth=5))).eval()
    alive: list[weakref.ref] = []
    for attention in AttentionIterator(net, image(net.config)):
        alive.append(weakref.ref(attention))
        del attention
        gc.collect()
        assert [ref() is not None for ref in alive] == [False] * len(alive)


def test_whoever_rolls_out_measures_or_views_keeps_one_layer_at_a_time(monkeypatch: pytest.MonkeyPatch):
    net = randomized(build(small(depth=5))).eval()
    alive: list[weakref.ref] = []
    most = []

    def watched(attention: torch.Tensor, plain=attention_module.full_precision) -> torch.Tensor:
        most.append(sum(ref() is not None for ref in alive))  # before this one
        found = plain(attention).clone()
        alive.append(weakref.ref(found))
        return found

    monkeypatch.setattr(attention_module, "full_precision", watched)
    for look in (rollout_map, attention_maps, attention_distance):
        look(net, image(net.config))
    assert most == [0] * 15


def test_a_network_in_training_goes_on_training_while_it_is_watched():
    net = randomized(build(small(dropout=0.5))).train()
    images = image(net.config)
    expected = [a.clone() for a in AttentionIterator(net.eval(), images)]
    net.train()
    for got, want in zip(AttentionIterator(net, images), expected, strict=True):
        assert net.training  # the caller's turn
        assert torch.equal(got, want)
    assert torch.is_grad_enabled()


def test_half_precision_rows_still_sum_to_one():
    net = randomized(build(small())).eval().bfloat16()
    for attention in AttentionIterator(net, image(net.config).bfloat16()):
        assert attention.dtype == torch.float32
        torch.testing.assert_close(attention.sum(-1), torch.ones(attention.shape[:3]))


@pytest.mark.parametrize("name", KINDS)
def test_views_and_what_goes_to_special_tokens_make_up_everything(name: str):
    config = KINDS[name]
    net = randomized(build(config)).eval()
    views, special = attention_maps(net, image(config))
    assert views.shape == (config.depth, 2, config.num_heads, *config.grid)
    assert special.shape == (config.depth, 2, config.num_heads, config.num_prefix_tokens)
    torch.testing.assert_close(views.sum((3, 4)) + special.sum(3), torch.ones(config.depth, 2, config.num_heads))


def test_a_patch_is_asked_by_its_row_and_column():
    config = small(num_registers=2)
    net = randomized(build(config)).eval()
    images = image(config)
    attention = net.features(images, outputs=("attention",)).attention
    views, special = attention_maps(net, images, query=(2, 3))
    token = 3 + 1 * config.grid[1] + 2
    for layer, whole in enumerate(attention):
        torch.testing.assert_close(views[layer].flatten(2), whole[:, :, token, 3:])
        torch.testing.assert_close(special[layer], whole[:, :, token, :3])


def test_special_tokens_have_names():
    net = build(small(distilled=True, num_registers=2))
    assert special_token_names(net.config) == ("class", "distill", "register 1", "register 2")
    assert [token_index(net, name, (4, 4)) for name in special_token_names(net.config)] == [0, 1, 2, 3]
    assert token_index(net, (1, 1), (4, 4)) == 4


@settings(max_examples=25)
@given(st.sampled_from(sorted(KINDS)), st.integers(0, 20))
def test_what_the_head_reads_is_a_distribution_over_tokens(name: str, seed: int):
    config = KINDS[name]
    torch.manual_seed(seed)
    weights = query_weights(randomized(build(config)), image(config))
    np.testing.assert_allclose(weights.sum(1).numpy(), 1, atol=1e-5)
    assert (weights >= 0).all()


@pytest.mark.parametrize(("text", "query"), [("7,3", (7, 3)), (" 0 x 12", (0, 12)), ("Register-2", "register 2")])
def test_a_query_is_written_as_people_write_it(text: str, query: object):
    assert parse_query(text) == query


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("distill", "no token 'distill': it has class, register 1 and patches"),
        ((5, 1), "no patch in row 5, column 1: the grid has rows 1 to 4 and columns 1 to 4"),
        ((0, 1), "no patch in row 0, column 1"),
    ],
)
def test_a_token_that_is_not_there_is_refused(query: object, words: str):
    net = build(small(num_registers=1))
    with pytest.raises(ModelError, match=words):
        attention_maps(net, image(net.config), query=query)


@pytest.mark.parametrize("layer", [0, 3, -3, 99])
def test_a_layer_that_does_not_exist_is_refused(layer: int):
    with pytest.raises(ModelError, match=f"there is no layer {layer}: this network has layers 1 to 2"):
        layer_index(build(small()), layer)


def test_layers_count_from_one_or_from_the_end():
    net = build(small(depth=4))
    assert [layer_index(net, n) for n in (1, 4, -1, -4)] == [0, 3, 3, 0]


def test_a_network_without_attention_is_refused():
    net = build(BiTConfig(image_size=32, num_classes=2, layers=(1, 1, 1, 1), width_factor=0.5))
    with pytest.raises(ModelError, match="BiT has no attention"):
        AttentionIterator(net, torch.randn(1, 3, 32, 32))
