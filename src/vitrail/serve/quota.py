"""Bounded resources, of which no client can take everything."""

from __future__ import annotations

import ipaddress
import math
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from vitrail.serve.problems import Problem


class Quota:
    """An amount of something, all of which is shared and most of which one client may hold.

    Past the total the answer is 503, past a client's share of it 429; both say when to try again.
    """

    def __init__(self, what: str, total: int, share: int | None = None, close: bool = False) -> None:
        """what: ends the sentence "12 ...", such as "images are waiting already".

        share: what one client may hold; left out, seven eighths of the total.
        close: a refusal closes the connection, on which a body may still be coming.
        """
        self.what, self.total, self.close = what, total, close
        self.share = share_of(total) if share is None else share
        self.taken = 0
        self._clients: Counter[str] = Counter()
        self._lock = threading.Lock()

    def check(self, client: str, amount: int, seconds: Callable[[int], float] = lambda taken: 1.0) -> None:
        """Raise Problem unless this client may take so much; seconds: how long until so much is released."""
        own = self._clients.get(client, 0)
        if self.taken + amount > self.total:
            raise self._refusal(503, "queue_full", f"{self.taken:,} {self.what}", seconds(self.taken))
        if own + amount > self.share:
            message = f"{own:,} {self.what} for your address, which may have {self.share:,}"
            raise self._refusal(429, "too_many_requests", message, seconds(own))

    def take(self, client: str, amount: int, seconds: Callable[[int], float] = lambda taken: 1.0) -> None:
        """Raise Problem where `check` does; else the amount is this client's until it is released."""
        with self._lock:
            self.check(client, amount, seconds)
            self.taken += amount
            self._clients[client] += amount

    def release(self, client: str, amount: int) -> None:
        with self._lock:
            self.taken -= amount
            self._clients[client] -= amount
            if self._clients[client] <= 0:
                del self._clients[client]

    def _refusal(self, status: int, code: str, what: str, seconds: float) -> Problem:
        after = min(max(math.ceil(seconds), 1), 60)
        headers = {"Retry-After": str(after)} | ({"Connection": "close"} if self.close else {})
        return Problem(status, code, f"{what}; try again in {after} s.", headers)


class Lease:
    """What one request holds of a quota; it may grow, and is released as a whole, once however often that is called."""

    def __init__(self, quota: Quota, client: str) -> None:
        self.quota, self.client, self.amount = quota, client, 0
        self._lock = threading.Lock()

    def take(self, amount: int, seconds: Callable[[int], float] = lambda taken: 1.0) -> None:
        self.quota.take(self.client, amount, seconds)
        self.amount += amount

    def release(self) -> None:
        with self._lock:
            amount, self.amount = self.amount, 0
        if amount:
            self.quota.release(self.client, amount)


def share_of(total: int) -> int:
    """What one client may have, unless told otherwise: seven eighths."""
    return total - total // 8


def client_of(scope: dict[str, Any]) -> str:
    """Whom a request is counted for: an IPv4 address, or an IPv6 one's /64 network, all of which one client has."""
    host = (scope.get("client") or ("",))[0]
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:  # a Unix socket
        return str(host)
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, 64), strict=False))
