"""Writes metrics.jsonl, where each logged step appears once even if the run is interrupted, and TensorBoard events."""

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

    def __init__(self, path: Path, tensorboard: Path | None = None) -> None:
        self.path, self.tensorboard_folder = path, tensorboard
        self.unwritten: list[str] = []
        self.tensorboard_writer = _open_tensorboard(tensorboard)

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
        if self.tensorboard_writer is not None and step:
            self.tensorboard_writer.close()
            self.tensorboard_writer = _open_tensorboard(self.tensorboard_folder, step + 1)

    def write(self, line: MetricsLine) -> None:
        self.unwritten.append(_to_json(line))
        self._write_tensorboard(line)
        try:
            self._append()
        except OSError as error:
            warn_once([f"{self.path} cannot be written now ({error.strerror}); its lines are kept in memory"])

    def _write_tensorboard(self, line: MetricsLine) -> None:
        if self.tensorboard_writer is None:
            return
        try:
            _add_scalars(self.tensorboard_writer, line)
        except OSError as error:  # the writer's thread has ended and accepts no more events
            self.tensorboard_writer = None
            warn_once([f"TensorBoard logging stopped ({error.strerror}); {self.path} has all metrics"])

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
        if self.tensorboard_writer is not None:
            with suppress(OSError):
                self.tensorboard_writer.close()
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


def _open_tensorboard(folder: Path | None, purge_step: int | None = None) -> Any:
    """A SummaryWriter that discards events from `purge_step` on; None without a folder."""
    if folder is None:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise TrainError("tensorboard=true needs TensorBoard; try pip install 'vitrail[track]'.") from None
    return SummaryWriter(str(folder), purge_step=purge_step)


def _add_scalars(board: Any, line: MetricsLine) -> None:
    step = line["step"]
    for name, value in line.get("evaluation", line).items():
        if isinstance(value, int | float) and name not in ("step", "images", "epoch", "time"):
            board.add_scalar(f"{'evaluation' if 'evaluation' in line else 'training'}/{name}", value, step)
