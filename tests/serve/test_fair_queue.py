"""Clients take turns, and so do their requests; one request's images keep their order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vitrail.serve.fair_queue import FairQueue

Put = tuple[str, int, int]
"""Client, request, number."""


def emptied(queue: FairQueue[Put]) -> list[Put]:
    found = []
    while (item := queue.get()) is not None:
        found.append(item)
    return found


def filled(*items: Put) -> FairQueue[Put]:
    queue: FairQueue[Put] = FairQueue()
    for item in items:
        queue.put(item[0], item[1], item)
    return queue


def test_a_request_with_many_images_delays_another_by_one() -> None:
    queue = filled(*(("a", 0, number) for number in range(16)), ("a", 1, 0), ("b", 2, 0))
    assert emptied(queue)[:3] == [("a", 0, 0), ("b", 2, 0), ("a", 1, 0)]


def test_a_client_with_many_requests_delays_another_by_one() -> None:
    queue = filled(*(("a", request, 0) for request in range(100)), ("b", 100, 0), ("b", 100, 1))
    assert [item[0] for item in emptied(queue)[:5]] == ["a", "b", "a", "b", "a"]


def test_a_request_whose_next_item_is_not_wanted_keeps_its_place() -> None:
    queue = filled(("a", 0, 0), ("a", 1, 7), ("b", 2, 0))
    assert queue.get(lambda item: item[2] == 7) == ("a", 1, 7)
    assert queue.get(lambda item: item[2] == 7) is None
    assert len(queue) == 2
    assert emptied(queue) == [("b", 2, 0), ("a", 0, 0)]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=40))
def test_every_item_leaves_once_and_in_its_requests_order(puts: list[tuple[str, int]]) -> None:
    items = [(client, ord(client) * 10 + request, number) for number, (client, request) in enumerate(puts)]
    queue = filled(*items)
    assert len(queue) == len(items)
    found = emptied(queue)
    assert sorted(found) == sorted(items)
    for request in {item[1] for item in items}:
        assert [item for item in found if item[1] == request] == [item for item in items if item[1] == request]
    assert len(queue) == 0
