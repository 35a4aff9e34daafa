"""Limits on a shared resource, in total and per client."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from vitrail.serve.client_address import address_key
from vitrail.serve.http_errors import RequestError


class Quota:
    """Counts what clients hold of a resource, with a limit in total and one per client.

    Exceeding the total raises a 503 error, exceeding the client limit 429; both have Retry-After.
    """

    def __init__(
        self, description: str, total: int, client_limit: int | None = None, close_connection: bool = False
    ) -> None:
        """description: completes the message "12 ...", such as "images are waiting already".

        client_limit: maximum per client; default: seven eighths of the total.
        close_connection: errors also close the connection, because the client may still be sending a body.
        """
        self.description, self.total, self.close_connection = description, total, close_connection
        self.client_limit = default_client_limit(total) if client_limit is None else client_limit
        self.used = 0
        self._clients: Counter[str] = Counter()
        self._lock = threading.Lock()

    def check(self, client: str, amount: int, seconds: Callable[[int], float] = lambda taken: 1.0) -> None:
        """Raise RequestError if the client cannot acquire `amount`; seconds: estimates when that much is released."""
        own = self._clients.get(client, 0)
        if self.used + amount > self.total:
            raise self._refusal(503, "queue_full", f"{self.used:,} {self.description}", seconds(self.used))
        if own + amount > self.client_limit:
            whose = "this token" if client.startswith("token ") else "your address"
            message = f"{own:,} {self.description} for {whose}, at most {self.client_limit:,} are allowed"
            raise self._refusal(429, "too_many_requests", message, seconds(own))

    def acquire(self, client: str, amount: int, seconds: Callable[[int], float] = lambda taken: 1.0) -> None:
        """Like `check`, then count the amount for this client until it is released."""
        with self._lock:
            self.check(client, amount, seconds)
            self.used += amount
            self._clients[client] += amount

    def release(self, client: str, amount: int) -> None:
        with self._lock:
            self.used -= amount
            self._clients[client] -= amount
            if self._clients[client] <= 0:
                del self._clients[client]

    def _refusal(self, status: int, code: str, what: str, seconds: float) -> RequestError:
        after = min(max(math.ceil(seconds), 1), 60)
        headers = {"Retry-After": str(after)} | ({"Connection": "close"} if self.close_connection else {})
        return RequestError(status, code, f"{what}; try again in {after} s.", headers)


class Lease:
    """What one request holds of a quota. It may grow; `release` returns all of it and can be called repeatedly."""

    def __init__(self, quota: Quota, client: str) -> None:
        self.quota, self.client, self.amount = quota, client, 0
        self._lock = threading.Lock()

    def acquire(self, amount: int, seconds: Callable[[int], float] = lambda taken: 1.0) -> None:
        self.quota.acquire(self.client, amount, seconds)
        self.amount += amount

    def release(self) -> None:
        with self._lock:
            amount, self.amount = self.amount, 0
        if amount:
            self.quota.release(self.client, amount)


def default_client_limit(total: int) -> int:
    """Default limit per client: seven eighths of the total."""
    return total - total // 8


def client_key(scope: dict[str, Any]) -> str:
    """Identifies a client: by its token if that has a name (access.py), otherwise by its address."""
    known = scope.get("state", {}).get("client")
    return str(known) if known is not None else address_key((scope.get("client") or ("",))[0] or "")
