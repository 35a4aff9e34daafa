"""Threads share what there is of something, in the order they come."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import until

from vitrail.serve.budget import Budget


def test_who_finds_too_little_waits_and_a_smaller_one_does_not_overtake() -> None:
    budget, order, go = Budget(10), [], threading.Event()

    def spend(amount: int) -> None:
        with budget.taken(amount):
            order.append(amount)
            assert go.wait(20)

    with ThreadPoolExecutor(3) as pool:
        parts: list[Future[None]] = []
        for number, amount in enumerate((6, 5, 4)):
            parts.append(pool.submit(spend, amount))
            until(lambda n=number: order == [6] and len(budget._line) == n)
        go.set()
        for part in parts:
            part.result()
    assert order == [6, 5, 4]
    assert budget.left == 10


@given(st.lists(st.integers(0, 15), max_size=12))
@settings(max_examples=30, deadline=None)
def test_never_more_is_out_than_there_is_and_all_comes_back(amounts: list[int]) -> None:
    budget, lowest = Budget(10), [10]

    def spend(amount: int) -> None:
        with budget.taken(amount):  # who wants 15 has all of it
            lowest.append(budget.left)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(spend, amounts))
    assert min(lowest) >= 0
    assert budget.left == 10


def test_an_error_gives_back_what_was_taken() -> None:
    budget = Budget(3)
    with pytest.raises(KeyError), budget.taken(2):
        raise KeyError
    assert budget.left == 3
