"""Peak rate of matrix products on a device, measured rather than taken from its data sheet."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from vitrail.runtime import private_torch

MEASUREMENT_S = 0.2
"""Approximate duration of one measurement."""
PRODUCTS: list[Callable[[Tensor], Tensor]] = [lambda a: a @ a.T, lambda a: a.T @ a, lambda a: a @ a]
"""The products of a linear layer: its output, the gradient of its weight, the gradient of its input."""


@cache
def measure_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of matrix products: the fastest of several sizes, of the layouts of a training step and of the libraries.

    A CPU without instructions for bfloat16 is up to 30 times faster in one layout than in another. Small products
    are measured too: on a busy machine only a short one runs undisturbed.
    """
    synchronize, products = _synchronizer(device), [*PRODUCTS, *_onednn_products(device, dtype)]
    best, fastest = 0.0, (products[0], torch.ones(1, 1, device=device))
    end = time.perf_counter() + MEASUREMENT_S
    for side in _sides(device, dtype):
        a = _matrix(side, device, dtype)
        rates = {}
        for product in products:
            product(a)  # warm-up
            rates[product] = max(_rate(product, a, synchronize) for _ in range(2))
        leader = max(rates, key=lambda product: rates[product])
        if rates[leader] > best:
            best, fastest = rates[leader], (leader, a)
        products = [product for product in products if rates[product] > rates[leader] / 3]
        if time.perf_counter() > end:
            break
    while time.perf_counter() < end:
        best = max(best, _rate(*fastest, synchronize))
    del fastest, a
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return best


def slowdown(device: torch.device, dtype: torch.dtype, reference: torch.dtype = torch.float32) -> float:
    """Time of the products of a training step in `dtype`, divided by their time in `reference`."""
    synchronize = _synchronizer(device)
    seconds = []
    for each in (dtype, reference):
        a = _matrix(256, device, each)
        seconds.append(sum(1 / max(_rate(product, a, synchronize) for _ in range(3)) for product in PRODUCTS))
    return seconds[0] / seconds[1]


def _onednn_products(device: torch.device, dtype: torch.dtype) -> list[Callable[[Tensor], Tensor]]:
    """oneDNN's float32 product, which linear layers use where it is faster than MKL's."""
    linear = private_torch.linear() if device.type == "cpu" and dtype == torch.float32 else None
    return [] if linear is None else [lambda a: linear(a, a, None)]


def _synchronizer(device: torch.device) -> Callable[[], None]:
    return {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(device.type, lambda: None)


def _matrix(side: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Distinct values, since hardware runs faster on equal ones; not random, which would advance a generator."""
    return torch.arange(side * side, device=device, dtype=torch.float32).sin_().view(side, side).to(dtype)


def _rate(product: Callable[[Tensor], Tensor], a: Tensor, synchronize: Callable[[], None]) -> float:
    """FLOP/s of one product of a square matrix."""
    synchronize()
    start = time.perf_counter()
    product(a)
    synchronize()
    return 2 * len(a) ** 3 / max(time.perf_counter() - start, 1e-9)


def _sides(device: torch.device, dtype: torch.dtype) -> tuple[int, ...]:
    if device.type == "cuda":
        return (2048, 4096, 8192) if dtype.itemsize == 2 else (2048, 4096)
    if device.type == "mps":
        return (1024, 2048)
    return (256, 512, 1024) if torch.get_num_threads() < 8 else (512, 1024, 2048)
