"""batch_size=auto: the largest batch that fits a GPU, or the smallest at which a CPU is as fast as it gets."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from vitrail.config import pair
from vitrail.errors import TrainError
from vitrail.models import Net

SMALLEST, LARGEST = 8, 4096
GAIN = 1.1
"""How much faster a CPU has to be with a batch twice as large to be given it."""


def find_batch(
    learner: nn.Module, net: Net, images: int, device: torch.device, dtype: torch.dtype, *, multi_label: bool = False
) -> int:
    """A power of two, for one process; never more than an eighth of the images: a run needs steps, too.

    Call it in the precision that steps will have. `several`: images have several labels.
    """
    most = max(min(LARGEST, images // 8), 1)
    sizes = [n for n in (SMALLEST << i for i in range(10)) if n <= most] or [1 << (most.bit_length() - 1)]

    def step(size: int) -> None:
        _step(learner, net, size, device, dtype, multi_label)

    if device.type == "cpu":
        return fastest(sizes, step)
    # Room for the optimizer's two moments and the average, which are not there yet.
    numbers = sum(p.numel() for p in learner.parameters())
    later = torch.empty(3 * numbers, dtype=dtype, device=device)
    found = largest(sizes, step, _freed)
    del later
    return found


def largest(sizes: list[int], step: Callable[[int], None], freed: Callable[[], None]) -> int:
    """The last size whose step does not run out of memory."""
    found = None
    for size in sizes:
        try:
            step(size)
        except torch.OutOfMemoryError:
            break
        finally:
            freed()
        found = size
    if found is None:
        raise TrainError(
            f"not even a batch of {sizes[0]} fits this device; try gradient_checkpointing=true, a smaller image size "
            "or grad_accum_steps."
        )
    return found


def fastest(sizes: list[int], step: Callable[[int], None], clock: Callable[[], float] = time.perf_counter) -> int:
    """The first size after which twice as many images at a time are hardly quicker."""
    found, best = sizes[0], 0.0
    for size in sizes:
        step(size)  # warms up
        start = clock()
        step(size)
        rate = size / max(clock() - start, 1e-9)
        if rate < best * GAIN:
            break
        found, best = size, rate
    return found


def _step(learner: nn.Module, net: Net, size: int, device: torch.device, dtype: torch.dtype, multi_label: bool) -> None:
    config = net.config
    images = torch.rand(size, config.channels, *pair(config.image_size), device=device, dtype=dtype)
    keys = torch.zeros(size, dtype=torch.int64, device=device)
    targets = torch.zeros(size, config.num_classes, device=device) if multi_label else keys
    sums: dict[str, Tensor] = learner(images, targets, torch.ones(size, device=device), keys)
    sums["loss"].backward()
    for parameter in learner.parameters():
        parameter.grad = None


def _freed() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
