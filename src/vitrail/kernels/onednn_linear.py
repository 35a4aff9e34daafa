"""Linear layers in float32 with oneDNN's matrix products, forward and backward, for CPUs where MKL's are slow.

PyTorch computes a linear layer with MKL, which on an AMD EPYC is as slow with AVX-512 as without. There, on one core,
a layer of 192 to 768 channels took 4.3 ms for 8 images of 197 tokens with MKL and 2.0 ms with oneDNN, and 13.6 and 7.2
with the backward pass (`python benchmarks/kernels.py --threads 1`). Limited to AVX2, the forward pass was 1.1 times
as fast with oneDNN, and the backward pass no faster.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.runtime import private_torch
from vitrail.runtime.cpu import detect_cpu

# ... x D -> ... x M; n rows in total


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weight^T + bias."""
    return F.linear(x, weight, bias)


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same; requires `can_use_onednn`."""
    if _records_gradients(x, weight, bias):
        out: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return out
    return _product(x, weight, bias)


def apply_linear(layer: nn.Module, x: Tensor) -> Tensor:
    """`layer(x)` of an nn.Linear, or of what has replaced it, by the fastest kernel."""
    if not torch.compiler.is_compiling() and type(layer) is nn.Linear and not private_torch.has_hooks(layer):
        return project(x, layer.weight, layer.bias)
    out: Tensor = layer(x)
    return out


def project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weight^T + bias by the fastest kernel."""
    return onednn_linear(x, weight, bias) if can_use_onednn(x, weight, bias) else F.linear(x, weight, bias)


def can_use_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `onednn_linear` applies and is faster: float32 on a CPU, plain tensors, no autocast or transform."""
    if type(x) is not Tensor or x.device.type != "cpu" or not private_torch.is_plain_eager():
        return False
    if not onednn_is_faster(training=_records_gradients(x, weight, bias)):
        return False
    plain = type(weight) in (Tensor, nn.Parameter) and x.dtype == weight.dtype == torch.float32
    return plain and x.ndim > 1 and x.numel() > 0 and not torch.is_autocast_enabled("cpu")


@cache
def onednn_is_faster(training: bool) -> bool:
    """Whether this is a CPU on which oneDNN's products are faster than MKL's, and this torch has them."""
    cpu, needed = detect_cpu(), "AVX-512" if training else "AVX2"
    return "AMD" in cpu.name.upper() and needed in cpu.instructions and private_torch.linear() is not None


def _records_gradients(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    operator = private_torch.linear() or F.linear
    return operator(x, weight, bias)


class _Linear(torch.autograd.Function):
    """`onednn_linear` with gradients, which can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = grad.flatten(0, -2)  # n M
        return (
            onednn_linear(grad, weight.t(), None) if needs_x else None,
            onednn_linear(rows.t(), x.flatten(0, -2).t(), None) if needs_weight else None,  # M D
            rows.sum(0) if needs_bias and ctx.has_bias else None,
        )
