"""The cheap GELU agrees with the exact one on every bfloat16 number."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.kernels.gelu_polynomial import LIMIT, gelu, gelu_derivative


def all_bfloat16() -> Tensor:
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).double()
    return numbers[numbers.isfinite()]


def ulp(x: Tensor) -> Tensor:
    """Distance of neighboring bfloat16 numbers at x."""
    return torch.exp2(torch.floor(torch.log2(x.abs())) - 7)


def test_values_are_within_a_fifth_of_a_bfloat16_ulp() -> None:
    x = all_bfloat16()
    exact, found = F.gelu(x), gelu(x.float()).double()
    large = exact.abs() >= 2**-12
    assert ((found - exact).abs() / ulp(exact))[large].max() < 0.2
    assert (found - exact).abs()[~large].max() < 2e-6
    rounded = (found.bfloat16() != exact.bfloat16())[large]
    assert rounded.float().mean() < 0.02, "and few of them round to another bfloat16"


def test_derivatives_are_within_a_quarter_ulp_of_one_half() -> None:
    x = all_bfloat16().requires_grad_()
    (exact,) = torch.autograd.grad(F.gelu(x).sum(), x)
    found = gelu_derivative(x.detach().float()).double()
    assert (found - exact).abs().max() < 3.5e-4


def test_infinities_and_nan_are_those_of_gelu() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 1e30, -1e30, 0.0])
    found = gelu(x)
    assert found[0] == math.inf
    assert found[2].isnan()
    torch.testing.assert_close(found[3:], torch.tensor([1e30, 0.0, 0.0]), atol=2e-6, rtol=0)
    assert abs(found[1]) < 2e-6
    assert gelu_derivative(x)[[0, 1, 3, 4]].sub(torch.tensor([1.0, 0.0, 1.0, 0.0])).abs().max() < 1e-5


def test_the_approximation_is_continuous_at_its_limit() -> None:
    beside = torch.tensor([LIMIT - 1e-3, LIMIT + 1e-3, -LIMIT + 1e-3, -LIMIT - 1e-3])
    assert (gelu(beside) - F.gelu(beside)).abs().max() < 1e-6
