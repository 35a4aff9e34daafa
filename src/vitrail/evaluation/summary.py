"""The result of one evaluation of a model on a data set, at one or more image sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vitrail.evaluation.calibration import Calibration, calibration_gaps, json_number, measure_calibration
from vitrail.evaluation.imagenet_real import RealAccuracy
from vitrail.evaluation.intervals import (
    Estimate,
    bootstrap_mean,
    bootstrap_mean_average_precision,
    bootstrap_statistics,
    paired_difference,
    proportion,
)
from vitrail.evaluation.per_class import PerClass, confused_pairs, measure_per_class, mistaken_for
from vitrail.evaluation.scores import SampleResults, Scores
from vitrail.evaluation.throughput import Throughput

# N images, K outputs

NUM_WORST = 10


@dataclass(frozen=True, kw_only=True)
class SizeResult:
    """Metrics at one image size, with 95 % intervals."""

    image_size: tuple[int, int]
    """Height and width of the network's input."""
    top1: Estimate | None
    """Fraction of images whose prediction is correct; None if no image has a label."""
    top5: Estimate | None
    """Fraction of images with a correct class among the top five; None with five outputs or fewer."""
    loss: Estimate
    calibration: Calibration | None
    """None for multi-label data."""
    mean_average_precision: Estimate | None
    """mAP, for multi-label data only."""
    real: RealAccuracy | None
    """Accuracy on ImageNet-ReaL's labels, if requested."""
    top1_change: Estimate | None
    """Top-1 minus that at the first size, on the same images; None at the first size."""
    per_class: PerClass
    throughput: Throughput
    scores: Scores = field(repr=False)
    """Aggregate metrics without intervals, the confusion matrix, and per-image results."""

    @property
    def samples(self) -> SampleResults:
        assert self.scores.samples is not None
        return self.scores.samples

    def to_dict(self, names: Sequence[str], worst: int = NUM_WORST) -> dict[str, Any]:
        """JSON values; `per_class` has the classes with images."""
        estimates = {"top1": self.top1, "top5": self.top5, "loss": self.loss, "map": self.mean_average_precision}
        found: dict[str, Any] = {"image_size": list(self.image_size), "count": self.scores.count}
        found |= {name: _json_estimate(value) for name, value in estimates.items() if value is not None}
        if self.top1 is not None and self.mean_average_precision is None:
            found["top1_wilson"] = {"low": self.scores.low, "high": self.scores.high}
            found["balanced_accuracy"] = json_number(self.per_class.macro_recall)
        if self.calibration is not None:
            found["calibration"] = self.calibration.to_dict()
        if self.real is not None:
            found["real"] = self.real.to_dict()
        if self.top1_change is not None:
            found["top1_change"] = _json_estimate(self.top1_change)
        return found | {
            "throughput": self.throughput.to_dict(),
            "worst_classes": [self._worst_class_row(k, names) for k in self.worst_classes(worst)],
            "confused_pairs": [
                {"true": names[a], "predicted": names[b], "count": n} for a, b, n in confused_pairs(self.samples, worst)
            ],
            "per_class": [self.per_class.to_row(int(k), names[int(k)]) for k in self.per_class.present],
        }

    def worst_classes(self, limit: int = NUM_WORST) -> list[int]:
        """Classes with errors, the worst first."""
        value = self.per_class.recall if self.per_class.average_precision is None else self.per_class.average_precision
        return [k for k in self.per_class.worst(limit) if value[k] < 1]

    def _worst_class_row(self, k: int, names: Sequence[str]) -> dict[str, Any]:
        instead = [{"name": names[other], "count": n} for other, n in mistaken_for(self.samples, k)]
        return self.per_class.to_row(k, names[k]) | {"mistaken_for": instead}


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A model on a data set. `top1.value`, `.low` and `.high` are those of the first size; `sizes` has all sizes."""

    model: str
    data: str
    labels: tuple[str, ...]
    """Names of the model's outputs."""
    multi_label: bool
    """Whether the data is multi-label."""
    matched_by: str
    """How classes were matched to outputs: "synset", "name" or "order"."""
    flip: bool
    bins: int
    sizes: tuple[SizeResult, ...]
    keys: tuple[str, ...] = field(repr=False)
    """Names of the images in their source, by index."""
    notes: tuple[str, ...] = ()
    """Assumptions and caveats."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Skipped images, and why each could not be read."""

    @property
    def first(self) -> SizeResult:
        return self.sizes[0]

    @property
    def top1(self) -> Estimate | None:
        return self.first.top1

    @property
    def top5(self) -> Estimate | None:
        return self.first.top5

    @property
    def loss(self) -> Estimate:
        return self.first.loss

    @property
    def calibration(self) -> Calibration | None:
        return self.first.calibration

    @property
    def mean_average_precision(self) -> Estimate | None:
        return self.first.mean_average_precision

    def to_dict(self, worst: int = NUM_WORST) -> dict[str, Any]:
        """Everything except the per-image results, as JSON values."""
        about = {"model": self.model, "data": self.data, "num_outputs": len(self.labels), "matched_by": self.matched_by}
        options = {"multi_label": self.multi_label, "flip": self.flip, "bins": self.bins}
        remarks = {"notes": list(self.notes), "unreadable": self.unreadable}
        return {**about, **options, "sizes": [size.to_dict(self.labels, worst) for size in self.sizes], **remarks}


def summarize(
    scores: Scores,
    *,
    image_size: tuple[int, int],
    num_outputs: int,
    throughput: Throughput,
    bins: int,
    real: RealAccuracy | None = None,
    first: SizeResult | None = None,
) -> SizeResult:
    """Add intervals, calibration and per-class metrics to `scores`; `first` is the result at the first size."""
    samples, precisions = scores.samples, scores.average_precisions
    assert samples is not None
    assert samples.rank is not None
    assert samples.loss is not None
    labeled = samples.truth.any(1) if precisions is not None else np.ones(len(samples), bool)
    correct = samples.rank < 1
    mean_ap: Estimate | None = None
    error: Estimate | None = None
    if precisions is None:
        losses = samples.loss[:, None], lambda sums: sums[..., 0] / len(samples)
        loss, error = bootstrap_statistics([losses, calibration_gaps(samples.score, correct, bins)])
    else:
        loss = bootstrap_mean(samples.loss)
        assert samples.scores is not None
        value = scores.mean_average_precision
        mean_ap = bootstrap_mean_average_precision(samples.truth, samples.scores, np.nan if value is None else value)
    return SizeResult(
        image_size=image_size,
        top1=proportion(int(correct.sum()), int(labeled.sum())),
        top5=proportion(int((samples.rank < 5).sum()), int(labeled.sum())) if num_outputs > 5 else None,
        loss=loss,
        calibration=measure_calibration(samples.score, correct, bins, error) if precisions is None else None,
        mean_average_precision=mean_ap,
        real=real,
        top1_change=None if first is None else _top1_change(samples, first),
        per_class=measure_per_class(samples, num_outputs, precisions),
        throughput=throughput,
        scores=scores,
    )


def _top1_change(samples: SampleResults, first: SizeResult) -> Estimate | None:
    """None if the images differ, because one was readable only once."""
    assert samples.rank is not None
    assert first.samples.rank is not None
    if not np.array_equal(samples.index, first.samples.index):
        return None
    return paired_difference(samples.rank < 1, first.samples.rank < 1)


def _json_estimate(value: Estimate) -> dict[str, Any]:
    return {name: json_number(v) for name, v in value.to_dict().items()}
