"""Rotary positions against DINOv3's code in transformers: cos and sin, rotated queries and keys, a whole network."""

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
def test_cos_and_sin_match_transformers(grid: tuple[int, int], theta: float) -> None:
    images = torch.zeros(1, 3, grid[0] * PATCH, grid[1] * PATCH)
    expected = peer(theta=theta).rope_embeddings(images)
    got = RotaryPosition2d(ours(theta=theta)).cos_sin(grid, images)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


@pytest.mark.parametrize("registers", [0, 4])
def test_queries_and_keys_are_rotated_and_prefix_tokens_are_not(registers: int) -> None:
    grid, images = (6, 3), torch.zeros(1, 3, 6 * PATCH, 3 * PATCH)
    q, k = torch.randn(2, 2, HEADS, 1 + registers + 18, WIDTH // HEADS)
    expected = dinov3.apply_rotary_pos_emb(q, k, *peer(registers).rope_embeddings(images))
    rotated_q, rotated_k, bias = RotaryPosition2d(ours(registers)).eval()(grid, images)(q, k)
    assert bias is None
    assert relative(rotated_q, expected[0]) <= 1e-6
    assert relative(rotated_k, expected[1]) <= 1e-6
    assert torch.equal(rotated_q[:, :, : 1 + registers], q[:, :, : 1 + registers])


@torch.no_grad()
def test_dinov3_outputs_match_transformers() -> None:
    """DINOv3's keys have no bias; here the bias is zero."""
    theirs, net = peer(), ViT(ours())
    copy_weights(theirs, net)
    images = torch.randn(2, 3, 48, 24)
    expected = theirs(images, output_attentions=True)
    out = net.eval().features(images, outputs=("logits", "patches", "attention"))
    assert out.logits is not None
    assert out.patches is not None
    assert out.attention is not None
    assert relative(out.logits, expected.pooler_output) <= 1e-5
    assert relative(out.patches.flatten(1, 2), expected.last_hidden_state[:, 3:]) <= 1e-5
    for a, b in zip(out.attention, expected.attentions, strict=True):
        assert relative(a, b) <= 1e-5


def copy_weights(theirs: nn.Module, net: ViT) -> None:
    their_state = {name.removeprefix("model."): value for name, value in theirs.state_dict().items()}
    state = {
        "patch.weight": their_state["embeddings.patch_embeddings.weight"],
        "patch.bias": their_state["embeddings.patch_embeddings.bias"],
        "class_token": their_state["embeddings.cls_token"].flatten(),
        "registers": their_state["embeddings.register_tokens"][0],
        "norm.weight": their_state["norm.weight"],
        "norm.bias": their_state["norm.bias"],
    }
    for i in range(DEPTH):
        their_block, our_block = f"layer.{i}", f"blocks.{i}"
        weights = [their_state[f"{their_block}.attention.{n}_proj.weight"] for n in "qkv"]
        query, value = (their_state[f"{their_block}.attention.{n}_proj.bias"] for n in "qv")
        state[f"{our_block}.attention.qkv.weight"] = torch.cat(weights)
        state[f"{our_block}.attention.qkv.bias"] = torch.cat([query, torch.zeros_like(query), value])
        state[f"{our_block}.scale1"] = their_state[f"{their_block}.layer_scale1.lambda1"]
        state[f"{our_block}.scale2"] = their_state[f"{their_block}.layer_scale2.lambda1"]
        for part in ("weight", "bias"):
            for a, b in (
                ("norm1", "norm1"),
                ("norm2", "norm2"),
                ("attention.o_proj", "attention.out"),
                ("mlp.up_proj", "mlp.up"),
                ("mlp.down_proj", "mlp.down"),
            ):
                state[f"{our_block}.{b}.{part}"] = their_state[f"{their_block}.{a}.{part}"]
    net.load_state_dict(state)
