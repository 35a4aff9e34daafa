"""The data of a report: one run, the runs and baselines it is compared with, its model and its predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.base import Source
from vitrail.errors import VitrailError
from vitrail.evaluation.per_class import confused_pairs as pairs_of
from vitrail.evaluation.scores import SampleResults, Scores, wilson_interval
from vitrail.explain.label_text import unique_abbreviations
from vitrail.explain.overlays import Pixels, as_rgb
from vitrail.models import Net
from vitrail.runs.run_record import RunRecord

# N images, K classes

MAX_NAME_LENGTH = 26
"""Maximum length of a class name in a chart."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """What the sections of a report are made from."""

    run: RunRecord
    net: Net
    preprocess: Preprocess
    labels: Sequence[str]
    scores: Scores | None = None
    source: Source | None = None
    """The images that `scores` were measured on."""
    measured_on: str = "validation"
    baselines: Mapping[str, Scores] = field(default_factory=dict)
    other_runs: Mapping[str, RunRecord] = field(default_factory=dict)
    """Other runs, by a description of how they differ."""
    unreadable: Sequence[tuple[str, str]] = ()
    """Keys of unreadable images, and why each could not be read."""
    command: str | None = None

    @property
    def multi_label(self) -> bool:
        """Whether the data is multi-label."""
        return self.run.multi_label or (self.scores is not None and self.scores.average_precisions is not None)

    @property
    def samples(self) -> SampleResults | None:
        """The results of each image, if there are any."""
        return self.scores.samples if self.scores else None

    @cached_property
    def _short_labels(self) -> list[str]:
        return unique_abbreviations(self.labels, MAX_NAME_LENGTH)

    def short_label(self, index: int) -> str:
        """A class name shortened for charts; all short labels differ."""
        return self._short_labels[index] if 0 <= index < len(self.labels) else self.label(index)

    def label(self, index: int) -> str:
        """A class name with spaces instead of underscores."""
        return self.labels[index].replace("_", " ") if 0 <= index < len(self.labels) else f"class {index}"

    def pixels(self, index: int) -> Pixels | None:
        """The preprocessed image; None if it cannot be read."""
        if self.source is None:
            return None
        try:
            return as_rgb(self.preprocess.pixels(self.source[index].image))
        except VitrailError:
            return None

    def key(self, index: int) -> str:
        return self.source.key(index) if self.source is not None else str(index)

    def true_labels(self, samples: SampleResults, row: int) -> str:
        """The names of the true classes of an image."""
        if samples.truth.ndim == 1:
            return self.short_label(int(samples.truth[row]))
        return ", ".join(self.short_label(int(k)) for k in np.flatnonzero(samples.truth[row])) or "none"


@dataclass(frozen=True)
class Mistake:
    """A wrong prediction."""

    row: int
    """Index into the samples."""
    predicted: int
    score: float


def most_confident_errors(samples: SampleResults, limit: int) -> list[Mistake]:
    """The errors with the highest probability; for multi-label data, predicted classes that an image does not have."""
    if samples.scores is None:
        wrong = np.flatnonzero(~samples.correct)
        predicted, score = samples.prediction[wrong], samples.score[wrong]
    else:
        false = np.where(samples.truth, -1.0, samples.scores)  # N K
        predicted, score = false.argmax(1), false.max(1)
        wrong = np.flatnonzero(score >= 0.5)
        predicted, score = predicted[wrong], score[wrong]
    order = np.argsort(-score, kind="stable")[:limit]
    return [Mistake(int(wrong[i]), int(predicted[i]), float(score[i])) for i in order]


def typical_correct(samples: SampleResults, limit: int) -> list[int]:
    """Rows of correct predictions with close to median confidence, taking turns between classes."""
    correct = np.flatnonzero(samples.correct)
    classes = samples.prediction[correct]
    present = np.unique(classes)
    by_class = []
    for k in present[np.linspace(0, len(present) - 1, min(limit, len(present))).astype(int)]:
        rows = correct[classes == k]
        middle = np.argsort(np.abs(samples.score[rows] - np.median(samples.score[rows])), kind="stable")
        by_class.append(rows[middle])
    rounds = range(max((len(rows) for rows in by_class), default=0))
    turns = [rows[i] for i in rounds for rows in by_class if i < len(rows)]
    return [int(row) for row in turns[:limit]]


@dataclass(frozen=True)
class ClassScore:
    """Recall, or average precision, of one class."""

    index: int
    value: float
    """Recall; for multi-label data the average precision."""
    count: int
    low: float | None = None
    high: float | None = None


def class_scores(scores: Scores) -> list[ClassScore]:
    """Scores of every class that occurs, in order."""
    samples = scores.samples
    if scores.average_precisions is not None and samples is not None:
        counts = samples.truth.sum(0)
        pairs = enumerate(zip(scores.average_precisions, counts, strict=True))
        return [ClassScore(k, float(ap), int(n)) for k, (ap, n) in pairs if n]
    if scores.confusion is not None:
        counts, correct = scores.confusion.sum(1), scores.confusion.diagonal()
    elif samples is not None:
        size = int(samples.truth.max()) + 1
        counts = np.bincount(samples.truth, minlength=size)
        correct = np.bincount(samples.truth[samples.correct], minlength=size)
    else:
        return []
    return [
        ClassScore(k, r / n, int(n), *wilson_interval(r, n))
        for k, (r, n) in enumerate(zip(correct, counts, strict=True))
        if n
    ]


def confused_pairs(scores: Scores, limit: int) -> list[tuple[int, int, int]]:
    """(true class, predicted class, count), most frequent first."""
    if scores.samples is not None:
        return pairs_of(scores.samples, limit)
    if scores.confusion is None:
        return []
    wrong = scores.confusion.copy()
    np.fill_diagonal(wrong, 0)
    flat = np.argsort(-wrong, axis=None, kind="stable")[:limit]
    pairs = [(int(i), int(j), int(wrong[i, j])) for i, j in zip(*np.unravel_index(flat, wrong.shape), strict=True)]
    return [p for p in pairs if p[2]]
