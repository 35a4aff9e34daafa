"""Packed attention: agreement with fused attention, forward and backward, and when it is used."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from compare import randomized, relative
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitrail.config import ViTConfig
from vitrail.kernels.packed_attention import (
    MAX_TOKENS,
    can_pack_attention,
    packed_attention,
    packed_attention_reference,
)
from vitrail.models import ViT

SMALL = {"image_size": 16, "patch_size": 4, "width": 16, "depth": 2, "num_heads": 2, "mlp_dim": 24, "num_classes": 5}


@settings(max_examples=30)
@given(st.integers(1, 3), st.integers(1, 20), st.integers(1, 4), st.integers(1, 9), st.booleans())
def test_packed_and_fused_attention_agree_forward_and_backward(
    batch: int, tokens: int, heads: int, size: int, strided: bool
) -> None:
    shape = (batch, tokens, 3 * heads * size)
    qkv = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(batch, tokens, heads * size, dtype=torch.float64)
    if strided:
        grad = torch.randn(tokens, batch, heads * size, dtype=torch.float64).transpose(0, 1)
    results = []
    for attention in (packed_attention_reference, packed_attention):
        out = attention(qkv, heads)
        results.append((out, *torch.autograd.grad(out, qkv, grad)))
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_gradient_agrees_with_finite_differences() -> None:
    qkv = torch.randn(2, 5, 18, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: packed_attention(x, 3), qkv)


def test_large_logits_do_not_overflow() -> None:
    qkv = (1e4 * torch.randn(2, 5, 12)).requires_grad_()
    out = packed_attention(qkv, 2)
    out.sum().backward()
    assert out.isfinite().all()
    assert qkv.grad.isfinite().all()


def test_packing_is_used_only_with_gradients_and_default_settings() -> None:
    qkv = torch.randn(2, 5, 12, requires_grad=True)
    assert can_pack_attention(qkv)
    assert not can_pack_attention(qkv.detach()), "without gradients, fused attention is faster and stores nothing"
    with torch.no_grad():
        assert not can_pack_attention(qkv)
    with torch.autocast("cpu", torch.bfloat16):
        assert not can_pack_attention(qkv)
    with sdpa_kernel(SDPBackend.MATH):
        assert not can_pack_attention(qkv), "another kernel is selected"
    with FlopCounterMode(display=False):
        assert not can_pack_attention(qkv)
    assert not can_pack_attention(torch.randn(1, MAX_TOKENS + 1, 12, requires_grad=True))
    assert not can_pack_attention(torch.randn(2, 5, 12, dtype=torch.bfloat16, requires_grad=True))
    torch.func.grad(lambda x: (not can_pack_attention(x)) * x.sum())(qkv.detach())
    assert torch.func.grad(lambda x: x.sum() * (2 - can_pack_attention(x)))(torch.ones(1, 1, 3)).tolist() == [
        [[2, 2, 2]]
    ]


@pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"position": "rope-2d"}, {"position": "relative"}])
def test_gradients_are_the_same_with_and_without_packing(options: dict[str, object]) -> None:
    net, images = randomized(ViT(ViTConfig(**SMALL, **options))).double().train(), torch.randn(3, 3, 16, 16).double()
    gradients = []
    for kernels in ([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], [SDPBackend.MATH]):
        net.zero_grad()
        with sdpa_kernel(kernels):
            net(images).square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    assert relative(gradients[0], gradients[1]) <= 1e-12


def test_cpu_training_packs_and_evaluation_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    # With a class token the last block computes that token alone, without packing.
    net = randomized(ViT(ViTConfig(**SMALL, pool="gap", class_token=False))).train()
    images, calls = torch.randn(2, 3, 16, 16), []
    fused = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or fused(*a, **k))
    net(images)
    assert not calls
    with torch.no_grad():
        net.eval()(images)
    assert len(calls) == 2
    net.train().requires_grad_(False)
    net(images)
    assert len(calls) == 4  # nothing to pack without gradients
