"""A semaphore whose holders take different amounts."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class WeightedSemaphore:
    """Limits the sum of the amounts held by threads. Waiting threads are served first come, first served."""

    def __init__(self, total: int) -> None:
        self.total = self.available = total
        self._waiters: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def acquired(self, amount: int) -> Iterator[None]:
        """Hold `amount` within the context, at most the total; blocks until it is available."""
        amount, turn = min(amount, self.total), object()
        with self._changed:
            self._waiters.append(turn)
            while self._waiters[0] is not turn or amount > self.available:
                self._changed.wait()
            self._waiters.popleft()
            self.available -= amount
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self.available += amount
                self._changed.notify_all()
