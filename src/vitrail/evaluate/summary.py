"""Everything one evaluation found: a model on some images, at one size or at several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vitrail.evaluate.calibration import Calibration, calibration_gaps, json_number, measure_calibration
from vitrail.evaluate.imagenet_real import RealAccuracy
from vitrail.evaluate.intervals import (
    Estimate,
    bootstrap_map,
    bootstrap_mean,
    bootstrap_statistics,
    paired_difference,
    proportion,
)
from vitrail.evaluate.per_class import PerClass, confused_pairs, measure_per_class, mistaken_for
from vitrail.evaluate.scores import SampleResults, Scores
from vitrail.evaluate.throughput import Throughput

# N images, K outputs

NUM_WORST = 10


@dataclass(frozen=True, kw_only=True)
class SizeResult:
    """What was found at one size; every number has its interval."""

    image_size: tuple[int, int]
    """Height and width of what the network was given."""
    top1: Estimate | None
    """Share of images whose likeliest class is right; None where no image has a label."""
    top5: Estimate | None
    """With a right class among the likeliest five; None where there are no more than five."""
    loss: Estimate
    calibration: Calibration | None
    """None for several labels."""
    mean_average_precision: Estimate | None
    """mAP, for several labels."""
    real: RealAccuracy | None
    """Accuracy on ImageNet-ReaL's labels, where they were asked for."""
    top1_change: Estimate | None
    """Top-1 less that at the first size, over the same images; None at the first."""
    per_class: PerClass
    throughput: Throughput
    scores: Scores = field(repr=False)
    """The plain numbers, the confusion matrix, and what was said of each image."""

    @property
    def samples(self) -> SampleResults:
        assert self.scores.samples is not None
        return self.scores.samples

    def to_dict(self, names: Sequence[str], worst: int = NUM_WORST) -> dict[str, Any]:
        """Plain values; of classes, all that have images."""
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

    def worst_classes(self, most: int = NUM_WORST) -> list[int]:
        """Classes that are not always right, the worst first."""
        value = self.per_class.recall if self.per_class.average_precision is None else self.per_class.average_precision
        return [k for k in self.per_class.worst(most) if value[k] < 1]

    def _worst_class_row(self, k: int, names: Sequence[str]) -> dict[str, Any]:
        instead = [{"name": names[other], "count": n} for other, n in mistaken_for(self.samples, k)]
        return self.per_class.to_row(k, names[k]) | {"mistaken_for": instead}


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A model on some images: `found.top1.value`, `.low`, `.high`; `sizes` holds every size that was asked for."""

    model: str
    data: str
    labels: tuple[str, ...]
    """What the model's outputs are called."""
    multi_label: bool
    """Whether images have several labels."""
    matched_by: str
    """How classes and outputs were brought together: "synset", "name" or "order"."""
    flip: bool
    bins: int
    sizes: tuple[SizeResult, ...]
    keys: tuple[str, ...] = field(repr=False)
    """The images' names in their source, by their numbers there."""
    notes: tuple[str, ...] = ()
    """What cannot be said, and what was assumed."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Images that were left out, and why."""

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
        """All of it but what was said of each image."""
        about = {"model": self.model, "data": self.data, "num_outputs": len(self.labels), "matched_by": self.matched_by}
        how = {"multi_label": self.multi_label, "flip": self.flip, "bins": self.bins}
        said = {"notes": list(self.notes), "unreadable": self.unreadable}
        return {**about, **how, "sizes": [size.to_dict(self.labels, worst) for size in self.sizes], **said}


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
    """From the plain numbers to those with intervals; `before` is what was found at the first size."""
    samples, precisions = scores.samples, scores.average_precisions
    assert samples is not None
    assert samples.rank is not None
    assert samples.loss is not None
    asked = samples.truth.any(1) if precisions is not None else np.ones(len(samples), bool)
    right = samples.rank < 1
    map_: Estimate | None = None
    error: Estimate | None = None
    if precisions is None:
        losses = samples.loss[:, None], lambda sums: sums[..., 0] / len(samples)
        loss, error = bootstrap_statistics([losses, calibration_gaps(samples.score, right, bins)])
    else:
        loss = bootstrap_mean(samples.loss)
        assert samples.scores is not None
        value = scores.mean_average_precision
        map_ = bootstrap_map(samples.truth, samples.scores, np.nan if value is None else value)
    return SizeResult(
        image_size=image_size,
        top1=proportion(int(right.sum()), int(asked.sum())),
        top5=proportion(int((samples.rank < 5).sum()), int(asked.sum())) if num_outputs > 5 else None,
        loss=loss,
        calibration=measure_calibration(samples.score, right, bins, error) if precisions is None else None,
        mean_average_precision=map_,
        real=real,
        top1_change=None if first is None else _top1_change(samples, first),
        per_class=measure_per_class(samples, num_outputs, precisions),
        throughput=throughput,
        scores=scores,
    )


def _top1_change(samples: SampleResults, before: SizeResult) -> Estimate | None:
    """None where other images were measured: one may be readable at one time and not at another."""
    assert samples.rank is not None
    assert before.samples.rank is not None
    if not np.array_equal(samples.index, before.samples.index):
        return None
    return paired_difference(samples.rank < 1, before.samples.rank < 1)


def _json_estimate(value: Estimate) -> dict[str, Any]:
    return {name: json_number(v) for name, v in value.to_dict().items()}
