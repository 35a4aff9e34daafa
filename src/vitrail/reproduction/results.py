"""Results of an experiment's trials, and their means and differences over seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.errors import TrainError
from vitrail.evaluation.scores import wilson_interval
from vitrail.reproduction.arm import Arm, Scale
from vitrail.storage.atomic_write import write_json

ARRAYS_FILE = "arrays.npz"
"""File in a trial's run folder with the arrays that its measurements store."""
SCORES = ("test", "validation")
"""Proportions of images that every run has."""
PROPORTIONS = (*SCORES, "5-shot", "start", "accuracy", "agreement", "class head", "distillation head")
"""How the names of metrics begin that are proportions: their intervals stay within 0 and 1."""


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """What one training run reached. Stored as trials/KEY.json beside its run folder."""

    key: str
    arm: str
    lr: float
    seed: int
    settings: str
    """Digest of the settings, so that another experiment's result is not taken for this one's."""
    parent: str = ""
    """Key of the trial whose model it started from or had as its teacher, if it had one."""
    test: float | None = None
    """Top-1 accuracy on the test images."""
    test_count: int = 0
    validation: float | None = None
    """Top-1 accuracy on the training images that were held out to select the learning rate."""
    validation_count: int = 0
    measures: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    """Duration of the run, without its measurements."""
    measure_seconds: float = 0.0
    images: int = 0
    """Number of training images processed."""
    flops: int = 0
    """FLOPs of a forward pass for one image."""
    parameters: int = 0
    diverged: bool = False
    """The loss was not finite at some step, so that there are no scores."""
    device: str = ""
    """Where it ran: `NVIDIA H200`, `2 cores of AMD EPYC`."""

    def __post_init__(self) -> None:
        finite = {name: value for name, value in self.measures.items() if math.isfinite(value)}
        object.__setattr__(self, "measures", finite)  # JSON has no NaN

    def value(self, metric: str) -> float | None:
        """`test`, `validation`, `seconds`, `flops`, `parameters` or a measurement."""
        found = self.measures[metric] if metric in self.measures else getattr(self, metric, None)
        return None if found is None or not math.isfinite(found) else float(found)

    def write(self, path: Path) -> None:
        write_json(path, asdict(self), overwrite=True)


def read_result(path: Path) -> TrialResult | None:
    """The result in a file; None if there is none. Raises TrainError if the file is damaged."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return TrialResult(**found)
    except FileNotFoundError:
        return None
    except (OSError, TypeError, ValueError) as error:
        raise TrainError(f"{path} is not the result of a trial: {error}; remove it to run the trial again.") from error


@dataclass(frozen=True)
class SeedMean:
    """The mean of a metric over seeds with its 95 % interval."""

    value: float
    low: float
    high: float
    count: int
    """Number of seeds. With one seed, the interval of a proportion is that of its images; of others there is none."""

    @property
    def has_interval(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)


def mean_over_seeds(values: Sequence[float]) -> SeedMean:
    """The mean with Student's 95 % interval; without an interval for a single value."""
    mean, count = float(np.mean(values)), len(values)
    if count < 2:
        return SeedMean(mean, math.nan, math.nan, count)
    from scipy.special import stdtrit  # type: ignore[import-untyped]

    half = float(stdtrit(count - 1, 0.975)) * float(np.std(values, ddof=1)) / math.sqrt(count)
    return SeedMean(mean, mean - half, mean + half, count)


def difference_of_means(ours: Sequence[float], theirs: Sequence[float]) -> SeedMean:
    """The mean of `ours` minus that of `theirs` with Welch's 95 % interval, none if one of them is a single value.

    Runs of the same seed are not treated as pairs: networks that differ share neither initial weights nor, in many
    experiments, their batches.
    """
    value, count = float(np.mean(ours) - np.mean(theirs)), min(len(ours), len(theirs))
    if count < 2:
        return SeedMean(value, math.nan, math.nan, count)
    parts = [float(np.var(values, ddof=1)) / len(values) for values in (ours, theirs)]
    if sum(parts) == 0:
        return SeedMean(value, value, value, count)
    from scipy.special import stdtrit

    freedom = sum(parts) ** 2 / sum(part**2 / (len(v) - 1) for part, v in zip(parts, (ours, theirs), strict=True))
    half = float(stdtrit(freedom, 0.975)) * math.sqrt(sum(parts))
    return SeedMean(value, value - half, value + half, count)


class Results:
    """The finished trials of an experiment. Arms without a finished trial have no estimates."""

    def __init__(
        self, arms: Sequence[Arm], scale: Scale, found: Iterable[TrialResult], folder: Path | None = None
    ) -> None:
        """folder: where the trials' run folders are, for `arrays`."""
        self.arms = {arm.name: arm for arm in arms}
        self.scale, self.folder = scale, folder
        self.trials: dict[str, TrialResult] = {trial.key: trial for trial in found}

    def of_arm(self, arm: str) -> list[TrialResult]:
        """All finished trials of an arm, by learning rate and seed."""
        return sorted((t for t in self.trials.values() if t.arm == arm), key=lambda t: (t.lr, t.seed))

    def selected_rate(self, arm: str, among: Collection[float] | None = None) -> float | None:
        """The learning rate with the highest validation accuracy of seed 0; of equal ones the first in the arm's list.

        among: consider only these. None if no trial is finished.
        """
        found = {t.lr: t for t in self.of_arm(arm) if t.seed == 0 and (among is None or t.lr in among)}
        tried = [lr for lr in self.arms[arm].rates if lr in found]
        if not tried:
            return None
        return max(tried, key=lambda lr: (_or_lowest(found[lr].validation), -tried.index(lr)))

    def selected(self, arm: str) -> dict[int, TrialResult]:
        """Seed -> the finished trial with the selected learning rate."""
        rate = self.selected_rate(arm)
        return {t.seed: t for t in self.of_arm(arm) if t.lr == rate}

    def values(self, arm: str, metric: str = "test") -> dict[int, float]:
        """Seed -> value of a metric at the selected learning rate."""
        found = {seed: trial.value(metric) for seed, trial in self.selected(arm).items()}
        return {seed: value for seed, value in found.items() if value is not None}

    def mean(self, arm: str, metric: str = "test") -> SeedMean | None:
        """The mean over seeds; None without a value."""
        values = self.values(arm, metric)
        if not values:
            return None
        if len(values) == 1 and metric in SCORES:
            ((seed, value),) = values.items()
            trial = self.selected(arm)[seed]
            count = trial.test_count if metric == "test" else trial.validation_count
            return SeedMean(value, *wilson_interval(value * count, count), 1)
        mean = mean_over_seeds(list(values.values()))
        if mean.has_interval and metric.startswith(PROPORTIONS):
            return replace(mean, low=max(mean.low, 0.0), high=min(mean.high, 1.0))
        return mean

    def difference(self, arm: str, other: str, metric: str = "test") -> SeedMean | None:
        """The mean of `arm` minus that of `other` with Welch's interval; None if one of them has no value."""
        ours, theirs = self.values(arm, metric), self.values(other, metric)
        return difference_of_means(list(ours.values()), list(theirs.values())) if ours and theirs else None

    def arrays(self, arm: str, seed: int = 0) -> dict[str, npt.NDArray[Any]]:
        """The arrays that a measurement stored with `save_arrays`; empty if the trial is not finished."""
        trial = self.selected(arm).get(seed)
        if trial is None or self.folder is None:
            return {}
        path = self.folder / trial.key / ARRAYS_FILE
        if not path.exists():
            return {}
        with np.load(path, allow_pickle=False) as found:
            return dict(found)

    @property
    def seconds(self) -> float:
        """Duration of all finished trials together, which may have run at the same time."""
        return sum(trial.seconds for trial in self.trials.values())

    @property
    def devices(self) -> list[str]:
        """Where the finished trials ran."""
        return sorted({trial.device for trial in self.trials.values() if trial.device})

    @property
    def num_seeds(self) -> int:
        """The largest number of seeds of an arm."""
        return max((len(self.selected(arm)) for arm in self.arms), default=0)

    @property
    def origin(self) -> str:
        """The data and the number of seeds, for the subtitle of a figure."""
        source = next(iter(self.arms.values())).config.data.source
        return f"{source}, {self.num_seeds} seed{'s' * (self.num_seeds != 1)}"

    @property
    def finished_arms(self) -> list[str]:
        """Names of the arms with a test accuracy, in the experiment's order."""
        return [name for name in self.arms if self.values(name)]


def _or_lowest(value: float | None) -> float:
    return -math.inf if value is None else value
