"""compute_once() makes a compiled graph compute a value once, and does not change the result."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from vitrail.kernels.compute_once import compute_once


def test_eager_mode_returns_the_tensor_itself() -> None:
    x = torch.arange(3)
    assert compute_once(x) is x


def broadcast_product(x: Tensor, wide: Tensor) -> Tensor:
    return wide * compute_once((x * 7 + 3) ^ (x >> 2))[:, None]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_graph_has_no_breaks_and_the_same_result(backend: str) -> None:
    torch.compiler.reset()
    x, wide = torch.arange(5), torch.randn(5, 9, requires_grad=True)
    compiled = torch.compile(broadcast_product, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(x, wide), broadcast_product(x, wide))
    compiled(x, wide).sum().backward()
    torch.testing.assert_close(wide.grad, broadcast_product(x, torch.ones(5, 9)))


@pytest.mark.slow
def test_inductor_computes_the_value_once() -> None:
    torch.compiler.reset()
    _, (code,) = run_and_get_code(torch.compile(broadcast_product, fullgraph=True), torch.arange(5), torch.randn(5, 9))
    assert "vitrail.compute_once" in code
    assert code.count("async_compile.cpp_pybinding(") == 2, "one loop over 5, one over 5 x 9"
