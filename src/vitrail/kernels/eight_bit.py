"""Linear layers in 8-bit floats (e4m3) for inference: weights scaled by output channel, inputs by token.

The scale of a token is found as its values are computed: torch.compile makes one kernel of LayerNorm or GELU, the
largest absolute value of each row, and the conversion. (One scale for a whole tensor needs a pass of its own.) On a
GPU the product is `torch._scaled_mm`; elsewhere the 8-bit values are multiplied in the input's dtype, which gives the
same up to rounding and serves to measure the accuracy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.runtime import private_torch

# x: ... D; weight: M D

NetT = TypeVar("NetT", bound=nn.Module)

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
        values, scale = quantize_rows(x.flatten(0, -2))
        if x.device.type == "cuda" and self.scaled_mm is not None:
            bias = None if self.bias is None else self.bias.to(torch.bfloat16)
            out = self.scaled_mm(values, self.weight.t(), scale, self.weight_scale, bias).to(x.dtype)
        else:
            weight = self.weight.to(x.dtype) * self.weight_scale.t().to(x.dtype)
            out = F.linear(values.to(x.dtype) * scale.to(x.dtype), weight, self.bias)
        return out.view(*x.shape[:-1], self.out_features)


def to_eight_bit(net: NetT, selected: Callable[[str], bool] = lambda name: True) -> NetT:
    """A copy of a network for inference whose blocks have 8-bit linear layers; `selected` tells by name which ones.

    The patch projection and the heads keep their precision.
    """
    net = copy.deepcopy(net).eval()
    for name, module in list(net.named_modules()):
        whole_bias = getattr(module, "bias", None) is None or getattr(module, "key_bias", True)
        if isinstance(module, nn.Linear) and whole_bias and name.startswith("blocks.") and selected(name):
            parent, _, last = name.rpartition(".")
            setattr(net.get_submodule(parent), last, EightBitLinear(module))
    return net
