"""Threads share what there is of something, in the order they come."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import until

from vitrail.serve.weighted_semaphore import WeightedSemaphore


def test_who_finds_too_little_waits_and_a_smaller_one_does_not_overtake() -> None:
    budget, order, go = WeightedSemaphore(10), [], threading.Event()

    def spend(amount: int) -> None:
        with budget.acquired(amount):
            order.append(amount)
            assert go.wait(20)

    with ThreadPoolExecutor(3) as pool:
        parts: list[Future[None]] = []
        for number, amount in enumerate((6, 5, 4)):
            parts.append(pool.submit(spend, amount))
            until(lambda n=number: order == [6] and len(budget._waiters) == n)
        go.set()
        for part in parts:
            part.result()
    assert order == [6, 5, 4]
    assert budget.available == 10


@given(st.lists(st.integers(0, 15), max_size=12))
@settings(max_examples=30, deadline=None)
def test_never_more_is_out_than_there_is_and_all_comes_back(amounts: list[int]) -> None:
    budget, lowest = WeightedSemaphore(10), [10]

    def spend(amount: int) -> None:
        with budget.acquired(amount):  # who wants 15 has all of it
            lowest.append(budget.available)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(spend, amounts))
    assert min(lowest) >= 0
    assert budget.available == 10


def test_an_error_gives_back_what_was_taken() -> None:
    budget = WeightedSemaphore(3)
    with pytest.raises(KeyError), budget.acquired(2):
        raise KeyError
    assert budget.available == 3
