"""Each class by itself: how much of it is found, how often its name is right, and what it is mistaken for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.evaluate.calibration import json_number
from vitrail.evaluate.scores import Floats, Ints, SampleResults, wilson_interval

# N images, K classes


@dataclass(frozen=True, kw_only=True)
class PerClass:
    """Numbers of every class of the model, whether it occurs or not: K each."""

    support: Ints
    """Images that are of the class."""
    predicted: Ints
    """Images that are said to be."""
    correct: Ints
    """Images that are both."""
    loss: Floats
    """Mean loss of its images; NaN without any."""
    average_precision: Floats | None = None
    """For several labels; NaN for a class nobody has."""

    @property
    def recall(self) -> Floats:
        """Share of its images that are found; NaN without any."""
        return _ratio(self.correct, self.support)

    @property
    def precision(self) -> Floats:
        """Share of what is said to be it that is; NaN where it is never said."""
        return _ratio(self.correct, self.predicted)

    @property
    def f1(self) -> Floats:
        """Harmonic mean of the two."""
        return _ratio(2 * self.correct, self.support + self.predicted)

    @property
    def present(self) -> Ints:
        """Classes that have images."""
        return np.flatnonzero(self.support)

    @property
    def macro_recall(self) -> float:
        """Mean over the classes that have images, each weighing the same: the balanced accuracy."""
        return float(self.recall[self.present].mean())

    def worst(self, most: int) -> list[int]:
        """The classes of lowest recall (of several labels: average precision); of equals, the highest loss first."""
        value = self.recall if self.average_precision is None else self.average_precision
        there = self.present
        order = np.lexsort((there, -self.loss[there], value[there]))
        return [int(k) for k in there[order][:most]]

    def to_row(self, k: int, name: str) -> dict[str, Any]:
        """One class for a table; None where a number has no meaning."""
        low, high = wilson_interval(self.correct[k], self.support[k])
        values = {"recall": self.recall[k], "low": low, "high": high, "precision": self.precision[k], "f1": self.f1[k]}
        if self.average_precision is not None:
            values["average_precision"] = self.average_precision[k]
        counts = {"support": int(self.support[k]), "predicted": int(self.predicted[k]), "correct": int(self.correct[k])}
        return {"class": int(k), "name": name, **counts, **{n: json_number(v) for n, v in values.items()}}


def measure_per_class(samples: SampleResults, num_classes: int, average_precisions: Floats | None = None) -> PerClass:
    """From what was said of each image. Of several labels, what has a probability of one half or more is said."""
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


def confused_pairs(samples: SampleResults, most: int) -> list[tuple[int, int, int]]:
    """(true class, said class, how often), the commonest first; only of images with one label."""
    if samples.truth.ndim != 1:
        return []
    wrong = ~samples.correct
    found, counts = np.unique(np.stack([samples.truth, samples.prediction], 1)[wrong], axis=0, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:most]
    return [(int(found[i, 0]), int(found[i, 1]), int(counts[i])) for i in order]


def mistaken_for(samples: SampleResults, k: int, most: int = 3) -> list[tuple[int, int]]:
    """(class, how often) that images of class k are said to be instead, the commonest first."""
    if samples.truth.ndim != 1:
        return []
    said = samples.prediction[(samples.truth == k) & ~samples.correct]
    found, counts = np.unique(said, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:most]
    return [(int(found[i]), int(counts[i])) for i in order]


def partial_confusion(samples: SampleResults, classes: Sequence[int]) -> Ints:
    """C C + 1: of some classes, said to be (column) one of them; the last column is for all others."""
    place: npt.NDArray[np.int64] = np.full(int(max([*classes, *samples.prediction, *samples.truth])) + 1, len(classes))
    place[list(classes)] = np.arange(len(classes))
    true, said = place[samples.truth], place[samples.prediction]
    kept = true < len(classes)
    width = len(classes) + 1
    return np.bincount(true[kept] * width + said[kept], minlength=len(classes) * width).reshape(len(classes), width)


def _ratio(part: Any, whole: Any) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(whole > 0, part / whole, np.nan)
