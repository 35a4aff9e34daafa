"""The MLP's products with bias, GELU and residual in their epilogues, forward and backward, for Hopper GPUs.

    linear_gelu       GELU(x weight^T + bias)
    fused_mlp         linear_gelu, then the second layer; in its backward pass the product with the second weight
                      multiplies by GELU' and sums the columns for the bias, and computes GELU again, so that only
                      its argument is stored
    linear_residual   x weight^T + bias + residual

Each takes a backend: plain (PyTorch, the reference), triton (`triton_products`) or quack (`quack_products`). On an H200
the plain version took 1.12 ms for 100,864 x 768 -> 3,072 (ViT-B/16, 512 images), of which the product alone takes 0.69;
predicted are 0.78 for triton and 0.66 for quack (`python benchmarks/fast_path.py gemm`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.kernels import choice, gelu_polynomial
from vitrail.kernels.choice import Backend
from vitrail.runtime import private_torch

# x: n D; weight: M D (as in nn.Linear); results: n M

MIN_ROWS = 1024
"""With fewer rows there are too few tiles for a GPU."""
ALIGNMENT = 16
"""Tensor memory access needs rows that start at multiples of this many bytes."""


def mlp_reference(
    x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, tanh: bool = False
) -> Tensor:
    """Linear, GELU (`tanh`: that form of it), Linear."""
    return F.linear(F.gelu(F.linear(x, up, up_bias), approximate=_form(tanh)), down, down_bias)


def fused_mlp(
    x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, backend: Backend, tanh: bool = False
) -> Tensor:
    """The same, ... D -> ... D; requires `can_fuse`."""
    rows = x.flatten(0, -2)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, up, up_bias, down, down_bias)):
        out: Tensor = _MLP.apply(rows, up, up_bias, down, down_bias, backend, tanh)  # type: ignore[no-untyped-call]
    else:
        out = torch.addmm(down_bias, linear_gelu(rows, up, up_bias, backend, tanh), down.t())
    return out.view(x.shape)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, backend: Backend, tanh: bool = False) -> Tensor:
    """GELU of a linear layer, n D -> n M, without gradients."""
    out: Tensor = torch.ops.vitrail.linear_gelu(x, weight, bias, backend, tanh)
    return out


def _form(tanh: bool) -> str:
    return "tanh" if tanh else "none"


def linear_residual(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, backend: Backend) -> Tensor:
    """A linear layer plus the residual, n D -> n M, without gradients."""
    out: Tensor = torch.ops.vitrail.linear_residual(x, weight, bias, residual, backend)
    return out


def can_fuse(x: Tensor, *layers: nn.Module) -> bool:
    """Whether the kernels apply: many bfloat16 rows on a GPU, layers with biases, aligned widths and no hooks."""
    if not isinstance(x, Tensor) or x.device.type != choice.DEVICE_TYPE:  # torch.fx passes what is not a tensor
        return False
    if compute_dtype(x) != torch.bfloat16 or x.shape[:-1].numel() < MIN_ROWS:
        return False
    compiling = torch.compiler.is_compiling()
    if private_torch.is_exporting() or not (compiling or private_torch.is_plain_eager()):
        return False  # an exported graph has no operators of this package, and transforms do not know them
    return all(_is_plain(layer) for layer in layers)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a linear layer computes: autocast's, if it is enabled."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _is_plain(layer: nn.Module) -> bool:
    if type(layer) is not nn.Linear or layer.bias is None or layer._forward_hooks or layer._forward_pre_hooks:
        return False
    if type(layer.weight) not in (Tensor, nn.Parameter):  # sharded or quantized
        return False
    if not torch.compiler.is_compiling() and private_torch.has_hooks(layer):
        return False
    return layer.in_features % ALIGNMENT == 0 and layer.out_features % ALIGNMENT == 0


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, backend: Backend, tanh: bool
    ) -> Tensor:
        hidden, argument = torch.ops.vitrail.linear_gelu_keep(x, up, up_bias, backend, tanh)
        ctx.save_for_backward(x, up, down, argument)
        ctx.options = backend, tanh
        return torch.addmm(down_bias, hidden, down.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, up, down, argument = ctx.saved_tensors
        grad = grad.contiguous()
        grad_argument, hidden, sums = torch.ops.vitrail.linear_dgelu(grad, down, argument, *ctx.options)
        return (
            grad_argument @ up,
            grad_argument.t() @ x,
            sums.to(up.dtype),
            grad.t() @ hidden,
            grad.sum(0),
            None,
            None,
        )


@torch.library.custom_op("vitrail::linear_gelu", mutates_args=())
def _linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, backend: str, tanh: bool) -> Tensor:
    if backend == "quack" and not tanh:
        from vitrail.kernels import quack_products

        return quack_products.linear_gelu(x, weight, bias)
    if backend == "triton":
        from vitrail.kernels import triton_products

        out = x.new_empty(x.shape[0], weight.shape[0])
        triton_products.launch("gelu", x, weight, out, bias=bias, tanh=tanh)
        return out
    return F.gelu(F.linear(x, weight, bias), approximate=_form(tanh))


@_linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, backend: str, tanh: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op("vitrail::linear_gelu_keep", mutates_args=())
def _linear_gelu_keep(x: Tensor, weight: Tensor, bias: Tensor, backend: str, tanh: bool) -> tuple[Tensor, Tensor]:
    if backend == "quack" and not tanh:
        from vitrail.kernels import quack_products

        return quack_products.linear_gelu_keep(x, weight, bias)
    if backend == "triton":
        from vitrail.kernels import triton_products

        out = x.new_empty(x.shape[0], weight.shape[0])
        argument = torch.empty_like(out)
        triton_products.launch("gelu", x, weight, out, bias=bias, argument=argument, tanh=tanh)
        return out, argument
    argument = F.linear(x, weight, bias)
    return F.gelu(argument, approximate=_form(tanh)), argument


@_linear_gelu_keep.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, backend: str, tanh: bool) -> tuple[Tensor, Tensor]:
    shape = x.shape[0], weight.shape[0]
    return x.new_empty(shape), x.new_empty(shape)


@torch.library.custom_op("vitrail::linear_dgelu", mutates_args=())
def _linear_dgelu(
    grad: Tensor, weight: Tensor, argument: Tensor, backend: str, tanh: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(grad weight) GELU'(argument), GELU(argument), and the column sums of the first in float32."""
    if backend == "quack" and not tanh:
        from vitrail.kernels import quack_products

        return quack_products.dgelu(grad, weight, argument)
    if backend == "triton":
        from vitrail.kernels import triton_products

        return triton_products.dgelu(grad, weight, argument, tanh)
    product = (grad @ weight).float() * gelu_polynomial.gelu_derivative(argument.float(), tanh)
    return product.to(grad.dtype), F.gelu(argument, approximate=_form(tanh)), product.sum(0)


@_linear_dgelu.register_fake
def _(grad: Tensor, weight: Tensor, argument: Tensor, backend: str, tanh: bool) -> tuple[Tensor, Tensor, Tensor]:
    sums = argument.new_empty(argument.shape[1], dtype=torch.float32)
    return argument.new_empty(argument.shape), argument.new_empty(argument.shape), sums


@torch.library.custom_op("vitrail::linear_residual", mutates_args=())
def _linear_residual(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, backend: str) -> Tensor:
    if backend == "quack":
        from vitrail.kernels import quack_products

        return quack_products.linear_residual(x, weight, bias, residual)
    if backend == "triton":
        from vitrail.kernels import triton_products

        out = residual.new_empty(residual.shape)
        triton_products.launch("linear", x, weight, out, bias=bias, residual=residual, config=triton_products.RESIDUAL)
        return out
    return (F.linear(x, weight, bias) + residual).contiguous()


@_linear_residual.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, backend: str) -> Tensor:
    return residual.new_empty(residual.shape)
