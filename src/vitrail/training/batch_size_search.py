"""batch_size=auto: the largest batch that fits on a GPU, or the smallest at which a CPU reaches its full speed."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from vitrail.config import pair
from vitrail.errors import TrainError
from vitrail.models import Net

MIN_BATCH_SIZE, MAX_BATCH_SIZE = 8, 4096
MIN_SPEEDUP = 1.1
"""How many times faster a CPU must be with a batch twice as large for the search to continue."""


def find_batch_size(
    objective: nn.Module,
    net: Net,
    num_images: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    multi_label: bool = False,
) -> int:
    """Batch size for one process: a power of two, at most an eighth of the images, so that a run has enough steps.

    Call it in the precision context of the training steps.
    """
    most = max(min(MAX_BATCH_SIZE, num_images // 8), 1)
    sizes = [n for n in (MIN_BATCH_SIZE << i for i in range(10)) if n <= most] or [1 << (most.bit_length() - 1)]

    def step(size: int) -> None:
        _step(objective, net, size, device, dtype, multi_label)

    if device.type == "cpu":
        return smallest_fast_size(sizes, step)
    # Room for the optimizer's two moments and the EMA, which are not allocated yet.
    numbers = sum(p.numel() for p in objective.parameters())
    later = torch.empty(3 * numbers, dtype=dtype, device=device)
    found = largest_that_fits(sizes, step, _free_memory)
    del later
    return found


def largest_that_fits(sizes: list[int], step: Callable[[int], None], free_memory: Callable[[], None]) -> int:
    """The largest of `sizes` whose step does not run out of memory."""
    found = None
    for size in sizes:
        try:
            step(size)
        except torch.OutOfMemoryError:
            break
        finally:
            free_memory()
        found = size
    if found is None:
        raise TrainError(
            f"a batch of {sizes[0]} does not fit in the memory of this device; try gradient_checkpointing=true, a "
            "smaller image size or grad_accum_steps."
        )
    return found


def smallest_fast_size(
    sizes: list[int], step: Callable[[int], None], clock: Callable[[], float] = time.perf_counter
) -> int:
    """The first size whose double is less than MIN_SPEEDUP times faster, in images per second."""
    found, best = sizes[0], 0.0
    for size in sizes:
        step(size)  # warms up
        start = clock()
        step(size)
        rate = size / max(clock() - start, 1e-9)
        if rate < best * MIN_SPEEDUP:
            break
        found, best = size, rate
    return found


def _step(
    objective: nn.Module, net: Net, size: int, device: torch.device, dtype: torch.dtype, multi_label: bool
) -> None:
    config = net.config
    images = torch.rand(size, config.channels, *pair(config.image_size), device=device, dtype=dtype)
    keys = torch.zeros(size, dtype=torch.int64, device=device)
    targets = torch.zeros(size, config.num_classes, device=device) if multi_label else keys
    sums: dict[str, Tensor] = objective(images, targets, torch.ones(size, device=device), keys)
    sums["loss"].backward()
    for parameter in objective.parameters():
        parameter.grad = None


def _free_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
