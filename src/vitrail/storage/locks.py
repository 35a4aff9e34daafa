"""Exclusive locks on files, between threads and processes. A lock ends with its process, also when it is killed."""

from __future__ import annotations

import errno
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

if sys.platform == "win32":
    import msvcrt

    def _lock(file: int) -> None:
        os.lseek(file, 0, os.SEEK_SET)  # the lock is on the first byte, which need not exist
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _lock(file: int) -> None:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which a forked worker does not inherit


RETRY_INTERVAL_S = 0.05


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, created if needed; other threads and other processes wait."""
    # A forked worker must not inherit a mutex that another thread holds.
    mutex = _MUTEXES.setdefault((os.getpid(), path.absolute()), threading.Lock())
    with mutex, path.open("a") as file:
        lock_within(file.fileno(), math.inf)
        yield


_MUTEXES: dict[tuple[int, Path], threading.Lock] = {}
"""One per process and file: locks on files exclude other processes, not other threads."""


def try_lock(file: int) -> bool:
    """Lock an open file for this process; False if another process holds it. True where files cannot be locked."""
    try:
        _lock(file)
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES)
    return True


def lock_within(file: int, timeout_s: float, on_wait: Callable[[], None] = lambda: None) -> bool:
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
