"""Results of an experiment's trials, and their means and differences over seeds."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.errors import TrainError
from vitrail.evaluation.scores import Z95, wilson_interval
from vitrail.reproduction.arm import Arm, Scale
from vitrail.storage.atomic_write import write_json

ARRAYS_FILE = "arrays.npz"
"""File in a trial's run folder with the arrays that its measurements store."""
PROPORTIONS: Mapping[str, int] = {
    "test": sys.maxsize, "validation": sys.maxsize, "start": sys.maxsize, "class head": sys.maxsize,
    "distillation head": sys.maxsize, "5-shot": 5000, "accuracy": 2000, "agreement": 2000,
}  # fmt: skip
"""How the names of metrics begin that are proportions of the test images (`validation`: of those held out), and the
number of images that are used at most."""


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
    versions: str = ""
    """What ran it: `vitrail 0.1.0, PyTorch 2.13.0`."""

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
    """The mean of a metric over seeds, or a weighted sum of such means, with its 95 % interval."""

    value: float
    low: float
    high: float
    count: int
    """Number of seeds. With one seed, the interval of a proportion is that of its images; of others there is none."""

    @property
    def has_interval(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)


@dataclass(frozen=True)
class Sample:
    """One number from each seed."""

    values: Sequence[float]
    least_variance: float = 0.0
    """Variance that each value has at least. Seeds that agree by coincidence would show none."""

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @property
    def variance_of_mean(self) -> float:
        return max(float(np.var(self.values, ddof=1)), self.least_variance) / len(self.values)


def proportion_variance(proportion: float, num_images: int) -> float:
    """Binomial variance of a proportion of images, with Agresti and Coull's four images more, half of them correct.

    Without these, it would be 0 where all images are right.
    """
    adjusted = (proportion * num_images + 2) / (num_images + 4)
    return adjusted * (1 - adjusted) / (num_images + 4)


def weighted_sum(terms: Sequence[tuple[float, Sample]], confidence: float = 0.95) -> SeedMean:
    """The sum of weight times mean with Student's interval, the degrees of freedom by Welch and Satterthwaite.

    There is no interval if a sample has one value only. Values of the same seed are not treated as pairs: networks that
    differ share neither initial weights nor, in many experiments, their batches.
    """
    value, count = sum(weight * sample.mean for weight, sample in terms), min(len(s.values) for _, s in terms)
    if count < 2:
        return SeedMean(value, math.nan, math.nan, count)
    from scipy.special import stdtrit  # type: ignore[import-untyped]

    parts = [(weight**2 * sample.variance_of_mean, len(sample.values) - 1) for weight, sample in terms]
    total = sum(part for part, _ in parts)
    inverse = sum((part / total) ** 2 / freedom for part, freedom in parts) if total > 0 else 0.0
    half = float(stdtrit(1 / max(inverse, 1e-9), (1 + confidence) / 2)) * math.sqrt(total)
    return SeedMean(value, value - half, value + half, count)


def mean_over_seeds(values: Sequence[float], least_variance: float = 0.0) -> SeedMean:
    """The mean with Student's 95 % interval; without an interval for a single value."""
    return weighted_sum([(1.0, Sample(values, least_variance))])


def proportion_mean(sample: Sample) -> SeedMean:
    """The mean of a proportion of the same images in every seed.

    More seeds do not reduce the sampling error of these images, so the squares of both half widths are added.
    """
    mean = mean_over_seeds(sample.values)
    if not mean.has_interval:
        return mean
    half = math.hypot(mean.high - mean.value, Z95 * math.sqrt(sample.least_variance))
    return replace(mean, low=max(mean.value - half, 0.0), high=min(mean.value + half, 1.0))


def mean_difference(ours: Sequence[str], theirs: Sequence[str]) -> dict[str, float]:
    """Arm -> weight of its mean in the mean over `ours` minus that over `theirs`, for `Results.contrast`."""
    return {**dict.fromkeys(ours, 1 / len(ours)), **dict.fromkeys(theirs, -1 / len(theirs))}


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

    def num_images(self, arm: str, metric: str) -> int:
        """Number of images of which a metric is a proportion; 0 if it is none."""
        most = next((most for name, most in PROPORTIONS.items() if metric.startswith(name)), 0)
        trials = self.selected(arm).values()
        counts = [t.validation_count if metric == "validation" else t.test_count for t in trials]
        return min(most, max(counts, default=0))

    def sample(self, arm: str, metric: str = "test") -> Sample | None:
        """The values of the seeds. A proportion's variance is at least the binomial one of a single evaluation."""
        values, num_images = list(self.values(arm, metric).values()), self.num_images(arm, metric)
        if not values:
            return None
        return Sample(values, proportion_variance(float(np.mean(values)), num_images) if num_images else 0.0)

    def mean(self, arm: str, metric: str = "test") -> SeedMean | None:
        """The mean over seeds; None without a value."""
        sample, num_images = self.sample(arm, metric), self.num_images(arm, metric)
        if sample is None or not num_images:
            return None if sample is None else mean_over_seeds(sample.values)
        if len(sample.values) == 1:
            return SeedMean(sample.mean, *wilson_interval(sample.mean * num_images, num_images), 1)
        return proportion_mean(sample)

    def contrast(
        self, weights: Mapping[str, float], metric: str = "test", *, confidence: float = 0.95
    ) -> SeedMean | None:
        """The sum of weight times mean of the arms; None if one of them has no value.

        Arms share the test images, whose sampling mostly cancels; what is left is in the least variance of each value.
        Arms that start from the same model are compared seed by seed, so that its seeds' differences cancel too.
        """
        if (paired := self._paired(weights, metric)) is not None:
            return weighted_sum([(1.0, paired)], confidence)
        samples = {arm: self.sample(arm, metric) for arm in weights}
        terms = [(weights[arm], sample) for arm, sample in samples.items() if sample is not None]
        return weighted_sum(terms, confidence) if len(terms) == len(weights) else None

    def _paired(self, weights: Mapping[str, float], metric: str) -> Sample | None:
        """The contrast of each seed, if all arms start from the same model in each seed; None otherwise."""
        if len(weights) < 2 or any(self.arms[arm].parent_setting != "init_from" for arm in weights):
            return None
        trials = {arm: self.selected(arm) for arm in weights}
        values = {arm: self.values(arm, metric) for arm in weights}
        seeds = sorted(set.intersection(*(set(found) for found in values.values())))
        parents = [{trials[arm][seed].parent for arm in weights} for seed in seeds]
        if not seeds or any(len(names) > 1 or "" in names for names in parents):
            return None
        changes = [sum(weight * values[arm][seed] for arm, weight in weights.items()) for seed in seeds]
        return _changes(changes, min(self.num_images(arm, metric) for arm in weights))

    def difference(self, arm: str, other: str, metric: str = "test") -> SeedMean | None:
        """The mean of `arm` minus that of `other`; None if one of them has no value."""
        return self.contrast({arm: 1.0, other: -1.0}, metric)

    def change(self, arm: str, metric: str, reference: str) -> SeedMean | None:
        """The mean over seeds of one metric minus another of the same run; None without a value of both."""
        if arm not in self.arms:
            return None
        after, before = self.values(arm, metric), self.values(arm, reference)
        changes = [after[seed] - before[seed] for seed in sorted(set(after) & set(before))]
        return weighted_sum([(1.0, _changes(changes, self.num_images(arm, metric)))]) if changes else None

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
    def versions(self) -> list[str]:
        """What ran the finished trials."""
        return sorted({trial.versions for trial in self.trials.values() if trial.versions})

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
    def setting(self) -> str:
        """The networks and the data: `networks of 0.1 to 2 million parameters on cifar10`."""
        sizes = [trial.parameters / 1e6 for trial in self.trials.values() if trial.parameters]
        found = [f"{size:.2g}" for size in dict.fromkeys((min(sizes), max(sizes)))] if sizes else []
        shown = f" of {' to '.join(found)} million parameters" if found else ""
        return f"networks{shown} on {next(iter(self.arms.values())).config.data.source}"

    @property
    def finished_arms(self) -> list[str]:
        """Names of the arms with a test accuracy, in the experiment's order."""
        return [name for name in self.arms if self.values(name)]


def _changes(values: Sequence[float], num_images: int) -> Sample:
    """Paired differences. Two proportions that differ by d differ in at least d of the images, and in at least one."""
    least = max(abs(float(np.mean(values))), 1 / num_images) / num_images if num_images else 0.0
    return Sample(values, least)


def _or_lowest(value: float | None) -> float:
    return -math.inf if value is None else value
