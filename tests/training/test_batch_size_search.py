"""batch_size=auto finds the largest batch that fits, or the smallest batch of full speed."""

from __future__ import annotations

import pytest
import torch

from vitrail.errors import TrainError
from vitrail.training.batch_size_search import largest_that_fits, smallest_fast_size

SIZES = [8, 16, 32, 64, 128]


def out_of_memory_above(limit: int):
    def step(size: int) -> None:
        if size > limit:
            raise torch.OutOfMemoryError("no room")

    return step


@pytest.mark.parametrize(("limit", "expected"), [(8, 8), (40, 32), (1000, 128)])
def test_largest_batch_that_fits_is_chosen(limit: int, expected: int):
    assert largest_that_fits(SIZES, out_of_memory_above(limit), lambda: None) == expected


def test_error_if_no_batch_fits():
    with pytest.raises(TrainError, match="a batch of 8 does not fit in the memory"):
        largest_that_fits(SIZES, out_of_memory_above(4), lambda: None)


def test_other_errors_are_not_treated_as_out_of_memory():
    def step(size: int) -> None:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        largest_that_fits(SIZES, step, lambda: None)


def test_cpu_uses_the_smallest_batch_of_full_speed():
    now = 0.0
    cost = {8: 1.0, 16: 1.1, 32: 1.5, 64: 2.95, 128: 5.9}  # images/s: 8, 14.5, 21.3, 21.7, 21.7

    def step(size: int) -> None:
        nonlocal now
        now += cost[size]

    assert smallest_fast_size(SIZES, step, clock=lambda: now) == 32
