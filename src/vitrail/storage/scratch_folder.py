"""A hidden temporary folder beside the file to write; the folders of killed processes are removed by later calls."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vitrail.storage.atomic_write import explain_write_errors
from vitrail.storage.locks import try_lock

LOCK_NAME = "vitrail.lock"
"""File in the folder that is locked while a process uses the folder."""


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """Create a temporary folder in which to write `path`; it is deleted at the end, also after an error."""
    _remove_stale_folders(path)
    with explain_write_errors(path):
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.{os.getpid()}.", dir=path.parent))
    try:
        # The file is locked before it is renamed: LOCK_NAME is never unlocked. Only POSIX can rename an open file.
        lock_file = folder / ("new.lock" if os.name == "posix" else LOCK_NAME)
        with explain_write_errors(path):
            lock = lock_file.open("wb")
        with lock:
            try_lock(lock.fileno())
            if lock_file.name != LOCK_NAME:
                lock_file.replace(folder / LOCK_NAME)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_stale_folders(path: Path) -> None:
    """Remove the temporary folders of `path` whose processes have ended."""
    if os.name != "posix":
        return
    for folder in path.parent.iterdir():
        prefix, _, suffix = folder.name.rpartition(f".{path.name}.")
        pid = suffix.partition(".")[0]
        if prefix or not pid.isdecimal() or not (folder / LOCK_NAME).is_file() or _is_running(int(pid)):
            continue
        with suppress(OSError), (folder / LOCK_NAME).open("r+b") as lock:
            if try_lock(lock.fileno()):
                shutil.rmtree(folder, ignore_errors=True)


def _is_running(pid: int) -> bool:
    """Whether a process with this id runs on this machine; the lock covers other machines."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass
    return True
