"""The peak rate of a device, measured: what it gives, not what its data sheet promises."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

SECONDS = 0.2
"""How long a measurement takes, about."""
LAYOUTS: list[Callable[[Tensor], Tensor]] = [lambda a: a @ a.T, lambda a: a.T @ a, lambda a: a @ a]
"""The products of a linear layer: its output, the gradient of its weight, the gradient of its input."""


@cache
def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of matrix products: the fastest of several sizes and of the layouts of a training step.

    A CPU without instructions for bfloat16 is up to 30 times faster in one layout than in another. Small products
    are measured too: on a busy machine only a short one runs undisturbed.
    """
    wait, layouts = _waits(device), LAYOUTS
    best, found, end = 0.0, (layouts[0], torch.ones(1, 1, device=device)), time.perf_counter() + SECONDS
    for side in _sides(device, dtype):
        a = _matrix(side, device, dtype)
        rates = {}
        for product in layouts:
            product(a)  # loads what there is to load
            rates[product] = max(_rate(product, a, wait) for _ in range(2))
        fastest = max(rates, key=lambda product: rates[product])
        if rates[fastest] > best:
            best, found = rates[fastest], (fastest, a)
        layouts = [product for product in layouts if rates[product] > rates[fastest] / 3]
        if time.perf_counter() > end:
            break
    while time.perf_counter() < end:
        best = max(best, _rate(*found, wait))
    del found, a
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return best


def slowdown(device: torch.device, dtype: torch.dtype, than: torch.dtype = torch.float32) -> float:
    """How many times as long the products of a training step take in one type as in another."""
    wait = _waits(device)
    took = []
    for kind in (dtype, than):
        a = _matrix(256, device, kind)
        took.append(sum(1 / max(_rate(product, a, wait) for _ in range(3)) for product in LAYOUTS))
    return took[0] / took[1]


def _waits(device: torch.device) -> Callable[[], None]:
    return {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(device.type, lambda: None)


def _matrix(side: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Values that differ, since a chip runs faster on equal ones; no random ones, which would move a generator."""
    return torch.arange(side * side, device=device, dtype=torch.float32).sin_().view(side, side).to(dtype)


def _rate(product: Callable[[Tensor], Tensor], a: Tensor, wait: Callable[[], None]) -> float:
    wait()
    start = time.perf_counter()
    product(a)
    wait()
    return 2 * len(a) ** 3 / max(time.perf_counter() - start, 1e-9)


def _sides(device: torch.device, dtype: torch.dtype) -> tuple[int, ...]:
    if device.type == "cuda":
        return (2048, 4096, 8192) if dtype.itemsize == 2 else (2048, 4096)
    if device.type == "mps":
        return (1024, 2048)
    return (256, 512, 1024) if torch.get_num_threads() < 8 else (512, 1024, 2048)
