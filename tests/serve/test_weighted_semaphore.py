"""WeightedSemaphore: first come, first served."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import wait_until

from vitrail.serve.weighted_semaphore import WeightedSemaphore


def test_waiters_are_served_in_order_even_if_a_later_one_is_smaller() -> None:
    semaphore, order, release = WeightedSemaphore(10), [], threading.Event()

    def hold(amount: int) -> None:
        with semaphore.acquired(amount):
            order.append(amount)
            assert release.wait(20)

    with ThreadPoolExecutor(3) as pool:
        futures: list[Future[None]] = []
        for number, amount in enumerate((6, 5, 4)):
            futures.append(pool.submit(hold, amount))
            wait_until(lambda n=number: order == [6] and len(semaphore._waiters) == n)
        release.set()
        for future in futures:
            future.result()
    assert order == [6, 5, 4]
    assert semaphore.available == 10


@given(st.lists(st.integers(0, 15), max_size=12))
@settings(max_examples=30, deadline=None)
def test_the_total_is_never_exceeded_and_everything_is_released(amounts: list[int]) -> None:
    semaphore, lowest = WeightedSemaphore(10), [10]

    def hold(amount: int) -> None:
        with semaphore.acquired(amount):  # 15 is more than the total
            lowest.append(semaphore.available)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(hold, amounts))
    assert min(lowest) >= 0
    assert semaphore.available == 10


def test_an_error_releases_the_semaphore() -> None:
    semaphore = WeightedSemaphore(3)
    with pytest.raises(KeyError), semaphore.acquired(2):
        raise KeyError
    assert semaphore.available == 3
