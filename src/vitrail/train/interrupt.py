"""SIGINT and SIGTERM as a wish to stop: the loop finishes its step, saves and ends."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

WISHES = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """While inside, the first signal is noted in `asked`; a second SIGINT ends at once, as it always did."""

    def __init__(self) -> None:
        self.asked: str | None = None
        self.before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # Python lets no other thread listen
            self.before = {wish: signal.signal(wish, self._note) for wish in WISHES}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for wish, handler in self.before.items():
            signal.signal(wish, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = signal.Signals(number).name
