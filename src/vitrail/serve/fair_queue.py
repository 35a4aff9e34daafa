"""A queue in which clients take turns, and small requests go before the rest of large ones."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping
from typing import Generic, TypeVar

Item = TypeVar("Item")
LATER = 1.0
"""Seconds by which each further image of a request is due later than the one before."""


CROWDED = 5.0
"""Seconds for which a client counts as being served after one of its images came."""


class Crowd:
    """Whether more than one client is being served; not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._newest = ("", -math.inf)  # the client whose image came last, and when
        self._crowded = -math.inf  # when an image came shortly after another client's

    def __bool__(self) -> bool:
        return self._clock() < self._crowded + CROWDED

    def note(self, client: str) -> None:
        """That an image of this client has come."""
        (other, then), now = self._newest, self._clock()
        if client != other and now < then + CROWDED:
            self._crowded = now
        self._newest = (client, now)

    def blocked(self, busy: Mapping[str, int], threads: int) -> tuple[str, ...]:
        """Clients that are busy in all threads but one, which is left to others while there are any."""
        if threads < 2 or not self:
            return ()
        return tuple(client for client, count in busy.items() if count >= threads - 1)


class FairQueue(Generic[Item]):
    """After each item the next client is served. Of one client's items the one that is due first leaves first: the
    first image of a request is due when it comes, the second a second later, and so on. So 16 images in one request
    hardly delay another one that has a single image, and wait no longer than 16 seconds for younger requests.

    Not thread-safe: the caller holds a lock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clients: OrderedDict[str, list[tuple[float, int, Item]]] = OrderedDict()
        """For each client a heap of items: when it is due, how many were put before it, the item."""
        self._clock, self._count, self._length = clock, itertools.count(), 0

    def __len__(self) -> int:
        return self._length

    def offers(self, blocked: Container[str]) -> bool:
        """Whether there is an item of a client that is not blocked."""
        return any(client not in blocked for client in self._clients)

    def put(self, client: str, number: int, item: Item) -> None:
        """number: which image of its request this is, from 0."""
        due = self._clock() + LATER * number
        heapq.heappush(self._clients.setdefault(client, []), (due, next(self._count), item))
        self._length += 1

    def get(self, wanted: Callable[[Item], bool] | None = None, blocked: Container[str] = ()) -> Item | None:
        """The next item that is wanted, by default any, of a client that is not blocked; None: there is none."""
        for client, items in self._clients.items():
            if client in blocked:
                continue
            unwanted = []
            while items and wanted is not None and not wanted(items[0][2]):
                unwanted.append(heapq.heappop(items))
            found = heapq.heappop(items) if items else None
            for one in unwanted:
                heapq.heappush(items, one)
            if found is not None:
                self._length -= 1
                self._clients.move_to_end(client)
                if not items:
                    del self._clients[client]
                return found[2]
        return None
