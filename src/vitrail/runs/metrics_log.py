"""Writes metrics.jsonl, where each logged step appears once even if the run is interrupted."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from vitrail.errors import TrainError
from vitrail.runtime import warn_once
from vitrail.storage.atomic_write import atomic_file

MetricsLine = dict[str, Any]


class MetricsLog:
    """Appends complete lines to metrics.jsonl. While the disk is full, lines wait in memory and none is lost."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unwritten: list[str] = []

    def rewind(self, step: int, unwritten: Sequence[str] = (), *, evaluated: bool = True) -> None:
        """Remove what was written after this step, incomplete lines, and the final test scores.

        `unwritten`: the lines that `flush` returned at that step.
        `evaluated`: False if this step's evaluation will be repeated.
        """
        kept = [line for line in read_metrics(self.path) if line["step"] <= step and "test" not in line]
        if not evaluated:
            kept = [line for line in kept if line["step"] < step or "evaluation" not in line]
        with atomic_file(self.path) as temporary:
            temporary.write_bytes("".join(dict.fromkeys([*map(_to_json, kept), *unwritten])).encode())

    def write(self, line: MetricsLine) -> None:
        self.unwritten.append(_to_json(line))
        try:
            self._append()
        except OSError as error:
            warn_once([f"{self.path} cannot be written now ({error.strerror}); its lines are kept in memory"])

    def flush(self) -> list[str]:
        """Write all lines and sync the file to disk; returns the lines that could not be written."""
        with suppress(OSError):
            self._append(sync=True)
        return list(self.unwritten)

    def _append(self, sync: bool = False) -> None:
        with self.path.open("ab", buffering=0) as file:  # a failed buffer would be written again on close
            start = file.tell()
            left = memoryview("".join(self.unwritten).encode())
            try:
                while left:
                    left = left[file.write(left) :]
                if sync:
                    os.fsync(file.fileno())
            except OSError:
                with suppress(OSError):
                    file.truncate(start)  # leave no incomplete line, and write none twice
                raise
        self.unwritten = []

    def close(self) -> None:
        """Write all remaining lines; raises TrainError if that fails."""
        if not self.unwritten:
            return
        try:
            self._append()
        except OSError as error:
            raise TrainError(
                f"{len(self.unwritten)} lines of {self.path} could not be written: {error.strerror}; "
                "free some disk space and resume with --resume."
            ) from error


def read_metrics(path: Path) -> list[MetricsLine]:
    """All complete lines; a line cut short by a kill is skipped."""
    found: list[MetricsLine] = []
    if not path.exists():
        return found
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            found.append(line)
    return found


def _to_json(line: MetricsLine) -> str:
    """One line of JSON; numbers that are not finite become null."""
    return json.dumps(_replace_nonfinite(line), allow_nan=False) + "\n"


def _replace_nonfinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _replace_nonfinite(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
