"""Fused linear layer and GELU: agreement with the plain PyTorch version, and when it is used."""

from __future__ import annotations

import pytest
import torch
from compare import relative
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vitrail.config import ViTConfig
from vitrail.kernels.linear_gelu import can_fuse_linear_gelu, linear_gelu_tanh, linear_gelu_tanh_reference
from vitrail.models.layers import MLP
from vitrail.runtime import private_torch

pytestmark = pytest.mark.skipif(private_torch.linear_gelu_tanh() is None, reason="this PyTorch has no oneDNN")


@given(st.lists(st.integers(1, 5), min_size=0, max_size=3), st.integers(1, 40), st.integers(1, 40), st.booleans())
def test_fused_and_reference_versions_agree(batch: list[int], inputs: int, outputs: int, with_bias: bool) -> None:
    x, weight = torch.randn(*batch, inputs), torch.randn(outputs, inputs)
    bias = torch.randn(outputs) if with_bias else None
    got, expected = linear_gelu_tanh(x, weight, bias), linear_gelu_tanh_reference(x, weight, bias)
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_strided_inputs_agree() -> None:
    x, weight, bias = torch.randn(7, 3, 16).transpose(0, 1)[:, ::2], torch.randn(16, 24).t(), torch.randn(24)
    assert relative(linear_gelu_tanh(x, weight, bias), linear_gelu_tanh_reference(x, weight, bias)) <= 1e-6


def test_fusion_is_used_only_without_gradients_hooks_and_autocast() -> None:
    layer, x = nn.Linear(16, 24), torch.randn(4, 16)
    assert not can_fuse_linear_gelu(layer, x), "gradients are enabled"
    with torch.no_grad():
        assert can_fuse_linear_gelu(layer, x)
        assert not can_fuse_linear_gelu(nn.Linear(16, 24).double(), x.double())
        assert not can_fuse_linear_gelu(nn.Sequential(layer), x), "a wrapped layer"
        assert not torch.vmap(lambda row: torch.tensor(can_fuse_linear_gelu(layer, row)))(x).any()
        with torch.autocast("cpu", torch.bfloat16):
            assert not can_fuse_linear_gelu(layer, x)
        handle = layer.register_forward_hook(lambda *_: None)
        assert not can_fuse_linear_gelu(layer, x), "the layer has a forward hook"
        handle.remove()
        assert can_fuse_linear_gelu(layer, x)
    with torch.inference_mode():
        assert can_fuse_linear_gelu(layer, x)


@pytest.mark.parametrize("grad", [False, True])
def test_hooks_and_flop_counters_see_every_layer(grad: bool) -> None:
    mlp, x = MLP(ViTConfig(width=16, num_heads=2, mlp_dim=24)), torch.randn(4, 16)
    called: list[str] = []
    with torch.set_grad_enabled(grad):
        expected = mlp(x)
        for name, layer in mlp.named_children():
            layer.register_forward_hook(lambda *_, name=name: called.append(name))
        assert relative(mlp(x), expected) <= 1e-6
        assert called == ["up", "down"]
        mlp = MLP(ViTConfig(width=16, num_heads=2, mlp_dim=24))
        with FlopCounterMode(display=False) as counter:
            mlp(x)
        assert counter.get_total_flops() == 2 * 2 * 4 * 16 * 24
