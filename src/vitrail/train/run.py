"""The run folder: one place for all that a run leaves behind.

config.json      the full, resolved settings: enough to run it again
metrics.jsonl    one line per logged step and per evaluation
checkpoint/      everything needed to go on; the last two, and the best weights
model/           what `vitrail.load` loads
figures/ report.html
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from vitrail.config import TrainConfig
from vitrail.errors import ConfigError, TrainError
from vitrail.runtime import say
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
    def model(self) -> Path:
        return self.path / "model"

    @property
    def finished(self) -> bool:
        return (self.model / "config.json").exists()

    @property
    def started(self) -> bool:
        return self.config.exists()

    def begin(self, config: TrainConfig) -> None:
        """A new run: its settings are on disk before anything is computed."""
        if self.started:
            raise TrainError(
                f"{self.path} holds a run already ({'finished' if self.finished else 'unfinished'}); "
                "go on with --resume, or choose another folder with --out."
            )
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TrainError(f"cannot make the run folder {self.path}: {error.strerror or error}.") from None
        self.write_config(config)

    def write_config(self, config: TrainConfig) -> None:
        write_json(self.config, config.to_dict(), overwrite=True)

    def read_config(self) -> TrainConfig:
        try:
            return TrainConfig.from_dict(json.loads(self.config.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise TrainError(f"{self.path} holds no run to resume: there is no config.json in it.") from None
        except (ValueError, ConfigError) as error:
            raise TrainError(f"{self.config} cannot be read: {error}") from error

    def restore(self, config: TrainConfig) -> None:
        """The folder itself, where someone took it away while the run went on."""
        if not self.checkpoints.is_dir():
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.write_config(config)
            say([f"{self.path} was gone and has been made again; what it held before is lost"])


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
