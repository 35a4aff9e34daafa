"""A value that a compiled graph computes once, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from vitrail.kernels.materialize import materialize


def test_outside_a_graph_it_is_the_tensor_itself() -> None:
    x = torch.arange(3)
    assert materialize(x) is x


def spread(x: Tensor, wide: Tensor) -> Tensor:
    return wide * materialize((x * 7 + 3) ^ (x >> 2))[:, None]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_graph_stays_whole_and_gives_the_same(backend: str) -> None:
    torch.compiler.reset()
    x, wide = torch.arange(5), torch.randn(5, 9, requires_grad=True)
    compiled = torch.compile(spread, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(x, wide), spread(x, wide))
    compiled(x, wide).sum().backward()
    torch.testing.assert_close(wide.grad, spread(x, torch.ones(5, 9)))


@pytest.mark.slow
def test_inductor_does_not_inline_what_is_settled() -> None:
    torch.compiler.reset()
    _, (code,) = run_and_get_code(torch.compile(spread, fullgraph=True), torch.arange(5), torch.randn(5, 9))
    assert "vitrail.settled" in code
    assert code.count("async_compile.cpp_pybinding(") == 2, "one loop over 5, one over 5 x 9"
