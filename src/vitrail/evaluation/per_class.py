"""Per-class metrics: precision, recall, F1, and which classes are confused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.evaluation.calibration import json_number
from vitrail.evaluation.scores import Floats, Ints, SampleResults, wilson_interval

# N images, K classes


@dataclass(frozen=True, kw_only=True)
class PerClass:
    """Counts and metrics of every output of the model, K each, including classes without images."""

    support: Ints
    """Number of images of the class."""
    predicted: Ints
    """Number of images predicted to be of the class."""
    correct: Ints
    """Number of images that are both."""
    loss: Floats
    """Mean loss of the class's images; NaN without any."""
    average_precision: Floats | None = None
    """For multi-label data; NaN for a class that does not occur."""

    @property
    def recall(self) -> Floats:
        """Fraction of the class's images that are predicted correctly; NaN without any."""
        return _ratio(self.correct, self.support)

    @property
    def precision(self) -> Floats:
        """Fraction of predictions of the class that are correct; NaN if it is never predicted."""
        return _ratio(self.correct, self.predicted)

    @property
    def f1(self) -> Floats:
        """Harmonic mean of precision and recall."""
        return _ratio(2 * self.correct, self.support + self.predicted)

    @property
    def present(self) -> Ints:
        """Classes with at least one image."""
        return np.flatnonzero(self.support)

    @property
    def macro_recall(self) -> float:
        """Unweighted mean recall over the classes with images: the balanced accuracy."""
        return float(self.recall[self.present].mean())

    def worst(self, limit: int) -> list[int]:
        """Classes with the lowest recall (average precision for multi-label data); ties go to the highest loss."""
        value = self.recall if self.average_precision is None else self.average_precision
        present = self.present
        order = np.lexsort((present, -self.loss[present], value[present]))
        return [int(k) for k in present[order][:limit]]

    def to_row(self, k: int, name: str) -> dict[str, Any]:
        """One class as a table row; None for undefined values."""
        low, high = wilson_interval(self.correct[k], self.support[k])
        values = {"recall": self.recall[k], "low": low, "high": high, "precision": self.precision[k], "f1": self.f1[k]}
        if self.average_precision is not None:
            values["average_precision"] = self.average_precision[k]
        counts = {"support": int(self.support[k]), "predicted": int(self.predicted[k]), "correct": int(self.correct[k])}
        return {"class": int(k), "name": name, **counts, **{n: json_number(v) for n, v in values.items()}}


def measure_per_class(samples: SampleResults, num_classes: int, average_precisions: Floats | None = None) -> PerClass:
    """From per-image results. In multi-label data a class is predicted if its probability is at least 0.5."""
    assert samples.loss is not None
    if samples.scores is not None:
        predicted = samples.scores >= 0.5
        support, of_class = samples.truth.sum(0), samples.truth
        counts = {"support": support, "predicted": predicted.sum(0), "correct": (predicted & samples.truth).sum(0)}
        losses = (of_class * samples.loss[:, None]).sum(0)
        return PerClass(**counts, loss=_ratio(losses, support), average_precision=average_precisions)

    def count(of: Ints) -> Ints:
        return np.bincount(of, minlength=num_classes)

    support = count(samples.truth)
    return PerClass(
        support=support,
        predicted=count(samples.prediction),
        correct=count(samples.truth[samples.correct]),
        loss=_ratio(np.bincount(samples.truth, samples.loss, num_classes), support),
    )


def confused_pairs(samples: SampleResults, limit: int) -> list[tuple[int, int, int]]:
    """(true class, predicted class, count), most frequent first; empty for multi-label data."""
    if samples.truth.ndim != 1:
        return []
    wrong = ~samples.correct
    pairs, counts = np.unique(np.stack([samples.truth, samples.prediction], 1)[wrong], axis=0, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:limit]
    return [(int(pairs[i, 0]), int(pairs[i, 1]), int(counts[i])) for i in order]


def mistaken_for(samples: SampleResults, k: int, limit: int = 3) -> list[tuple[int, int]]:
    """(predicted class, count) of the wrong predictions for images of class k, most frequent first."""
    if samples.truth.ndim != 1:
        return []
    wrong = samples.prediction[(samples.truth == k) & ~samples.correct]
    classes, counts = np.unique(wrong, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:limit]
    return [(int(classes[i]), int(counts[i])) for i in order]


def partial_confusion(samples: SampleResults, classes: Sequence[int]) -> Ints:
    """C x (C + 1) confusion matrix of C classes; the last column counts predictions of all other classes."""
    size = int(max([*classes, *samples.prediction, *samples.truth])) + 1
    row_of: npt.NDArray[np.int64] = np.full(size, len(classes))
    row_of[list(classes)] = np.arange(len(classes))
    true, predicted = row_of[samples.truth], row_of[samples.prediction]
    rows = true < len(classes)
    width = len(classes) + 1
    return np.bincount(true[rows] * width + predicted[rows], minlength=len(classes) * width).reshape(-1, width)


def _ratio(part: Any, whole: Any) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(whole > 0, part / whole, np.nan)
