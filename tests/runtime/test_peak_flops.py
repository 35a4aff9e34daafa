"""The peak FLOP rate of a device is that of the fastest matrix product of a training step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vitrail.runtime import peak_flops
from vitrail.runtime.peak_flops import PRODUCTS, measure_peak_flops, slowdown

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _clear_cache(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peak_flops, "MEASUREMENT_S", 0.0)
    measure_peak_flops.cache_clear()
    yield
    measure_peak_flops.cache_clear()


def test_the_products_are_those_of_a_linear_layer():
    """Output, gradient of the weight, gradient of the input; the same matrix is used for all."""
    a = torch.arange(9.0).sin().view(3, 3)
    x, weight = a.clone().requires_grad_(), a.clone().requires_grad_()
    out = torch.nn.functional.linear(x, weight)
    out.backward(a)
    for product, expected in zip(PRODUCTS, (out, weight.grad, x.grad), strict=True):
        torch.testing.assert_close(product(a), expected)


@pytest.mark.parametrize("fastest", range(3))
def test_peak_is_the_rate_of_the_fastest_layout_and_size(fastest: int, monkeypatch: pytest.MonkeyPatch):
    """On a CPU without bfloat16, one layout is 30 times faster than another."""
    measured = []

    def rate(product, a, synchronize):
        measured.append((PRODUCTS.index(product), len(a)))
        return (30e9 if measured[-1][0] == fastest else 1e9) * (2 if len(a) == 512 else 1)

    monkeypatch.setattr(peak_flops, "_rate", rate)
    monkeypatch.setattr(peak_flops, "MEASUREMENT_S", 60.0)
    clock = iter(range(100))
    monkeypatch.setattr(peak_flops, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(peak_flops, "_sides", lambda *_: (256, 512, 1024))
    assert measure_peak_flops(CPU, torch.bfloat16) == 60e9
    assert {layout for layout, side in measured if side == 256} == {0, 1, 2}
    assert {layout for layout, side in measured if side > 256} == {fastest}  # a slow product would take seconds


def test_a_peak_is_measured_once():
    peak = measure_peak_flops(CPU, torch.float32)
    assert 1e8 < peak < 1e15
    assert measure_peak_flops(CPU, torch.float32) == peak


def test_slowdown_is_the_mean_over_all_three_products(monkeypatch: pytest.MonkeyPatch):
    rates = {(dtype, layout): 8e9 for dtype in (torch.float32, torch.bfloat16) for layout in range(3)}
    rates[torch.bfloat16, 2] = 1e9
    monkeypatch.setattr(peak_flops, "_rate", lambda product, a, synchronize: rates[a.dtype, PRODUCTS.index(product)])
    assert slowdown(CPU, torch.bfloat16) == pytest.approx((1 + 1 + 8) / 3)


@pytest.mark.gpu
def test_gpu_peak_is_that_of_its_tensor_cores():
    assert 1e13 < measure_peak_flops(torch.device("cuda"), torch.bfloat16) < 1e16
