"""batch_size=auto finds a batch that fits, or that is as fast as any."""

from __future__ import annotations

import pytest
import torch

from vitrail.errors import TrainError
from vitrail.train.batch_size_search import largest_that_fits, smallest_fast_size

SIZES = [8, 16, 32, 64, 128]


def out_of_memory_above(limit: int):
    def step(size: int) -> None:
        if size > limit:
            raise torch.OutOfMemoryError("no room")

    return step


@pytest.mark.parametrize(("limit", "expected"), [(8, 8), (40, 32), (1000, 128)])
def test_the_largest_that_fits(limit: int, expected: int):
    assert largest_that_fits(SIZES, out_of_memory_above(limit), lambda: None) == expected


def test_nothing_fits():
    with pytest.raises(TrainError, match="not even a batch of 8 fits"):
        largest_that_fits(SIZES, out_of_memory_above(4), lambda: None)


def test_other_errors_are_not_taken_for_memory():
    def step(size: int) -> None:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        largest_that_fits(SIZES, step, lambda: None)


def test_a_cpu_gets_the_smallest_that_is_as_fast():
    now = 0.0
    cost = {8: 1.0, 16: 1.1, 32: 1.5, 64: 2.95, 128: 5.9}  # images/s: 8, 14.5, 21.3, 21.7, 21.7

    def step(size: int) -> None:
        nonlocal now
        now += cost[size]

    assert smallest_fast_size(SIZES, step, clock=lambda: now) == 32
