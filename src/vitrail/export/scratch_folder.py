"""A hidden folder beside a file to be, where it is made; what a killed process left is removed by the next one."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vitrail.runtime.locks import try_lock
from vitrail.weights.writers import explain_write_errors

LOCK = "vitrail.lock"
"""Held as long as somebody works in a folder."""


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """Where to make `path`; gone afterwards, however this ends."""
    _sweep(path)
    with explain_write_errors(path):
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.{os.getpid()}.", dir=path.parent))
    try:
        new = folder / ("new.lock" if os.name == "posix" else LOCK)  # elsewhere an open file cannot be renamed
        with explain_write_errors(path):
            lock = new.open("wb")
        with lock:
            try_lock(lock.fileno())
            if new.name != LOCK:
                new.replace(folder / LOCK)  # never seen before it is held
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(path: Path) -> None:
    """Remove folders of this name that nobody works in any more."""
    if os.name != "posix":
        return
    for folder in path.parent.iterdir():
        name, _, rest = folder.name.rpartition(f".{path.name}.")
        process = rest.partition(".")[0]
        if name or not process.isdecimal() or not (folder / LOCK).is_file() or _alive(int(process)):
            continue
        with suppress(OSError), (folder / LOCK).open("r+b") as lock:
            if try_lock(lock.fileno()):
                shutil.rmtree(folder, ignore_errors=True)


def _alive(process: int) -> bool:
    """Whether there is such a process here; the lock tells of other machines."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass
    return True
