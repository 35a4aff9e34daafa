"""A run folder's settings, logged training steps and evaluations."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.config import Duration
from vitrail.config.format_version import upgrade
from vitrail.errors import ConfigError, NotFoundError
from vitrail.runs.metrics_log import MetricsLine, read_metrics
from vitrail.weights.model_info import strip_local_folders

Curve = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]
"""x (epochs, or steps if epochs are unknown) and values, without gaps and NaN."""

IGNORED_SETTINGS = frozenset(
    {
        "name",
        "compare",
        "device",
        "log_every",
        "evaluate_every",
        "checkpoint_every",
        "snapshot_every",
        "trackers",
        "callbacks",
    }
)
"""Settings that do not affect what a run learns."""


@dataclass(frozen=True)
class RunRecord:
    """The contents of config.json and metrics.jsonl."""

    path: Path
    config: dict[str, Any]
    steps: list[MetricsLine]
    """Logged steps, in order."""
    evaluations: list[MetricsLine]
    test_scores: dict[str, Any] | None = None
    """Scores of the final model on a test split that was not used to select it."""

    @property
    def name(self) -> str:
        return str(self.config.get("name") or self.path.name)

    @property
    def steps_per_epoch(self) -> float | None:
        """Number of steps per epoch."""
        known = [line for line in (*self.steps, *self.evaluations) if line.get("epoch") and line["step"]]
        return known[-1]["step"] / known[-1]["epoch"] if known else None

    def x_of(self, line: MetricsLine) -> float:
        """Position of a logged line on the horizontal axis."""
        if line.get("epoch") is not None:
            return float(line["epoch"])
        return line["step"] / self.steps_per_epoch if self.steps_per_epoch else float(line["step"])

    def training_curve(self, name: str) -> Curve:
        """A logged training metric over the run."""
        return _curve([(self.x_of(line), line.get(name)) for line in self.steps])

    def evaluation_curve(self, name: str, *, ema: bool = False) -> Curve:
        """An evaluation metric over the run, of the weights or of their EMA."""
        lines = [line for line in self.evaluations if bool(line.get("ema")) == ema]
        return _curve([(self.x_of(line), line["evaluation"].get(name)) for line in lines])

    @property
    def has_ema(self) -> bool:
        """Whether the EMA of the weights was evaluated."""
        return any(line.get("ema") for line in self.evaluations)

    @property
    def last_scores(self) -> dict[str, Any] | None:
        """The last evaluation; that of the EMA if both were evaluated."""
        if not self.evaluations:
            return None
        last = max(self.evaluations, key=lambda line: (line["step"], bool(line.get("ema"))))
        return dict(last["evaluation"])

    @property
    def multi_label(self) -> bool:
        """Whether the data is multi-label: only then is the average precision logged."""
        return any("map" in line["evaluation"] for line in self.evaluations)

    @property
    def last_step(self) -> float:
        """The last logged step."""
        return max((line["step"] for line in (*self.steps, *self.evaluations)), default=0)

    @property
    def seconds(self) -> float | None:
        """Duration of the run."""
        times = [line["time"] for line in self.steps if line.get("time") is not None]
        if not times:
            return None
        return float(times[-1] - times[0] if times[0] > 1e8 else times[-1])  # Unix time, or seconds since the start

    @property
    def images_per_second(self) -> float | None:
        """Median of the logged throughput."""
        rates = [line["images_per_s"] for line in self.steps if line.get("images_per_s")]
        return float(np.median(rates)) if rates else None

    @property
    def num_images(self) -> int | None:
        """Number of training images processed."""
        return next((int(line["images"]) for line in reversed(self.steps) if line.get("images")), None)

    def progress_if_stopped(self) -> tuple[str, str] | None:
        """(reached, planned) duration if the run ended early, else None."""
        try:
            expected = Duration.from_text(str(self.config["duration"]))
        except (KeyError, ConfigError):
            return None
        done = {
            "steps": self.last_step,
            "images": self.num_images,
            "epochs": self.last_step / (self.steps_per_epoch or math.inf),
        }
        reached = done[expected.unit]
        if reached is None or reached >= expected.count - 0.5 * _logging_interval(self, expected.unit):
            return None
        return f"{reached:,.4g}", str(expected)


def _logging_interval(run: RunRecord, unit: str) -> float:
    """Twice the distance of the last two logged lines: the end of a run may fall between them."""
    marks = [line["step"] for line in run.steps[-2:]]
    stride = 2.0 * (marks[1] - marks[0] if len(marks) == 2 else 1)
    if unit == "steps":
        return stride
    per_step = (run.num_images or 0) / max(run.last_step, 1)
    return stride * per_step if unit == "images" else stride / (run.steps_per_epoch or math.inf)


def _curve(points: list[tuple[float, Any]]) -> Curve:
    finite = [(x, float(y)) for x, y in points if y is not None and math.isfinite(y)]
    table = np.array(finite, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def read_run(path: Path) -> RunRecord:
    """Read a run folder. config.json is required; missing or truncated metrics are skipped."""
    try:
        config = upgrade("run", json.loads((path / "config.json").read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise NotFoundError(f"{path} is not a run folder: it has no config.json.") from None
    except ValueError as error:
        raise ConfigError(f"{path / 'config.json'} cannot be read: {error}") from error
    lines = read_metrics(path / "metrics.jsonl")
    tests = [line["test"] for line in lines if isinstance(line.get("test"), dict)]
    return RunRecord(
        path,
        config,
        [line for line in lines if "evaluation" not in line and "test" not in line],
        [line for line in lines if isinstance(line.get("evaluation"), dict)],
        tests[-1] if tests else None,
    )


def config_differences(config: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings of `other` that differ from those of `config`, by dotted name."""
    differences: dict[str, Any] = {}
    for key in sorted({*config, *other}):
        a, b = config.get(key), other.get(key)
        if a == b or (not prefix and key in IGNORED_SETTINGS):
            continue
        if isinstance(a, dict) and isinstance(b, dict):
            differences |= config_differences(a, b, f"{prefix}{key}.")
        else:
            differences[f"{prefix}{key}"] = b
    return differences


def describe_difference(run: RunRecord, other: RunRecord) -> str:
    """A name for another run: the settings that differ, or its own name if there are many."""
    differences = config_differences(run.config, other.config)
    if not differences:
        return other.name
    if differences == {"model.position": "none"}:
        return "without positions"
    settings = [
        f"{key.rpartition('.')[2].replace('_', ' ')} {_format_setting(value)}" for key, value in differences.items()
    ]
    return ", ".join(settings) if len(settings) <= 2 else other.name


def _format_setting(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else strip_local_folders(str(value))
