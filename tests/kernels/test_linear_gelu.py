"""The fused linear layer and GELU against its plain twin, and where it is used."""

from __future__ import annotations

import pytest
import torch
from compare import relative
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vitrail.config import ViTConfig
from vitrail.kernels import linear_gelu
from vitrail.kernels.linear_gelu import can_fuse_linear_gelu, linear_gelu_tanh, linear_gelu_tanh_reference
from vitrail.models.layers import MLP

pytestmark = pytest.mark.skipif(not linear_gelu._has_onednn(), reason="this PyTorch has no oneDNN")


@given(st.lists(st.integers(1, 5), min_size=0, max_size=3), st.integers(1, 40), st.integers(1, 40), st.booleans())
def test_the_twins_agree(batch: list[int], inputs: int, outputs: int, with_bias: bool) -> None:
    x, weight = torch.randn(*batch, inputs), torch.randn(outputs, inputs)
    bias = torch.randn(outputs) if with_bias else None
    got, expected = linear_gelu_tanh(x, weight, bias), linear_gelu_tanh_reference(x, weight, bias)
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_strided_inputs_agree() -> None:
    x, weight, bias = torch.randn(7, 3, 16).transpose(0, 1)[:, ::2], torch.randn(16, 24).t(), torch.randn(24)
    assert relative(linear_gelu_tanh(x, weight, bias), linear_gelu_tanh_reference(x, weight, bias)) <= 1e-6


def test_it_is_used_exactly_where_nothing_can_tell() -> None:
    layer, x = nn.Linear(16, 24), torch.randn(4, 16)
    assert not can_fuse_linear_gelu(layer, x), "gradients may be expected"
    with torch.no_grad():
        assert can_fuse_linear_gelu(layer, x)
        assert not can_fuse_linear_gelu(nn.Linear(16, 24).double(), x.double())
        assert not can_fuse_linear_gelu(nn.Sequential(layer), x), "a wrapped layer"
        assert not torch.vmap(lambda row: torch.tensor(can_fuse_linear_gelu(layer, row)))(x).any()
        with torch.autocast("cpu", torch.bfloat16):
            assert not can_fuse_linear_gelu(layer, x)
        handle = layer.register_forward_hook(lambda *_: None)
        assert not can_fuse_linear_gelu(layer, x), "somebody listens"
        handle.remove()
        assert can_fuse_linear_gelu(layer, x)
    with torch.inference_mode():
        assert can_fuse_linear_gelu(layer, x)


@pytest.mark.parametrize("grad", [False, True])
def test_hooks_wrappers_and_counters_see_every_layer(grad: bool) -> None:
    mlp, x = MLP(ViTConfig(width=16, num_heads=2, mlp_dim=24)), torch.randn(4, 16)
    seen: list[str] = []
    with torch.set_grad_enabled(grad):
        expected = mlp(x)
        for name, layer in mlp.named_children():
            layer.register_forward_hook(lambda *_, name=name: seen.append(name))
        assert relative(mlp(x), expected) <= 1e-6
        assert seen == ["up", "down"]
        mlp = MLP(ViTConfig(width=16, num_heads=2, mlp_dim=24))
        with FlopCounterMode(display=False) as counter:
            mlp(x)
        assert counter.get_total_flops() == 2 * 2 * 4 * 16 * 24
