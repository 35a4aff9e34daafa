"""GELU, cheap enough for the epilogue of a matrix product, and in a kernel of its own limited by memory alone.

The exact GELU(x) = x Phi(x), where Phi is the normal distribution function, needs erf, which takes about thirty
instructions. For t = |x|

    GELU(x) = max(x, 0) - t exp(-t^2 / 2) R(t)
    GELU'(x) = (x > 0) +- exp(-t^2 / 2) (R(t) - t / sqrt(2 pi)),      + for x <= 0

with R(t) = Phi(-t) exp(t^2 / 2), which is smooth: a polynomial of degree 6 on [0, 5] and one exponential, about twelve
instructions. The polynomial minimizes the largest error relative to max(|GELU(-t)|, 2^-11). Before rounding, values are
within 0.17 bfloat16 ulp of the exact GELU where that is 2^-12 or larger, and derivatives within 3.4e-4. Elsewhere, for
x < -3.7, the absolute error is less than 4e-7. NaN and infinities give what GELU gives.

The tanh form is x / (1 + exp(-2 u)) with u = sqrt(2 / pi) (x + 0.044715 x^3): an exponential and a division.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitrail.kernels import choice
from vitrail.runtime import private_torch

LIMIT = 5.0
"""Beyond this |x|, R and the exponential are those of the limit: GELU is x or 0 to within 1.5e-6."""
COEFFICIENTS = (
    0.49966609477996826,
    -0.39197811484336853,
    0.2228337675333023,
    -0.08854448050260544,
    0.02246127463877201,
    -0.0031918813474476337,
    0.00019100801728200167,
)
"""Of R, from the constant to t^6."""
EXPONENT = -0.7213475204444817
"""-log2(e) / 2: exp(-t^2 / 2) = 2 ** (EXPONENT t^2)."""
SLOPE = 0.3989422804014327
"""1 / sqrt(2 pi)."""

TANH_LIMIT = 10.0
"""Beyond this |x| the tanh form is x or 0 in float32."""
TANH_SCALE, TANH_CUBE = 1.5957691216057308, 0.044715
"""2 sqrt(2 / pi), and the factor of x^3."""
LOG2_E = 1.4426950408889634


def gelu(x: Tensor, tanh: bool = False) -> Tensor:
    """The approximation in PyTorch, in the dtype of x."""
    if tanh:
        return x.clamp(min=-TANH_LIMIT) * _sigmoid(x.clamp(-TANH_LIMIT, TANH_LIMIT))
    t = x.abs().clamp(max=LIMIT)
    return x.clamp(min=0) - t * torch.exp2(EXPONENT * t * t) * _polynomial(t)


def gelu_derivative(x: Tensor, tanh: bool = False) -> Tensor:
    if tanh:
        x = x.clamp(-TANH_LIMIT, TANH_LIMIT)
        s = _sigmoid(x)
        return s + x * s * (1 - s) * (TANH_SCALE + 3 * TANH_SCALE * TANH_CUBE * x * x)
    t = x.abs().clamp(max=LIMIT)
    tail = torch.exp2(EXPONENT * t * t) * (_polynomial(t) - SLOPE * t)
    return torch.where(x > 0, 1 - tail, tail)


def _polynomial(t: Tensor) -> Tensor:
    result = torch.full_like(t, COEFFICIENTS[-1])
    for coefficient in COEFFICIENTS[-2::-1]:
        result = result * t + coefficient
    return result


def _sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-2 u))."""
    return 1 / (1 + torch.exp2(-LOG2_E * TANH_SCALE * x * (1 + TANH_CUBE * x * x)))


def compiled_gelu(x: Tensor, tanh: bool = False) -> Tensor:
    """F.gelu in 16 bits by these formulas, with gradients, for a graph whose compiler makes one kernel of them."""
    out: Tensor = _Gelu.apply(x, tanh)  # type: ignore[no-untyped-call]
    return out


def can_use_compiled_gelu(x: Tensor) -> bool:
    """Whether `compiled_gelu` applies: a graph is compiled, for 16 bits on a GPU. Eager, it would be twenty kernels."""
    if not torch.compiler.is_compiling() or private_torch.is_exporting():
        return False
    return x.device.type == choice.DEVICE_TYPE and x.dtype in (torch.bfloat16, torch.float16)


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tanh: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.tanh = tanh
        out = gelu(x.float(), tanh)
        return out if out.dtype == x.dtype else out.to(x.dtype)  # torch 2.11 loses gradients in no-op casts

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return (grad.float() * gelu_derivative(x.float(), ctx.tanh)).to(grad.dtype), None
