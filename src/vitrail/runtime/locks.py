"""Exclusive locks on open files."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

RETRY_INTERVAL_S = 0.05


def try_lock(file: int) -> bool:
    """Lock an open file for this process; False if another process holds it. True where files cannot be locked."""
    if fcntl is None:
        return True
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which a forked worker does not inherit
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES)
    return True


def lock_within(file: int, timeout_s: float, on_wait: Callable[[], None]) -> bool:
    """Retry `try_lock` for up to `timeout_s` seconds; `on_wait` is called once if the first attempt fails."""
    deadline, waiting = time.monotonic() + timeout_s, False
    while not try_lock(file):
        if time.monotonic() >= deadline:
            return False
        if not waiting:
            on_wait()
            waiting = True
        time.sleep(RETRY_INTERVAL_S)
    return True
