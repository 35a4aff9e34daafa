"""metrics.jsonl: each logged step once, whatever interrupts the run; TensorBoard beside it where asked for."""

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

Line = dict[str, Any]


class Metrics:
    """Lines are appended when they are whole; a disk that is full for a while loses none of them."""

    def __init__(self, path: Path, tensorboard: Path | None = None) -> None:
        self.path, self.tensorboard = path, tensorboard
        self.waiting: list[str] = []
        self.board = _board(tensorboard)

    def rewind(self, step: int, unwritten: Sequence[str] = (), *, evaluated: bool = True) -> None:
        """Drop what was written after this step, and the half line a kill may have left.

        The test is the end's own, and comes again with it. `unwritten`: what `flush` gave at that step.
        evaluated: False where this step's evaluation will be made again.
        """
        kept = [line for line in read_metrics(self.path) if line["step"] <= step and "test" not in line]
        if not evaluated:
            kept = [line for line in kept if line["step"] < step or "evaluation" not in line]
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(dict.fromkeys([*map(_text, kept), *unwritten]))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)
        if self.board is not None and step:
            self.board.close()
            self.board = _board(self.tensorboard, step + 1)

    def write(self, line: Line) -> None:
        self.waiting.append(_text(line))
        self._show(line)
        try:
            self._append()
        except OSError as error:
            warn_once([f"{self.path} cannot be written now ({error.strerror}); its lines wait in memory"])

    def _show(self, line: Line) -> None:
        if self.board is None:
            return
        try:
            _to_board(self.board, line)
        except OSError as error:  # its thread has died of it, and takes nothing any more
            self.board = None
            warn_once([f"TensorBoard gets no more ({error.strerror}); {self.path} has everything"])

    def flush(self) -> list[str]:
        """Everything safe on the disk; the lines that could not be written."""
        with suppress(OSError):
            self._append(sync=True)
        return list(self.waiting)

    def _append(self, sync: bool = False) -> None:
        with self.path.open("ab", buffering=0) as file:  # a buffer would be written once more when it is closed
            start = file.tell()
            left = memoryview("".join(self.waiting).encode())
            try:
                while left:
                    left = left[file.write(left) :]
                if sync:
                    os.fsync(file.fileno())
            except OSError:
                with suppress(OSError):
                    file.truncate(start)  # no half line stays, and none is written twice
                raise
        self.waiting = []

    def close(self) -> None:
        """Everything on disk, or an error that says what is not."""
        if self.board is not None:
            with suppress(OSError):
                self.board.close()
        if not self.waiting:
            return
        try:
            self._append()
        except OSError as error:
            raise TrainError(
                f"{len(self.waiting)} lines of {self.path} could not be written: {error.strerror}; "
                "make room and go on with --resume."
            ) from error


def read_metrics(path: Path) -> list[Line]:
    """All whole lines; what a kill cut short is left out."""
    found: list[Line] = []
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


def _text(line: Line) -> str:
    """JSON has no NaN: what is not finite becomes null."""
    return json.dumps(_finite(line), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _board(folder: Path | None, purge_step: int | None = None) -> Any:
    """What writes for TensorBoard, which forgets everything from `purge_step` on."""
    if folder is None:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise TrainError("tensorboard=true needs TensorBoard; try pip install 'vitrail[track]'.") from None
    return SummaryWriter(str(folder), purge_step=purge_step)


def _to_board(board: Any, line: Line) -> None:
    step = line["step"]
    for name, value in line.get("evaluation", line).items():
        if isinstance(value, int | float) and name not in ("step", "images", "epoch", "time"):
            board.add_scalar(f"{'evaluation' if 'evaluation' in line else 'training'}/{name}", value, step)
