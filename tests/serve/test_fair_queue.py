"""FairQueue: round-robin over clients, earliest due time first within a client."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vitrail.serve.fair_queue import FairQueue

Put = tuple[str, str, int]
"""(client, request, index of the image)."""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def queue_with(*items: Put, clock: Clock | None = None) -> FairQueue[Put]:
    queue: FairQueue[Put] = FairQueue(clock or Clock())
    for item in items:
        queue.put(item[0], item[2], item)
    return queue


def drain(queue: FairQueue[Put]) -> list[Put]:
    items = []
    while (item := queue.get()) is not None:
        items.append(item)
    return items


def images(client: str, request: str, count: int) -> list[Put]:
    return [(client, request, number) for number in range(count)]


def test_a_client_with_many_requests_delays_another_by_one_image() -> None:
    queue = queue_with(*(("a", f"{number}", 0) for number in range(100)), *images("b", "x", 2))
    assert [item[0] for item in drain(queue)[:5]] == ["a", "b", "a", "b", "a"]


def test_requests_with_many_images_barely_delay_a_small_one_of_the_same_client() -> None:
    clock = Clock()
    queue = queue_with(*(item for request in "xyz" for item in images("a", request, 16)), clock=clock)
    for _ in range(3):  # the first image of each
        queue.get()
    clock.now = 0.5
    queue.put("a", 0, ("a", "single", 0))
    assert queue.get() == ("a", "single", 0)
    assert queue.get() == ("a", "x", 1)


def test_a_request_with_many_images_is_not_starved() -> None:
    clock = Clock()
    queue = queue_with(*images("a", "many", 16), clock=clock)
    completed, clock.now = 0, 0.1
    while completed < 16:
        queue.put("a", 0, ("a", "single", 0))
        item = queue.get()
        completed += item is not None and item[1] == "many"
        clock.now += 0.01
    assert 15 <= clock.now < 15.5


def test_items_that_do_not_match_keep_their_position() -> None:
    queue = queue_with(("a", "x", 0), ("a", "y", 1), ("b", "z", 0))
    assert queue.get(lambda item: item[2] == 1) == ("a", "y", 1)
    assert queue.get(lambda item: item[2] == 1) is None
    assert len(queue) == 2
    assert drain(queue) == [("b", "z", 0), ("a", "x", 0)]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz")), max_size=40))
def test_every_item_is_returned_once_in_the_order_of_its_request(puts: list[tuple[str, str]]) -> None:
    items: list[Put] = []
    for client, request in puts:
        items.append((client, client + request, sum(item[1] == client + request for item in items)))
    queue = queue_with(*items)
    assert len(queue) == len(items)
    drained = drain(queue)
    assert sorted(drained) == sorted(items)
    for request in {item[1] for item in items}:
        assert [item for item in drained if item[1] == request] == [item for item in items if item[1] == request]
    assert len(queue) == 0
