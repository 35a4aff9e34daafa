"""The access log: one JSON object per line, written by a thread, so that a slow disk does not delay requests.

Several processes may append to one file: every write has whole lines. A file that was renamed or removed is opened
again, so log rotation needs no signal.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import select
import stat
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vitrail.errors import ConfigError

MAX_QUEUED_LINES = 10_000
"""Lines that wait for the disk; further ones are dropped and counted."""
MAX_WRITE_BYTES = 64 * 2**10
"""Bytes per write to a file."""
MAX_PIPE_BYTES = getattr(select, "PIPE_BUF", 512)
"""Bytes per write to a pipe, which are not mixed with those of other processes."""
MAX_LINE_BYTES = 4000
END = b""
"""Ends the thread."""
WRITE_INTERVAL_S = 0.02
"""Seconds for which lines are collected, so that the thread does not wake up for each of them."""
REOPEN_INTERVAL_S = 1.0
"""Seconds between two looks at whether the file has been renamed."""
CLOSE_TIMEOUT_S = 2.0
"""Seconds that the end of the server waits for the last lines."""

log = logging.getLogger("vitrail.serve")


class AccessLog:
    """Writes lines to a file, or to standard output if its name is `-`."""

    def __init__(self, target: str, on_dropped: Callable[[int], None], max_lines: int = MAX_QUEUED_LINES) -> None:
        """on_dropped: called with the number of lines that were not written, in any thread."""
        self.path = None if target == "-" else Path(target)
        self._on_dropped, self._max_lines = on_dropped, max_lines
        self._file = 1 if self.path is None else open_log(self.path)
        self._is_pipe = not stat.S_ISREG(os.fstat(self._file).st_mode)
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._checked_at = time.monotonic()
        self._failing = self._torn = False  # the last write failed; it ended within a line
        self._thread = threading.Thread(target=self._write_loop, name="access-log", daemon=True)
        self._thread.start()

    def write(self, fields: dict[str, Any]) -> None:
        """Queue a line; fields that are None are left out."""
        if self._lines.qsize() >= self._max_lines:
            self._on_dropped(1)
            return
        line = json.dumps({name: value for name, value in fields.items() if value is not None}).encode()
        if len(line) > MAX_LINE_BYTES:
            self._on_dropped(1)
            return
        self._lines.put(line + b"\n")

    def close(self) -> None:
        """Write what is queued, if that does not take long."""
        self._lines.put(END)
        self._thread.join(CLOSE_TIMEOUT_S)

    # In the thread

    def _write_loop(self) -> None:
        line: bytes | None = self._lines.get()
        while line != END:
            lines, line = self._take_batch(line or b"")
            self._write_batch(lines)
            if line is None and self._lines.empty():
                time.sleep(WRITE_INTERVAL_S)
            line = self._lines.get() if line is None else line

    def _take_batch(self, first: bytes) -> tuple[list[bytes], bytes | None]:
        """The lines of one write, and the line after them if it has been taken from the queue already."""
        lines, size = [first], len(first)
        limit = MAX_PIPE_BYTES if self._is_pipe else MAX_WRITE_BYTES
        while not self._lines.empty():
            line = self._lines.get()
            if line == END or size + len(line) > limit:
                return lines, line
            lines.append(line)
            size += len(line)
        return lines, None

    def _write_batch(self, lines: list[bytes]) -> None:
        """Write whole lines at once. After an error they are dropped and counted, and the error is logged once."""
        data = b"\n" * self._torn + b"".join(lines)
        written = 0
        try:
            self._reopen()
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError as error:
            if not self._failing:
                log.error("the access log cannot be written: %s", (error.strerror or str(error)).lower())
            self._failing, self._torn = True, (written > 0 or self._torn) and not data[:written].endswith(b"\n")
            complete = data[:written].count(b"\n") - (written > 0 and data.startswith(b"\n"))
            self._on_dropped(len(lines) - max(complete, 0))
            return
        self._failing = self._torn = False

    def _reopen(self) -> None:
        """Open the file again if its name no longer leads to it."""
        now = time.monotonic()
        if self.path is None or now < self._checked_at + REOPEN_INTERVAL_S:
            return
        self._checked_at, opened = now, os.fstat(self._file)
        with contextlib.suppress(OSError):
            named = os.stat(self.path)
            if (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino):
                return
        with contextlib.suppress(ConfigError):  # go on with the old file
            fresh = open_log(self.path)
            os.close(self._file)
            self._file, self._torn = fresh, False


def open_log(path: Path) -> int:
    """Open a log file to append to it."""
    problem = ""
    try:
        if path.exists() and not (path.is_file() or path.is_char_device()):
            problem = "this is not a file"
        else:
            return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as error:
        problem = (error.strerror or str(error)).lower()
    raise ConfigError(f"--access-log {path}: {problem}; try a file in a folder that exists, or - for standard output.")


def utc_time(seconds: float) -> str:
    """Seconds since 1970 as ISO 8601 with milliseconds, such as 2026-01-31T12:00:00.000Z."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
