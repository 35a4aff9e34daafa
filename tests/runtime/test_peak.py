"""The peak of a device is the fastest product of a training step, whichever that is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vitrail.runtime import peak
from vitrail.runtime.peak import LAYOUTS, measured_peak, slowdown

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peak, "SECONDS", 0.0)
    measured_peak.cache_clear()
    yield
    measured_peak.cache_clear()


def test_the_layouts_are_those_of_a_linear_layer():
    """Its output, the gradient of its weight, the gradient of its input; the same matrix for all of them."""
    a = torch.arange(9.0).sin().view(3, 3)
    x, weight = a.clone().requires_grad_(), a.clone().requires_grad_()
    out = torch.nn.functional.linear(x, weight)
    out.backward(a)
    for product, wanted in zip(LAYOUTS, (out, weight.grad, x.grad), strict=True):
        torch.testing.assert_close(product(a), wanted)


@pytest.mark.parametrize("fast", range(3))
def test_the_fastest_layout_and_size_are_the_peak(fast: int, monkeypatch: pytest.MonkeyPatch):
    """As on a CPU without bfloat16, where one layout is 30 times faster than another."""
    seen = []

    def rate(product, a, wait):
        seen.append((LAYOUTS.index(product), len(a)))
        return (30e9 if seen[-1][0] == fast else 1e9) * (2 if len(a) == 512 else 1)

    monkeypatch.setattr(peak, "_rate", rate)
    monkeypatch.setattr(peak, "SECONDS", 60.0)
    clock = iter(range(100))
    monkeypatch.setattr(peak, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(peak, "_sides", lambda *_: (256, 512, 1024))
    assert measured_peak(CPU, torch.bfloat16) == 60e9
    assert {layout for layout, side in seen if side == 256} == {0, 1, 2}
    assert {layout for layout, side in seen if side > 256} == {fast}  # a slow one would take seconds


def test_a_peak_is_measured_once():
    found = measured_peak(CPU, torch.float32)
    assert 1e8 < found < 1e15
    assert measured_peak(CPU, torch.float32) == found


def test_a_slowdown_is_that_of_all_three_products(monkeypatch: pytest.MonkeyPatch):
    rates = {(dtype, layout): 8e9 for dtype in (torch.float32, torch.bfloat16) for layout in range(3)}
    rates[torch.bfloat16, 2] = 1e9
    monkeypatch.setattr(peak, "_rate", lambda product, a, wait: rates[a.dtype, LAYOUTS.index(product)])
    assert slowdown(CPU, torch.bfloat16) == pytest.approx((1 + 1 + 8) / 3)


@pytest.mark.gpu
def test_a_gpus_peak_is_that_of_its_matrix_units():
    assert 1e13 < measured_peak(torch.device("cuda"), torch.bfloat16) < 1e16
