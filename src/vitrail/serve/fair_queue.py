"""A queue in which clients take turns and small requests overtake the remainder of large ones."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping
from typing import Generic, TypeVar

Item = TypeVar("Item")
IMAGE_DELAY_S = 1.0
"""Seconds added to the due time of each further image of a request."""


CONTENTION_WINDOW_S = 5.0
"""Seconds for which a client counts as active after its last image arrived."""


class ContentionTracker:
    """True while more than one client is active. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._newest = ("", -math.inf)  # client and time of the last image
        self._contended_at = -math.inf  # when two clients were last active together

    def __bool__(self) -> bool:
        return self._clock() < self._contended_at + CONTENTION_WINDOW_S

    def record(self, client: str) -> None:
        """Record the arrival of an image."""
        (last_client, last_time), now = self._newest, self._clock()
        if client != last_client and now < last_time + CONTENTION_WINDOW_S:
            self._contended_at = now
        self._newest = (client, now)

    def blocked_clients(self, busy: Mapping[str, int], threads: int) -> tuple[str, ...]:
        """Clients that occupy all threads but one, which is reserved for others while several clients are active."""
        if threads < 2 or not self:
            return ()
        return tuple(client for client, count in busy.items() if count >= threads - 1)


class FairQueue(Generic[Item]):
    """Round-robin over clients; within a client, earliest due time first.

    The first image of a request is due on arrival, each further one `IMAGE_DELAY_S` later. So a request with 16
    images hardly delays a request with one, and waits at most 16 seconds for requests that arrive after it.
    Not thread-safe: the caller holds a lock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clients: OrderedDict[str, list[tuple[float, int, Item]]] = OrderedDict()
        """Per client, a heap of (due time, sequence number, item)."""
        self._clock, self._count, self._length = clock, itertools.count(), 0

    def __len__(self) -> int:
        return self._length

    def has_item(self, blocked: Container[str]) -> bool:
        """Whether a client that is not blocked has an item."""
        return any(client not in blocked for client in self._clients)

    def put(self, client: str, index: int, item: Item) -> None:
        """index: position of the image in its request, from 0."""
        due = self._clock() + IMAGE_DELAY_S * index
        heapq.heappush(self._clients.setdefault(client, []), (due, next(self._count), item))
        self._length += 1

    def get(self, matches: Callable[[Item], bool] | None = None, blocked: Container[str] = ()) -> Item | None:
        """Remove and return the next item that matches, of a client that is not blocked; None if there is none."""
        for client, items in self._clients.items():
            if client in blocked:
                continue
            skipped = []
            while items and matches is not None and not matches(items[0][2]):
                skipped.append(heapq.heappop(items))
            entry = heapq.heappop(items) if items else None
            for skipped_entry in skipped:
                heapq.heappush(items, skipped_entry)
            if entry is not None:
                self._length -= 1
                self._clients.move_to_end(client)
                if not items:
                    del self._clients[client]
                return entry[2]
        return None
