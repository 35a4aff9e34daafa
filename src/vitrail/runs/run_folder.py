"""The run folder: all files of a run.

config.json      the full, resolved config: enough to repeat the run
metrics.jsonl    one line per logged step and per evaluation
checkpoint/      the last two checkpoints and the best weights
result.json      written last: final scores and comparisons
snapshots/       with snapshot_every: the weights at intervals
model/           the model folder that `vitrail.load` reads
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
from vitrail.config.format_version import VERSION, upgrade
from vitrail.errors import CheckpointError, FormatError, TrainError
from vitrail.runtime import warn_once
from vitrail.storage.atomic_write import write_json
from vitrail.storage.locks import lock_within

LOCK_TIMEOUT_S, RESTART_LOCK_TIMEOUT_S = 2.0, 60.0
"""Seconds to wait for another process that holds the folder: by default, and with `auto_resume`, where the other
process may still have to save a checkpoint."""


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run's files, and the operations on them."""

    path: Path
    lock_timeout_s: float = LOCK_TIMEOUT_S
    """Seconds to wait for another process that trains in this folder."""
    main_run: Path | None = None
    """For a comparison run: the folder of the main run, whose command resumes both."""

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
        return os.path.exists(self.config)  # unlike Path.exists, False without permission to look

    @property
    def status(self) -> Literal["new", "unfinished", "finished"]:
        """Whether the folder holds no run, an unfinished one, or one that is finished with all its comparisons."""
        if not self.started:
            return "new"
        return "finished" if self.finished and os.path.exists(self.result) else "unfinished"

    @property
    def last_checkpoint_step(self) -> int | None:
        """The step of the newest checkpoint."""
        names = [path.parent.name for path in self.checkpoints.glob("*/state.json")]
        return max((int(name) for name in names if name.isdecimal()), default=None)

    def resume_command(self, *options: str) -> str:
        """The command that resumes the run."""
        return shlex.join(["vitrail", "train", "--resume", *options, "--out", str(self.main_run or self.path)])

    def create(self, config: TrainConfig) -> None:
        """Create the folder of a new run and write its config."""
        self.check_unused()
        self._make_folders()
        self.write_config(config)

    def _make_folders(self) -> None:
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TrainError(f"cannot create the run folder {self.path}: {error.strerror or error}.") from None

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder's lock, so that no other process trains in it; raises TrainError after the timeout."""
        self._make_folders()
        with ExitStack() as stack:
            with suppress(OSError):
                file = stack.enter_context((self.checkpoints / ".lock").open("a"))
                if not lock_within(file.fileno(), self.lock_timeout_s, self._notify_waiting):
                    raise TrainError(
                        f"another process is training in {self.path}; wait until it ends, or choose another folder."
                    )
            yield

    def _notify_waiting(self) -> None:
        warn_once(
            [f"another process is still training in {self.path}; waiting up to {self.lock_timeout_s:.0f} s for it"]
        )

    def reopen(self, config: TrainConfig) -> None:
        """Prepare a folder for resuming: remove its result and update its config. The old model stays until the end."""
        self.result.unlink(missing_ok=True)  # first: it does not belong to a config with a longer duration
        if config != self.read_config():
            self.write_config(config)

    def remove_temporary_files(self) -> None:
        """Delete the temporary files that killed processes left behind."""
        for left in self.path.glob(".*"):
            if left.suffix in (".tmp", ".old"):
                shutil.rmtree(left) if left.is_dir() else left.unlink()

    def check_unused(self) -> None:
        if self.started:
            resume = "" if self.status == "finished" else "resume it with --resume, or "
            raise TrainError(
                f"{self.path} already contains a run ({self.status}); {resume}choose another folder with --out."
            )

    def write_config(self, config: TrainConfig) -> None:
        write_json(self.config, {"format_version": VERSION, **config.to_dict()}, overwrite=True)

    def read_config(self) -> TrainConfig:
        if not self.started:
            raise TrainError(f"there is no run to resume in {self.path}: it has no config.json.")
        return read_run_config(self.config)

    def write_result(self, result: dict[str, Any]) -> None:
        """Write result.json, the last file of a run; numbers that are not finite become null."""
        try:
            finite = json.loads(json.dumps(result, default=float), parse_constant=lambda _: None)
            write_json(self.result, {"format_version": VERSION, **finite}, overwrite=True)
        except (CheckpointError, OSError) as error:
            warn_once([f"the run is finished, but {self.result} could not be written: {error}"])

    def read_result(self) -> dict[str, Any] | None:
        """The content of result.json; None if it cannot be read."""
        try:
            return upgrade("result", json.loads(self.result.read_text(encoding="utf-8")))
        except (AttributeError, FormatError, OSError, TypeError, ValueError):
            return None

    def recreate_if_missing(self, config: TrainConfig) -> None:
        """Create the folder and its config again if they were deleted during the run."""
        if self.started:
            return
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.write_config(config)
            warn_once([f"{self.path} was deleted and has been created again; its former content is lost"])
        except (CheckpointError, OSError) as error:
            warn_once([f"{self.path} was deleted and cannot be created again; training continues: {error}"])


def read_run_config(path: Path) -> TrainConfig:
    """The TrainConfig in a run's config.json."""
    try:
        return TrainConfig.from_dict(upgrade("run", json.loads(path.read_text(encoding="utf-8"))))
    except OSError as error:
        raise TrainError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (TypeError, ValueError) as error:
        raise TrainError(f"{path} is not the config of a run: {error}") from error


def first_unused_folder(expected: Path) -> Path:
    """The first of `expected`, expected-2, expected-3, ... that holds no run."""
    number, path = 2, expected
    while RunFolder(path).started:
        path, number = expected.with_name(f"{expected.name}-{number}"), number + 1
    return path


def latest_run_folder(expected: Path) -> Path:
    """The last of `expected`, expected-2, ... that holds a run."""
    number, path = 2, expected
    while RunFolder(after := expected.with_name(f"{expected.name}-{number}")).started:
        path, number = after, number + 1
    return path
