"""Linear layers in 8-bit floats (e4m3) for inference: weights scaled by output channel, inputs by token.

The scale of a token is found as its values are computed: torch.compile makes one kernel of LayerNorm or GELU, the
largest absolute value of each row, and the conversion. (One scale for a whole tensor needs a pass of its own.) On a
GPU the product is `torch._scaled_mm`; elsewhere the 8-bit values are multiplied in the input's dtype, which gives the
same up to rounding and serves to measure the accuracy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.errors import ModelError
from vitrail.kernels import choice
from vitrail.kernels.choice import Backend, backend_for
from vitrail.kernels.fused_mlp import MIN_ROWS
from vitrail.models.layers import MLP, Block, gelu_tanh
from vitrail.runtime import private_torch

# x: ... D; weight: M D

NetT = TypeVar("NetT", bound=nn.Module)

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


class EightBitMLP(MLP):
    """An MLP with GELU, for inference, whose hidden values are e4m3 too, with one scale for all of them.

    No input exceeds that scale: a layer behind a LayerNorm has |w x + b| <= sqrt(D) |w gamma| + |w beta + b|. Since
    e4m3 has 15 octaves of full precision, a scale that is too large by far costs nothing, and the largest value of each
    row, which needs a pass over wide rows, is not computed.
    """

    hidden_scale: Tensor

    def __init__(self, mlp: MLP, norm: nn.LayerNorm) -> None:
        nn.Module.__init__(self)
        self.register_buffer("hidden_scale", (hidden_bound(mlp.up, norm) / LARGEST).clamp(min=TINY))
        self.up, self.down = EightBitLinear(mlp.up), EightBitLinear(mlp.down)  # type: ignore[assignment]
        self.activation, self.dropout = mlp.activation, mlp.dropout

    def forward(self, x: Tensor, hidden_seeds: Tensor | None = None, output_seeds: Tensor | None = None) -> Tensor:
        """The seeds are for dropout, which is for training."""
        hidden, scale = self._hidden(x)
        return cast(EightBitLinear, self.down).multiply(hidden, scale, x.dtype).view(x.shape)

    def adds_residual(self, x: Tensor) -> bool:
        return self.backend(x) == "triton" and backend_for("8-bit residual", x.device) == "triton"

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        hidden, scale = self._hidden(x)
        down, rows = cast(EightBitLinear, self.down), residual.flatten(0, -2)
        out: Tensor = torch.ops.vitrail.eight_bit_residual(
            hidden, down.weight, down.bias, scale, down.weight_scale, rows
        )
        return out.view(residual.shape)

    def _hidden(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden values as e4m3, n M, and their scales, n 1."""
        up, scale = cast(EightBitLinear, self.up), self.hidden_scale.float()
        values, row_scale = quantize_rows(x.flatten(0, -2))
        if self.backend(x) == "triton":
            tanh = self.activation is gelu_tanh
            hidden = eight_bit_gelu(values, up.weight, up.bias, row_scale, up.weight_scale, scale, tanh)
        else:
            hidden = to_e4m3(self.activate(up.multiply(values, row_scale, x.dtype)), scale)
        return hidden, scale.expand(len(hidden), 1).contiguous()

    def backend(self, x: Tensor) -> Backend:
        if not isinstance(x, Tensor) or (torch.is_grad_enabled() and x.requires_grad):  # torch.fx passes no tensor
            return "plain"
        is_large = (
            x.device.type == choice.DEVICE_TYPE and x.shape[:-1].numel() >= MIN_ROWS and self.up.in_features % 16 == 0
        )
        return backend_for("8-bit mlp", x.device) if is_large and not private_torch.is_exporting() else "plain"


def hidden_bound(layer: nn.Linear, norm: nn.LayerNorm) -> Tensor:
    """The largest absolute value that a linear layer behind a LayerNorm can give."""
    weight = layer.weight.detach().double()
    largest = weight.shape[1] ** 0.5 * (weight * norm.weight.detach()).norm(dim=1)
    shift = weight @ norm.bias.detach().double() + layer.bias.detach()
    return (largest + shift.abs()).amax().float()


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


@torch.library.custom_op("vitrail::eight_bit_residual", mutates_args=())
def _eight_bit_residual(
    values: Tensor, weight: Tensor, bias: Tensor, row_scale: Tensor, column_scale: Tensor, residual: Tensor
) -> Tensor:
    """A product of e4m3 values, n M, and weights, D M, plus the residual, n D."""
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


def to_eight_bit(net: NetT, selected: Callable[[str], bool] = lambda name: not name.endswith("attention.out")) -> NetT:
    """A copy of a network for inference whose blocks have 8-bit linear layers; `selected` tells by name which ones.

    The patch projection and the heads keep their precision, and so do attention's output layers: converting their
    inputs, which no LayerNorm or GELU precedes, takes as long as the faster product saves.
    """
    net = copy.deepcopy(net).eval()
    if not any(isinstance(module, Block) for module in net.modules()):
        raise ModelError(f"{EIGHT_BIT} is for the blocks of a Vision Transformer, and {type(net).__name__} has none.")
    for name, module in list(net.named_modules()):
        both = selected(f"{name}.mlp.up") and selected(f"{name}.mlp.down")
        if both and isinstance(module, Block) and _is_bounded(module):
            module.mlp = EightBitMLP(module.mlp, cast(nn.LayerNorm, module.norm2))
    for name, module in list(net.named_modules()):
        whole_bias = getattr(module, "bias", None) is None or getattr(module, "key_bias", True)
        if isinstance(module, nn.Linear) and whole_bias and name.startswith("blocks.") and selected(name):
            parent, _, last = name.rpartition(".")
            setattr(net.get_submodule(parent), last, EightBitLinear(module))
    return net


def _is_bounded(block: Block) -> bool:
    """Whether the hidden values of its MLP have a bound that follows from the weights."""
    mlp, norm = block.mlp, block.norm2
    plain = type(mlp) is MLP and mlp.activation in (F.gelu, gelu_tanh) and mlp.up.bias is not None
    return plain and isinstance(norm, nn.LayerNorm) and norm.bias is not None


def is_eight_bit(net: nn.Module) -> bool:
    """Whether a network has 8-bit layers."""
    return any(isinstance(module, EightBitLinear) for module in net.modules())
