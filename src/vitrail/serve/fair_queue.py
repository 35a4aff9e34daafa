"""A queue in which clients take turns, and so do the requests of one client."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Items of one request leave in the order they came. After each item the next client is served, and of each
    client the next request: 16 images in one request delay another request by one image, not by 16.

    Not thread-safe: the caller holds a lock.
    """

    def __init__(self) -> None:
        self._clients: OrderedDict[str, OrderedDict[Any, deque[Item]]] = OrderedDict()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def put(self, client: str, request: Any, item: Item) -> None:
        self._clients.setdefault(client, OrderedDict()).setdefault(request, deque()).append(item)
        self._length += 1

    def get(self, wanted: Callable[[Item], bool] | None = None) -> Item | None:
        """The next item; None if there is none. A request whose first item is not `wanted` keeps its place."""
        for client, requests in self._clients.items():
            for request, items in requests.items():
                if wanted is None or wanted(items[0]):
                    return self._take(client, request)
        return None

    def _take(self, client: str, request: Any) -> Item:
        requests = self._clients[client]
        items = requests[request]
        item = items.popleft()
        self._length -= 1
        if items:
            requests.move_to_end(request)
        else:
            del requests[request]
        if requests:
            self._clients.move_to_end(client)
        else:
            del self._clients[client]
        return item
