"""The run folder: one place for all that a run leaves behind.

config.json      the full, resolved settings: enough to run it again
metrics.jsonl    one line per logged step and per evaluation
checkpoint/      everything needed to go on; the last two, and the best weights
snapshots/       with snapshot_every: the weights at moments of the run
model/           what `vitrail.load` loads
figures/ report.html
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from vitrail.config import TrainConfig
from vitrail.errors import CheckpointError, TrainError
from vitrail.runtime import say
from vitrail.runtime.locks import locked
from vitrail.weights.write import write_json


@dataclass(frozen=True)
class RunFolder:
    """Where a run's parts lie."""

    path: Path

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
    def finished(self) -> bool:
        return os.path.exists(self.model / "config.json")

    @property
    def started(self) -> bool:
        return os.path.exists(self.config)  # which, unlike Path's own, is False where one may not look

    def begin(self, config: TrainConfig) -> None:
        """A new run: its settings are on disk before anything is computed."""
        self.check_free()
        self._make()
        self.write_config(config)

    def _make(self) -> None:
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TrainError(f"cannot make the run folder {self.path}: {error.strerror or error}.") from None

    @contextmanager
    def held(self) -> Iterator[None]:
        """The folder for this process alone: another one would write the same lines beside it."""
        self._make()
        with ExitStack() as stack:
            with suppress(OSError):
                file = stack.enter_context((self.checkpoints / ".lock").open("a"))
                if not locked(file.fileno()):
                    raise TrainError(
                        f"another process is training in {self.path}; wait for its end, or choose another folder."
                    )
            yield

    def sweep(self) -> None:
        """What killed writers left under temporary names."""
        for left in self.path.glob(".*"):
            if left.suffix in (".tmp", ".old"):
                shutil.rmtree(left) if left.is_dir() else left.unlink()

    def check_free(self) -> None:
        if self.started:
            raise TrainError(
                f"{self.path} holds a run already ({'finished' if self.finished else 'unfinished'}); "
                "go on with --resume, or choose another folder with --out."
            )

    def write_config(self, config: TrainConfig) -> None:
        write_json(self.config, config.to_dict(), overwrite=True)

    def read_config(self) -> TrainConfig:
        if not self.started:
            raise TrainError(f"{self.path} holds no run to resume: there is no config.json in it.")
        return read_config(self.config)

    def restore(self, config: TrainConfig) -> None:
        """The folder itself, where someone took it away while the run went on."""
        if self.started:
            return
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.write_config(config)
            say([f"{self.path} was gone and has been made again; what it held before is lost"])
        except (CheckpointError, OSError) as error:
            say([f"{self.path} is gone and cannot be made again, training goes on: {error}"])


def read_config(path: Path) -> TrainConfig:
    """The settings in a run's config.json, or in a file like it."""
    try:
        return TrainConfig.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise TrainError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (TypeError, ValueError) as error:
        raise TrainError(f"{path} does not hold the settings of a run: {error}") from error


def free_folder(wanted: Path) -> Path:
    """`wanted`, or wanted-2, wanted-3, ...: the first that holds no run."""
    number, path = 2, wanted
    while RunFolder(path).started:
        path, number = wanted.with_name(f"{wanted.name}-{number}"), number + 1
    return path


def latest_folder(wanted: Path) -> Path:
    """Of `wanted`, wanted-2, ... the one with the highest number that holds a run."""
    number, path = 2, wanted
    while RunFolder(after := wanted.with_name(f"{wanted.name}-{number}")).started:
        path, number = after, number + 1
    return path
