"""What a measurement found: numbers with their intervals, and what was said of each image."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# N images, K classes

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.floating[Any]]

Z95 = 1.959963984540054
"""Standard deviations that hold 95 % of a normal distribution."""

MAX_CONFUSION_CLASSES = 1000
"""More classes than this and the confusion matrix, which grows as their square, is not kept."""


@dataclass(frozen=True, kw_only=True)
class SampleResults:
    """What was said of each image, in the order of the source."""

    index: Ints
    """N: the image's number in its source."""
    truth: npt.NDArray[Any]
    """N class numbers; or N K yes and no, where images have several labels."""
    prediction: Ints
    """N: the likeliest class."""
    score: Floats
    """N: how likely the model holds it, 0 to 1."""
    truth_score: Floats
    """N: how likely it holds the true class (of several labels the least likely one; NaN without any)."""
    scores: Floats | None = None
    """N K, where images have several labels: how likely each class is."""
    rank: Ints | None = None
    """N: how many classes come before the first right one, 0 for a right answer; K or more: none is right."""
    loss: Floats | None = None
    """N, float64: each image's own loss."""
    top_classes: Ints | None = None
    """N 5, or fewer where there are fewer classes: the likeliest classes, best first."""

    def __len__(self) -> int:
        return len(self.index)

    @property
    def correct(self) -> npt.NDArray[np.bool_]:
        """N: whether the likeliest class is the true one, or one of them."""
        if self.truth.ndim == 1:
            return np.asarray(self.truth == self.prediction)
        return np.asarray(self.truth[np.arange(len(self)), self.prediction])


@dataclass(frozen=True, kw_only=True)
class Scores:
    """How well a model does on some images."""

    top1: float
    """Share of the images whose likeliest class is right (one of theirs, where they have several)."""
    top5: float
    """Share of those with a right class among the likeliest five."""
    loss: float
    """Mean cross-entropy; for several labels, or a sigmoid loss, of a yes or no for each class, summed over them."""
    count: int
    """Images measured."""
    low: float
    high: float
    """The 95 % interval of `top1`: Wilson's, which is right for small counts and near 100 % too."""
    confusion: Ints | None = None
    """K K: of true class (row) said to be (column); None for very many classes or several labels."""
    average_precisions: Floats | None = None
    """K, for several labels: area under each class's precision-recall curve; NaN for a class nobody has."""
    samples: SampleResults | None = None

    @property
    def mean_average_precision(self) -> float | None:
        """mAP: the mean over classes that occur."""
        if self.average_precisions is None:
            return None
        return float(np.nanmean(self.average_precisions)) if not np.isnan(self.average_precisions).all() else math.nan

    def to_dict(self) -> dict[str, Any]:
        """What is logged: plain numbers, nothing per image."""
        found: dict[str, Any] = {"top1": self.top1, "top5": self.top5, "loss": self.loss}
        if self.average_precisions is not None:
            found["map"] = self.mean_average_precision
        return found | {"low": self.low, "high": self.high, "count": self.count}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Scores:
        """What `to_dict` gave: the numbers. Of the average precisions only their mean is left."""
        numbers = {name: found[name] for name in ("top1", "top5", "loss", "low", "high", "count")}
        numbers = {name: math.nan if value is None else value for name, value in numbers.items()}
        mean = found.get("map", math.nan)
        precisions = np.array([math.nan if mean is None else mean]) if "map" in found else None
        return cls(**numbers, average_precisions=precisions)


def wilson_interval(correct: float, count: float, z: float = Z95) -> tuple[float, float]:
    """The interval of a share: `right` of `count`. Nothing measured: anything is possible."""
    if count <= 0:
        return 0.0, 1.0
    share, spread = correct / count, z * z / count
    center = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    # At the ends one bound is the share itself, which rounding must not cross.
    return (0.0 if correct <= 0 else center - half), (1.0 if correct >= count else center + half)


def average_precision(truth: npt.NDArray[np.bool_], score: Floats) -> float:
    """Mean over the images of a class of the precision down to each of them; equal scores count as one step.

    NaN where the class does not occur, or where a score is not a number.
    """
    if not truth.any() or np.isnan(score).any():
        return math.nan
    order = np.argsort(-score, kind="stable")
    found = np.cumsum(truth[order])
    last = np.flatnonzero(np.append(np.diff(score[order]) != 0, True))  # of each run of equal scores
    precision, recall = found[last] / (last + 1), found[last] / found[-1]
    return float(np.sum(np.diff(recall, prepend=0.0) * precision))
