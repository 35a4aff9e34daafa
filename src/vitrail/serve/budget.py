"""Something there is only so much of, shared by threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class Budget:
    """Who finds too little left waits; they are let in in the order they came, so that nobody waits for ever."""

    def __init__(self, total: int) -> None:
        self.total = self.left = total
        self._line: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, amount: int) -> Iterator[None]:
        """Inside, so much of it is gone; who wants more than there is has all of it."""
        amount, turn = min(amount, self.total), object()
        with self._changed:
            self._line.append(turn)
            while self._line[0] is not turn or amount > self.left:
                self._changed.wait()
            self._line.popleft()
            self.left -= amount
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self.left += amount
                self._changed.notify_all()
