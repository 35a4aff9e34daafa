"""The batch size with the highest throughput, found by timing."""

from __future__ import annotations

import math
import time

import numpy as np

from vitrail.serve.served_model import ServedModel

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
"""Batch sizes timed at startup."""
TIMING_ROUNDS = 4
"""Number of timings of each batch size."""
MIN_GAIN, MAX_LOSS = 0.02, 0.15
"""A larger batch size must save MIN_GAIN of the time per image; one slower by MAX_LOSS is dropped after two rounds."""
MAX_SHARED_BATCH_S = 0.05
"""Maximum duration of a batch in seconds while several clients are active, unless one image takes longer."""


def choose_batch_size(served: ServedModel, sizes: tuple[int, ...], seconds: float = 3.0) -> tuple[int, int]:
    """Batch size with (nearly) the highest throughput, and the largest one whose batches are short enough to share."""
    # CPU time ignores other processes, but works only if the calling thread computes.
    clock = time.thread_time if served.parallel_batches and served.engine.name != "openvino" else time.perf_counter

    def seconds_per_image(size: int) -> float:
        pixels = np.zeros((size, *served.input_shape), served.preprocess.dtype)
        start = clock()
        served.outputs(pixels, "logits")
        return (clock() - start) / size

    until = time.monotonic() + seconds
    seconds_per_image(sizes[0])  # the first call takes longer
    times: dict[int, float] = {}
    for index, size in enumerate(sizes * TIMING_ROUNDS):  # interleaved, so that a disturbance affects all sizes
        if times and time.monotonic() > until:
            break
        if index < 2 * len(sizes) or times[size] <= (1 + MAX_LOSS) * min(times.values()):
            times[size] = min(seconds_per_image(size), times.get(size, math.inf))
    best = next(size for size in sizes if size in times and times[size] * (1 - MIN_GAIN) <= min(times.values()))
    short = [size for size in sizes if size <= best and size * times[size] <= MAX_SHARED_BATCH_S]
    return best, max(short, default=sizes[0])
