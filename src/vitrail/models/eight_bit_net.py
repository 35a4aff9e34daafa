"""Vision Transformers whose blocks have 8-bit products, for inference."""

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
from vitrail.kernels.eight_bit import (
    EIGHT_BIT,
    LARGEST,
    TINY,
    EightBitLinear,
    eight_bit_gelu,
    eight_bit_residual,
    quantize_rows,
    to_e4m3,
)
from vitrail.kernels.fused_mlp import MIN_ROWS
from vitrail.models.layers import MLP, Block, gelu_tanh
from vitrail.runtime import private_torch

# x: ... D; M hidden width

NetT = TypeVar("NetT", bound=nn.Module)


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
        out = eight_bit_residual(hidden, down.weight, down.bias, scale, down.weight_scale, rows)
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


def to_eight_bit(net: NetT, selected: Callable[[str], bool] = lambda name: not name.endswith("attention.out")) -> NetT:
    """A copy of a network for inference whose blocks have 8-bit linear layers; `selected` tells by name which ones.

    The patch projection and the heads keep their precision, and so do attention's output layers: converting their
    inputs, which no LayerNorm or GELU precedes, takes as long as the faster product saves.
    """
    net = copy.deepcopy(net).eval()
    if not any(isinstance(module, Block) for module in net.modules()):
        raise ModelError(f"{EIGHT_BIT} is supported for Vision Transformers only, not for {type(net).__name__}.")
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
