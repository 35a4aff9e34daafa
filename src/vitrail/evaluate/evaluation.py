"""Everything one evaluation found: a model on some images, at one size or at several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vitrail.evaluate.calibration import Calibration, calibration, gaps, plain
from vitrail.evaluate.intervals import Estimate, difference, mean, mean_precision, share, together
from vitrail.evaluate.per_class import PerClass, confused_pairs, mistaken_for, per_class
from vitrail.evaluate.real import Real
from vitrail.evaluate.scores import Samples, Scores
from vitrail.evaluate.speed import Speed

# N images, K outputs

WORST = 10


@dataclass(frozen=True, kw_only=True)
class Measured:
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
    real: Real | None
    """Accuracy on ImageNet-ReaL's labels, where they were asked for."""
    change: Estimate | None
    """Top-1 less that at the first size, over the same images; None at the first."""
    classes: PerClass
    speed: Speed
    scores: Scores = field(repr=False)
    """The plain numbers, the confusion matrix, and what was said of each image."""

    @property
    def samples(self) -> Samples:
        assert self.scores.samples is not None
        return self.scores.samples

    def to_dict(self, names: Sequence[str], worst: int = WORST) -> dict[str, Any]:
        """Plain values; of classes, all that have images."""
        estimates = {"top1": self.top1, "top5": self.top5, "loss": self.loss, "map": self.mean_average_precision}
        found: dict[str, Any] = {"image": list(self.image_size), "count": self.scores.count}
        found |= {name: _estimate(value) for name, value in estimates.items() if value is not None}
        if self.top1 is not None and self.mean_average_precision is None:
            found["wilson"] = {"low": self.scores.low, "high": self.scores.high}
            found["balanced_accuracy"] = plain(self.classes.macro_recall)
        if self.calibration is not None:
            found["calibration"] = self.calibration.to_dict()
        if self.real is not None:
            found["real"] = self.real.to_dict()
        if self.change is not None:
            found["change"] = _estimate(self.change)
        return found | {
            "speed": self.speed.to_dict(),
            "worst": [self._row(k, names) for k in self.worst(worst)],
            "confused": [
                {"true": names[a], "said": names[b], "count": n} for a, b, n in confused_pairs(self.samples, worst)
            ],
            "classes": [self.classes.row(int(k), names[int(k)]) for k in self.classes.present],
        }

    def worst(self, most: int = WORST) -> list[int]:
        """Classes that are not always right, the worst first."""
        value = self.classes.recall if self.classes.average_precision is None else self.classes.average_precision
        return [k for k in self.classes.worst(most) if value[k] < 1]

    def _row(self, k: int, names: Sequence[str]) -> dict[str, Any]:
        instead = [{"name": names[other], "count": n} for other, n in mistaken_for(self.samples, k)]
        return self.classes.row(k, names[k]) | {"mistaken_for": instead}


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A model on some images: `found.top1.value`, `.low`, `.high`; `sizes` holds every size that was asked for."""

    model: str
    data: str
    names: tuple[str, ...]
    """What the model's outputs are called."""
    multi_label: bool
    """Whether images have several labels."""
    matched: str
    """How classes and outputs were brought together: "synset", "name" or "order"."""
    flip: bool
    bins: int
    sizes: tuple[Measured, ...]
    keys: tuple[str, ...] = field(repr=False)
    """The images' names in their source, by their numbers there."""
    notes: tuple[str, ...] = ()
    """What cannot be said, and what was assumed."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Images that were left out, and why."""

    @property
    def first(self) -> Measured:
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

    def to_dict(self, worst: int = WORST) -> dict[str, Any]:
        """All of it but what was said of each image."""
        about = {"model": self.model, "data": self.data, "outputs": len(self.names), "matched": self.matched}
        how = {"multi_label": self.multi_label, "flip": self.flip, "bins": self.bins}
        said = {"notes": list(self.notes), "unreadable": self.unreadable}
        return {**about, **how, "sizes": [size.to_dict(self.names, worst) for size in self.sizes], **said}


def summarize(
    scores: Scores,
    *,
    image_size: tuple[int, int],
    outputs: int,
    speed: Speed,
    bins: int,
    real: Real | None = None,
    before: Measured | None = None,
) -> Measured:
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
        loss, error = together([losses, gaps(samples.score, right, bins)])
    else:
        loss = mean(samples.loss)
        assert samples.scores is not None
        value = scores.mean_average_precision
        map_ = mean_precision(samples.truth, samples.scores, np.nan if value is None else value)
    return Measured(
        image_size=image_size,
        top1=share(int(right.sum()), int(asked.sum())),
        top5=share(int((samples.rank < 5).sum()), int(asked.sum())) if outputs > 5 else None,
        loss=loss,
        calibration=calibration(samples.score, right, bins, error) if precisions is None else None,
        mean_average_precision=map_,
        real=real,
        change=None if before is None else _change(samples, before),
        classes=per_class(samples, outputs, precisions),
        speed=speed,
        scores=scores,
    )


def _change(samples: Samples, before: Measured) -> Estimate | None:
    """None where other images were measured: one may be readable at one time and not at another."""
    assert samples.rank is not None
    assert before.samples.rank is not None
    if not np.array_equal(samples.index, before.samples.index):
        return None
    return difference(samples.rank < 1, before.samples.rank < 1)


def _estimate(value: Estimate) -> dict[str, Any]:
    return {name: plain(v) for name, v in value.to_dict().items()}
