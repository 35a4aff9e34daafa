"""Rotary positions against DINOv3's own code in transformers: waves, turned queries and keys, a whole network."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare import randomized, relative
from conftest import import_peer
from torch import nn

from vitrail.config import ViTConfig
from vitrail.models import ViT
from vitrail.models.position import RotaryPosition2d

import_peer("transformers")
dinov3: Any = import_peer("transformers.models.dinov3_vit.modeling_dinov3_vit")
pytestmark = pytest.mark.peer

WIDTH, HEADS, DEPTH, PATCH = 48, 3, 2, 8


def peer(registers: int = 2, theta: float = 100.0, **options: Any) -> Any:
    config = dinov3.DINOv3ViTConfig(
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        patch_size=PATCH,
        image_size=32,
        num_register_tokens=registers,
        rope_theta=theta,
        attn_implementation="eager",
        **options,
    )
    return randomized(dinov3.DINOv3ViTModel(config))


def ours(registers: int = 2, theta: float = 100.0) -> ViTConfig:
    return ViTConfig(
        image_size=32,
        patch_size=PATCH,
        num_classes=0,
        width=WIDTH,
        depth=DEPTH,
        num_heads=HEADS,
        mlp_dim=64,
        num_registers=registers,
        position="rope-2d",
        rope_base=theta,
        norm_eps=1e-5,
        activation="gelu",
        layer_scale=1.0,
    )


@pytest.mark.parametrize("grid", [(4, 4), (6, 3), (1, 5)])
@pytest.mark.parametrize("theta", [100.0, 10_000.0])
def test_waves_are_the_same(grid: tuple[int, int], theta: float) -> None:
    images = torch.zeros(1, 3, grid[0] * PATCH, grid[1] * PATCH)
    expected = peer(theta=theta).rope_embeddings(images)
    found = RotaryPosition2d(ours(theta=theta)).cos_sin(grid, images)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


@pytest.mark.parametrize("registers", [0, 4])
def test_queries_and_keys_turn_alike_and_special_tokens_do_not(registers: int) -> None:
    grid, images = (6, 3), torch.zeros(1, 3, 6 * PATCH, 3 * PATCH)
    q, k = torch.randn(2, 2, HEADS, 1 + registers + 18, WIDTH // HEADS)
    expected = dinov3.apply_rotary_pos_emb(q, k, *peer(registers).rope_embeddings(images))
    turned_q, turned_k, bias = RotaryPosition2d(ours(registers)).eval()(grid, images)(q, k)
    assert bias is None
    assert relative(turned_q, expected[0]) <= 1e-6
    assert relative(turned_k, expected[1]) <= 1e-6
    assert torch.equal(turned_q[:, :, : 1 + registers], q[:, :, : 1 + registers])


@torch.no_grad()
def test_a_whole_dinov3_gives_the_same_numbers() -> None:
    """Keys have no bias there: zeros here."""
    model, net = peer(), ViT(ours())
    copy(model, net)
    images = torch.randn(2, 3, 48, 24)
    expected = model(images, output_attentions=True)
    found = net.eval().features(images, outputs=("logits", "patches", "attention"))
    assert found.logits is not None
    assert found.patches is not None
    assert found.attention is not None
    assert relative(found.logits, expected.pooler_output) <= 1e-5
    assert relative(found.patches.flatten(1, 2), expected.last_hidden_state[:, 3:]) <= 1e-5
    for a, b in zip(found.attention, expected.attentions, strict=True):
        assert relative(a, b) <= 1e-5


def copy(model: nn.Module, net: ViT) -> None:
    theirs = {name.removeprefix("model."): value for name, value in model.state_dict().items()}
    state = {
        "patch.weight": theirs["embeddings.patch_embeddings.weight"],
        "patch.bias": theirs["embeddings.patch_embeddings.bias"],
        "class_token": theirs["embeddings.cls_token"].flatten(),
        "registers": theirs["embeddings.register_tokens"][0],
        "norm.weight": theirs["norm.weight"],
        "norm.bias": theirs["norm.bias"],
    }
    for i in range(DEPTH):
        block, mine = f"layer.{i}", f"blocks.{i}"
        weights = [theirs[f"{block}.attention.{n}_proj.weight"] for n in "qkv"]
        query, value = (theirs[f"{block}.attention.{n}_proj.bias"] for n in "qv")
        state[f"{mine}.attention.qkv.weight"] = torch.cat(weights)
        state[f"{mine}.attention.qkv.bias"] = torch.cat([query, torch.zeros_like(query), value])
        state[f"{mine}.scale1"] = theirs[f"{block}.layer_scale1.lambda1"]
        state[f"{mine}.scale2"] = theirs[f"{block}.layer_scale2.lambda1"]
        for part in ("weight", "bias"):
            for a, b in (
                ("norm1", "norm1"),
                ("norm2", "norm2"),
                ("attention.o_proj", "attention.out"),
                ("mlp.up_proj", "mlp.up"),
                ("mlp.down_proj", "mlp.down"),
            ):
                state[f"{mine}.{b}.{part}"] = theirs[f"{block}.{a}.{part}"]
    net.load_state_dict(state)
