"""The run folder: one place for all that a run leaves behind.

config.json      the full, resolved settings: enough to run it again
metrics.jsonl    one line per logged step and per evaluation
checkpoint/      everything needed to go on; the last two, and the best weights
result.json      written last: how the run ended, comparisons included
snapshots/       with snapshot_every: the weights at moments of the run
model/           what `vitrail.load` loads
figures/ report.html
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vitrail.config import TrainConfig
from vitrail.config.format_version import VERSION, current
from vitrail.errors import CheckpointError, FormatError, TrainError
from vitrail.runtime import warn_once
from vitrail.runtime.locks import lock_within
from vitrail.weights.writers import write_json

LOCK_TIMEOUT_S, RESTART_LOCK_TIMEOUT_S = 2.0, 60.0
"""Seconds that a run waits for another process to leave its folder: one that was killed a moment ago, and, where
nobody is there to try again, one that still has to save and end."""


@dataclass(frozen=True)
class RunFolder:
    """Where a run's parts lie."""

    path: Path
    lock_timeout_s: float = LOCK_TIMEOUT_S
    """Seconds to wait for another process that trains in it."""
    main_run: Path | None = None
    """The folder of the run that this one is compared with, whose command goes on with both."""

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoint"

    @property
    def snapshots(self) -> Path:
        return self.path / "snapshots"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def finished(self) -> bool:
        return os.path.exists(self.model / "config.json")

    @property
    def started(self) -> bool:
        return os.path.exists(self.config)  # which, unlike Path's own, is False where one may not look

    @property
    def status(self) -> Literal["new", "unfinished", "finished"]:
        """What starting it again would do. Finished is the whole command: the runs it is compared with as well."""
        if not self.started:
            return "new"
        return "finished" if self.finished and os.path.exists(self.result) else "unfinished"

    @property
    def last_checkpoint_step(self) -> int | None:
        """The step of the newest checkpoint."""
        names = [path.parent.name for path in self.checkpoints.glob("*/state.json")]
        return max((int(name) for name in names if name.isdecimal()), default=None)

    def resume_command(self, *options: str) -> str:
        """The command that goes on with it."""
        return shlex.join(["vitrail", "train", "--resume", *options, "--out", str(self.main_run or self.path)])

    def create(self, config: TrainConfig) -> None:
        """A new run: its settings are on disk before anything is computed."""
        self.check_unused()
        self._make_folders()
        self.write_config(config)

    def _make_folders(self) -> None:
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TrainError(f"cannot make the run folder {self.path}: {error.strerror or error}.") from None

    @contextmanager
    def lock(self) -> Iterator[None]:
        """The folder for this process alone: another one would write the same lines beside it."""
        self._make_folders()
        with ExitStack() as stack:
            with suppress(OSError):
                file = stack.enter_context((self.checkpoints / ".lock").open("a"))
                if not lock_within(file.fileno(), self.lock_timeout_s, self._notify_waiting):
                    raise TrainError(
                        f"another process is training in {self.path}; wait for its end, or choose another folder."
                    )
            yield

    def _notify_waiting(self) -> None:
        warn_once(
            [f"another process is still training in {self.path}; waiting up to {self.lock_timeout_s:.0f} s for its end"]
        )

    def reopen(self, config: TrainConfig) -> None:
        """A run that goes on, perhaps to a later end, has no result until it ends; the old model stays until then."""
        self.result.unlink(missing_ok=True)  # first: with a longer duration it would be the result of another run
        if config != self.read_config():
            self.write_config(config)

    def remove_temporary_files(self) -> None:
        """What killed writers left under temporary names."""
        for left in self.path.glob(".*"):
            if left.suffix in (".tmp", ".old"):
                shutil.rmtree(left) if left.is_dir() else left.unlink()

    def check_unused(self) -> None:
        if self.started:
            go_on = "" if self.status == "finished" else "resume it with --resume, or "
            raise TrainError(
                f"{self.path} holds a run already ({self.status}); {go_on}choose another folder with --out."
            )

    def write_config(self, config: TrainConfig) -> None:
        write_json(self.config, {"format_version": VERSION, **config.to_dict()}, overwrite=True)

    def read_config(self) -> TrainConfig:
        if not self.started:
            raise TrainError(f"{self.path} holds no run to resume: there is no config.json in it.")
        return read_run_config(self.config)

    def write_result(self, result: dict[str, Any]) -> None:
        """The last thing a run writes; a number that is not finite becomes null."""
        try:
            finite = json.loads(json.dumps(result, default=float), parse_constant=lambda _: None)
            write_json(self.result, {"format_version": VERSION, **finite}, overwrite=True)
        except (CheckpointError, OSError) as error:
            warn_once([f"the run is finished, but {self.result} could not be written: {error}"])

    def read_result(self) -> dict[str, Any] | None:
        """What `write_result` wrote; None where it cannot be read."""
        try:
            return current("result", json.loads(self.result.read_text(encoding="utf-8")))
        except (AttributeError, FormatError, OSError, TypeError, ValueError):
            return None

    def recreate_if_missing(self, config: TrainConfig) -> None:
        """The folder itself, where someone took it away while the run went on."""
        if self.started:
            return
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.write_config(config)
            warn_once([f"{self.path} was gone and has been made again; what it held before is lost"])
        except (CheckpointError, OSError) as error:
            warn_once([f"{self.path} is gone and cannot be made again, training goes on: {error}"])


def read_run_config(path: Path) -> TrainConfig:
    """The settings in a run's config.json, or in a file like it."""
    try:
        return TrainConfig.from_dict(current("run", json.loads(path.read_text(encoding="utf-8"))))
    except OSError as error:
        raise TrainError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (TypeError, ValueError) as error:
        raise TrainError(f"{path} does not hold the settings of a run: {error}") from error


def first_unused_folder(wanted: Path) -> Path:
    """`wanted`, or wanted-2, wanted-3, ...: the first that holds no run."""
    number, path = 2, wanted
    while RunFolder(path).started:
        path, number = wanted.with_name(f"{wanted.name}-{number}"), number + 1
    return path


def latest_run_folder(wanted: Path) -> Path:
    """Of `wanted`, wanted-2, ... the one with the highest number that holds a run."""
    number, path = 2, wanted
    while RunFolder(after := wanted.with_name(f"{wanted.name}-{number}")).started:
        path, number = after, number + 1
    return path
