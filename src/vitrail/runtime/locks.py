"""A file for one process alone."""

from __future__ import annotations

import errno

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def locked(file: int) -> bool:
    """Whether an open file is this process's now; where nothing can be locked, it is."""
    if fcntl is None:
        return True
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which a forked worker does not inherit
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES)
    return True
