"""Scores of a classifier: aggregate metrics and per-image results."""

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
"""Two-sided 95 % quantile of the standard normal distribution."""

MAX_CONFUSION_CLASSES = 1000
"""Above this number of classes, the confusion matrix is not computed."""


@dataclass(frozen=True, kw_only=True)
class SampleResults:
    """Result for each image, in the order of the source."""

    index: Ints
    """N: index of the image in its source."""
    truth: npt.NDArray[Any]
    """N class indices; for multi-label data N K booleans."""
    prediction: Ints
    """N: highest-scoring class."""
    score: Floats
    """N: its probability."""
    truth_score: Floats
    """N: probability of the true class (for multi-label data the lowest of the true classes; NaN without any)."""
    scores: Floats | None = None
    """N K, for multi-label data only: probability of each class."""
    rank: Ints | None = None
    """N: number of classes ranked before the first correct one. 0: correct prediction; K or more: none is possible."""
    loss: Floats | None = None
    """N, float64: loss of each image."""
    top_classes: Ints | None = None
    """N 5, or fewer with fewer classes: highest-scoring classes, best first."""

    def __len__(self) -> int:
        return len(self.index)

    @property
    def correct(self) -> npt.NDArray[np.bool_]:
        """N: whether the prediction is the true class, or one of them."""
        if self.truth.ndim == 1:
            return np.asarray(self.truth == self.prediction)
        return np.asarray(self.truth[np.arange(len(self)), self.prediction])


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Aggregate metrics of a classifier on a data set."""

    top1: float
    """Fraction of images whose prediction is correct (one of the true classes, for multi-label data)."""
    top5: float
    """Fraction of images with a correct class among the five highest-scoring ones."""
    loss: float
    """Mean cross-entropy; for multi-label data or a sigmoid loss, binary cross-entropy summed over classes."""
    count: int
    """Number of images."""
    low: float
    high: float
    """Wilson's 95 % interval of `top1`, which is accurate for small counts and near 100 %."""
    confusion: Ints | None = None
    """K K: true class (row) by predicted class (column); None for very many classes and for multi-label data."""
    average_precisions: Floats | None = None
    """K, for multi-label data: area under each class's precision-recall curve; NaN for a class that does not occur."""
    samples: SampleResults | None = None

    @property
    def mean_average_precision(self) -> float | None:
        """mAP: the mean over the classes that occur."""
        if self.average_precisions is None:
            return None
        return float(np.nanmean(self.average_precisions)) if not np.isnan(self.average_precisions).all() else math.nan

    def to_dict(self) -> dict[str, Any]:
        """The values that are logged, without per-image results."""
        found: dict[str, Any] = {"top1": self.top1, "top5": self.top5, "loss": self.loss}
        if self.average_precisions is not None:
            found["map"] = self.mean_average_precision
        return found | {"low": self.low, "high": self.high, "count": self.count}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Scores:
        """The inverse of `to_dict`; only the mean of the average precisions is restored."""
        numbers = {name: found[name] for name in ("top1", "top5", "loss", "low", "high", "count")}
        numbers = {name: math.nan if value is None else value for name, value in numbers.items()}
        mean = found.get("map", math.nan)
        precisions = np.array([math.nan if mean is None else mean]) if "map" in found else None
        return cls(**numbers, average_precisions=precisions)


def wilson_interval(correct: float, count: float, z: float = Z95) -> tuple[float, float]:
    """Wilson's 95 % interval of the proportion `correct` / `count`; (0, 1) if `count` is 0."""
    if count <= 0:
        return 0.0, 1.0
    value, spread = correct / count, z * z / count
    center = (value + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(value * (1 - value) / count + spread / (4 * count))
    # At 0 and 1 one bound equals the proportion itself; rounding must not move it past that.
    return (0.0 if correct <= 0 else center - half), (1.0 if correct >= count else center + half)


def average_precision(truth: npt.NDArray[np.bool_], score: Floats) -> float:
    """Area under the precision-recall curve as in scikit-learn; equal scores count as one step.

    NaN if the class does not occur or a score is NaN.
    """
    if not truth.any() or np.isnan(score).any():
        return math.nan
    order = np.argsort(-score, kind="stable")
    found = np.cumsum(truth[order])
    last = np.flatnonzero(np.append(np.diff(score[order]) != 0, True))  # of each run of equal scores
    precision, recall = found[last] / (last + 1), found[last] / found[-1]
    return float(np.sum(np.diff(recall, prepend=0.0) * precision))
