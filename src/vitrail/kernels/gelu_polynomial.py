"""The exact GELU, cheap enough for the epilogue of a matrix product.

GELU(x) = x Phi(x), where Phi is the normal distribution function, needs erf, which takes about thirty instructions.
For t = |x|

    GELU(x) = max(x, 0) - t exp(-t^2 / 2) R(t)
    GELU'(x) = (x > 0) +- exp(-t^2 / 2) (R(t) - t / sqrt(2 pi)),      + for x <= 0

with R(t) = Phi(-t) exp(t^2 / 2), which is smooth: a polynomial of degree 6 on [0, 5] and one exponential, about twelve
instructions. The polynomial minimizes the largest error relative to max(|GELU(-t)|, 2^-11). Before rounding, values are
within 0.17 bfloat16 ulp of the exact GELU where that is 2^-12 or larger, and derivatives within 3.4e-4. Elsewhere, for
x < -3.7, the absolute error is less than 4e-7. NaN and infinities give what GELU gives.
"""

from __future__ import annotations

import torch
from torch import Tensor

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


def gelu(x: Tensor) -> Tensor:
    """The approximation in PyTorch, in the dtype of x."""
    t = x.abs().clamp(max=LIMIT)
    return x.clamp(min=0) - t * torch.exp2(EXPONENT * t * t) * _polynomial(t)


def gelu_derivative(x: Tensor) -> Tensor:
    t = x.abs().clamp(max=LIMIT)
    tail = torch.exp2(EXPONENT * t * t) * (_polynomial(t) - SLOPE * t)
    return torch.where(x > 0, 1 - tail, tail)


def _polynomial(t: Tensor) -> Tensor:
    result = torch.full_like(t, COEFFICIENTS[-1])
    for coefficient in COEFFICIENTS[-2::-1]:
        result = result * t + coefficient
    return result
