"""Linear layers in 8-bit floats (e4m3) for inference: weights scaled by output channel, inputs by token.

The scale of a token is found as its values are computed: torch.compile makes one kernel of LayerNorm or GELU, the
largest absolute value of each row, and the conversion. (One scale for a whole tensor needs a pass of its own.) On a
GPU the product is `torch._scaled_mm`; elsewhere the 8-bit values are multiplied in the input's dtype, which gives the
same up to rounding and serves to measure the accuracy.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.runtime import private_torch

# x: ... D; weight: M D

EIGHT_BIT = "float8"
"""The name of this precision."""
E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
TINY = 1e-12
"""Smallest scale: that of a row of zeros."""


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """n D -> e4m3, n D, and float32 scales, n 1, such that x = values * scales up to rounding."""
    full = x.float()
    scale = full.abs().amax(-1, keepdim=True).clamp(min=TINY) / LARGEST
    return (full / scale).to(E4M3), scale


class EightBitLinear(nn.Module):
    """nn.Linear with an e4m3 weight, for inference."""

    weight: Tensor
    weight_scale: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight, scale = quantize_rows(layer.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", scale.t().contiguous())  # 1 M
        self.bias = layer.bias
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.scaled_mm = private_torch.scaled_mm()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EightBitLinear:
        """Moves to a device; a cast, such as net.bfloat16(), is for the bias only."""
        weight, scale = self.weight, self.weight_scale
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.weight, self.weight_scale = weight.to(self.weight.device), scale.to(self.weight.device)
        return self

    def forward(self, x: Tensor) -> Tensor:
        out = self.multiply(*quantize_rows(x.flatten(0, -2)), x.dtype)
        return out.view(*x.shape[:-1], self.out_features)

    def multiply(self, values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """The layer for e4m3 values, n D, with scales, n 1."""
        has_gradient = torch.is_grad_enabled() and values.requires_grad
        if values.device.type == "cuda" and self.scaled_mm is not None and not has_gradient:
            bias = None if self.bias is None else self.bias.to(torch.bfloat16)
            return self.scaled_mm(values, self.weight.t(), scale, self.weight_scale, bias).to(dtype)
        weight = self.weight.to(dtype) * self.weight_scale.t().to(dtype)
        return F.linear(values.to(dtype) * scale.to(dtype), weight, self.bias)


def is_eight_bit(net: nn.Module) -> bool:
    """Whether a network has 8-bit layers."""
    return any(isinstance(module, EightBitLinear) for module in net.modules())


def to_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale, rounded; larger values than e4m3 has become its largest."""
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(E4M3)


def eight_bit_gelu(
    values: Tensor, weight: Tensor, bias: Tensor, row_scale: Tensor, column_scale: Tensor, out_scale: Tensor, tanh: bool
) -> Tensor:
    """GELU of a product of e4m3 values, n D, and weights, M D, as e4m3, n M, by a kernel for GPUs."""
    out: Tensor = torch.ops.vitrail.eight_bit_gelu(values, weight, bias, row_scale, column_scale, out_scale, tanh)
    return out


@torch.library.custom_op("vitrail::eight_bit_gelu", mutates_args=())
def _eight_bit_gelu(
    values: Tensor, weight: Tensor, bias: Tensor, row_scale: Tensor, column_scale: Tensor, out_scale: Tensor, tanh: bool
) -> Tensor:
    from vitrail.kernels import triton_products

    out = values.new_empty(len(values), len(weight))
    triton_products.launch(
        "gelu", values, weight, out, bias=bias, row_scale=row_scale, column_scale=column_scale, out_scale=out_scale,
        tanh=tanh, config=triton_products.EIGHT_BIT_GELU,
    )  # fmt: skip
    return out


@_eight_bit_gelu.register_fake
def _(
    values: Tensor, weight: Tensor, bias: Tensor, row_scale: Tensor, column_scale: Tensor, out_scale: Tensor, tanh: bool
) -> Tensor:
    return values.new_empty(len(values), len(weight))


def eight_bit_residual(
    values: Tensor, weight: Tensor, bias: Tensor, row_scale: Tensor, column_scale: Tensor, residual: Tensor
) -> Tensor:
    """A product of e4m3 values, n M, and weights, D M, plus the residual, n D, by a kernel for GPUs."""
    out: Tensor = torch.ops.vitrail.eight_bit_residual(values, weight, bias, row_scale, column_scale, residual)
    return out


@torch.library.custom_op("vitrail::eight_bit_residual", mutates_args=())
def _eight_bit_residual(
    values: Tensor, weight: Tensor, bias: Tensor, row_scale: Tensor, column_scale: Tensor, residual: Tensor
) -> Tensor:
    from vitrail.kernels import triton_products

    out = residual.new_empty(residual.shape)
    triton_products.launch(
        "linear", values, weight, out, bias=bias, row_scale=row_scale, column_scale=column_scale, residual=residual,
        config=triton_products.EIGHT_BIT_RESIDUAL,
    )  # fmt: skip
    return out


@_eight_bit_residual.register_fake
def _(
    values: Tensor, weight: Tensor, bias: Tensor, row_scale: Tensor, column_scale: Tensor, residual: Tensor
) -> Tensor:
    return residual.new_empty(residual.shape)
