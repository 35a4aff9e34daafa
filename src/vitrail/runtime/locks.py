"""A file for one process alone."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PAUSE = 0.05
"""Seconds between two attempts."""


def locked(file: int) -> bool:
    """Whether an open file is this process's now; where nothing can be locked, it is."""
    if fcntl is None:
        return True
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which a forked worker does not inherit
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES)
    return True


def locked_within(file: int, seconds: float, waiting: Callable[[], None]) -> bool:
    """The same, waiting for a process that is about to end; `waiting` is called once if there is one."""
    until, told = time.monotonic() + seconds, False
    while not locked(file):
        if time.monotonic() >= until:
            return False
        if not told:
            waiting()
            told = True
        time.sleep(PAUSE)
    return True
