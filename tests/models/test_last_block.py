"""The last block of a network that pools its class token computes that token only, and the logits stay the same."""

from __future__ import annotations

import pytest
import torch
from compare import relative
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitrail import rng
from vitrail.config import ViTConfig
from vitrail.models import ViT, build
from vitrail.models.flops import count_flops

SMALL = ViTConfig(image_size=16, patch_size=4, num_classes=5, width=16, depth=3, num_heads=2, mlp_dim=32)
CONFIGS = {
    "class token": SMALL,
    "distilled, with registers": SMALL.replace(distilled=True, num_registers=2),
    "norm after the pool": SMALL.replace(pool_norm="after"),
    "no norm": SMALL.replace(pool_norm="none"),
    "relative positions": SMALL.replace(position="relative"),
    "rotary positions, normalized queries": SMALL.replace(position="rope-2d", qk_norm=True),
    "dropout, stochastic depth and LayerScale": SMALL.replace(dropout=0.2, drop_path=0.3, layer_scale=0.5),
}
ALL_TOKENS = {
    "mean of the patches": SMALL.replace(pool="gap", class_token=False),
    "class token and mean": SMALL.replace(pool="token+gap"),
    "attention pooling": SMALL.replace(pool="map", class_token=False),
}


def random_network(config: ViTConfig) -> ViT:
    net = build(config, 0).double()
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(p.numel()))
    assert isinstance(net, ViT)
    return net


def logits_of_all_tokens(net: ViT, images: Tensor, seeds: Tensor | None) -> Tensor:
    logits = net.features(images, outputs=("logits", "patches"), sample_seeds=seeds).logits
    assert logits is not None
    return logits


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_logits_and_gradients_equal_those_of_all_tokens(name: str, checkpointing: bool) -> None:
    net, images = random_network(CONFIGS[name]).train(), torch.randn(3, 3, 16, 16, dtype=torch.float64)
    net.gradient_checkpointing = checkpointing
    seeds = rng.seeds_to_tensor(rng.sample_seeds(1, 2, torch.arange(3).numpy()), images.device)
    found = []
    for run in (net, lambda x, s: logits_of_all_tokens(net, x, s)):
        net.zero_grad()
        logits = run(images, seeds)
        logits.square().sum().backward()
        found.append([logits.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1]) > 10
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-11)


def executed_flops(net: ViT, images: Tensor) -> int:
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        net(images)
    return int(counter.get_total_flops())


def test_the_saved_flops_are_those_of_the_last_blocks_other_tokens() -> None:
    net, images, config = build(SMALL, 0).eval(), torch.randn(1, 3, 16, 16), SMALL
    tokens, width = 17, config.width
    other = 2 * (tokens - 1) * (width * width + 2 * width * config.mlp_dim + 2 * tokens * width)
    assert executed_flops(net, images) == count_flops(config) - other


def test_features_of_the_pooled_tokens_are_those_of_all_tokens() -> None:
    net, images = random_network(CONFIGS["distilled, with registers"]).eval(), torch.randn(2, 3, 16, 16).double()
    names = ("logits", "head_logits", "pooled", "class_token")
    few, all_tokens = net.features(images, outputs=names), net.features(images, outputs=(*names, "patches"))
    for name in names:
        torch.testing.assert_close(getattr(few, name), getattr(all_tokens, name), rtol=1e-9, atol=1e-11)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        net.features(images, outputs="pooled")
    pooled_flops = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        net.features(images, outputs=("pooled", "patches"))
    assert pooled_flops < counter.get_total_flops()


@pytest.mark.parametrize("name", ALL_TOKENS)
def test_other_pools_need_all_tokens(name: str) -> None:
    net, images = build(ALL_TOKENS[name], 0).eval(), torch.randn(1, 3, 16, 16)
    assert executed_flops(net, images) == count_flops(ALL_TOKENS[name])


@pytest.mark.parametrize("hooked", ["blocks.2", "blocks.2.mlp.up", "norm"])
def test_hooks_see_all_tokens(hooked: str) -> None:
    net, images, seen = random_network(SMALL).eval(), torch.randn(2, 3, 16, 16, dtype=torch.float64), []
    expected = net(images)
    net.get_submodule(hooked).register_forward_hook(lambda _module, _inputs, out: seen.append(out.shape[1]))
    assert relative(net(images), expected) <= 1e-12
    assert seen == [17]


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_network_agrees_without_graph_breaks(backend: str) -> None:
    torch.compiler.reset()
    net, images = random_network(SMALL).eval(), torch.randn(2, 3, 16, 16, dtype=torch.float64)
    compiled = torch.compile(net, fullgraph=True, backend=backend)
    assert relative(compiled(images), logits_of_all_tokens(net, images, None)) <= 1e-9
