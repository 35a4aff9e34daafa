"""The fused linear layer and GELU against its plain twin."""

from __future__ import annotations

import pytest
import torch
from compare import relative
from hypothesis import given
from hypothesis import strategies as st

from vitrail.kernels import linear_gelu
from vitrail.kernels.linear_gelu import linear_gelu_tanh, linear_gelu_tanh_plain


@given(st.lists(st.integers(1, 5), min_size=0, max_size=3), st.integers(1, 40), st.integers(1, 40), st.booleans())
def test_the_twins_agree(batch: list[int], inputs: int, outputs: int, with_bias: bool) -> None:
    x, weight = torch.randn(*batch, inputs), torch.randn(outputs, inputs)
    bias = torch.randn(outputs) if with_bias else None
    with torch.no_grad():
        got, wanted = linear_gelu_tanh(x, weight, bias), linear_gelu_tanh_plain(x, weight, bias)
    assert got.shape == wanted.shape
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_strided_inputs_agree() -> None:
    x, weight, bias = torch.randn(7, 3, 16).transpose(0, 1)[:, ::2], torch.randn(16, 24).t(), torch.randn(24)
    with torch.no_grad():
        assert relative(linear_gelu_tanh(x, weight, bias), linear_gelu_tanh_plain(x, weight, bias)) <= 1e-6


def test_gradients_come_from_the_plain_twin() -> None:
    leaves = [torch.randn(4, 16, requires_grad=True), torch.randn(24, 16, requires_grad=True), torch.randn(24)]
    linear_gelu_tanh(*leaves).square().sum().backward()
    got = [leaf.grad.clone() for leaf in leaves[:2]]
    for leaf in leaves[:2]:
        leaf.grad = None
    linear_gelu_tanh_plain(*leaves).square().sum().backward()
    assert all(torch.equal(a, leaf.grad) for a, leaf in zip(got, leaves, strict=False))


def test_it_is_fused_exactly_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    if not linear_gelu._has_onednn():
        pytest.skip("this PyTorch has no oneDNN")
    plain: list[int] = []
    monkeypatch.setattr(linear_gelu, "linear_gelu_tanh_plain", lambda *a: plain.append(1) or linear_gelu_tanh_plain(*a))
    x, weight = torch.randn(4, 16), torch.nn.Parameter(torch.randn(24, 16))

    def counts(**changes: torch.Tensor) -> int:
        plain.clear()
        linear_gelu_tanh(changes.get("x", x), changes.get("weight", weight), None)
        return len(plain)

    assert counts() == 1, "gradients may be wanted"
    with torch.no_grad():
        assert counts() == 0
        assert counts(x=x.double(), weight=weight.double()) == 1
        with monkeypatch.context() as patch:
            patch.setattr(linear_gelu, "_has_onednn", lambda: False)
            assert counts() == 1
        assert torch.vmap(lambda row: linear_gelu_tanh(row, weight, None))(x).shape == (4, 24)
    with torch.inference_mode():
        assert counts() == 0
