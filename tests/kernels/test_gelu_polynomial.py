"""The cheap GELU agrees with the exact one on every bfloat16 number."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from compare import relative
from torch import Tensor

from vitrail.config import ViTConfig
from vitrail.kernels.choice import force
from vitrail.kernels.gelu_polynomial import LIMIT, gelu, gelu_derivative
from vitrail.models.layers import MLP


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


def test_the_tanh_form_is_exact_to_float32() -> None:
    x = all_bfloat16()
    found = gelu(x.float(), tanh=True).double()
    torch.testing.assert_close(found, F.gelu(x, approximate="tanh"), rtol=3e-6, atol=1e-6)
    x.requires_grad_()
    (exact,) = torch.autograd.grad(F.gelu(x, approximate="tanh").sum(), x)
    torch.testing.assert_close(gelu_derivative(x.detach().float(), tanh=True).double(), exact, rtol=0, atol=3e-6)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("tanh", [False, True])
def test_networks_compiled_with_the_cheap_gelu_agree(tanh: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a graph that is compiled in 16 bits uses it; no graph breaks, and gradients agree."""
    torch.compiler.reset()
    mlp = MLP(ViTConfig(width=32, num_heads=2, mlp_dim=64, activation="gelu-tanh" if tanh else "gelu"))
    for p in mlp.parameters():
        torch.nn.init.normal_(p, std=0.3)
    x = torch.randn(3, 5, 32)
    monkeypatch.setattr("vitrail.models.layers.can_use_compiled_gelu", lambda x: torch.compiler.is_compiling())
    run = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    with force({"gelu": "polynomial"}):
        results = [(out, *torch.autograd.grad(out.square().sum(), list(mlp.parameters()))) for out in (mlp(x), run(x))]
    assert not torch.equal(results[0][0], results[1][0]), "the formula differs"
    for expected, found in zip(*results, strict=True):
        assert relative(found, expected) <= 3e-4


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
