"""Everything a report tells of: one run, what it is compared with, the model it left and what that says of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.base import Source
from vitrail.errors import VitrailError
from vitrail.evaluate.per_class import confused_pairs as pairs_of
from vitrail.evaluate.scores import SampleResults, Scores, wilson_interval
from vitrail.explain.label_text import unique_abbreviations
from vitrail.explain.overlays import Pixels, as_rgb
from vitrail.models import Net
from vitrail.report.run_record import RunRecord

# N images, K classes

MAX_NAME_LENGTH = 26
"""Characters of a class name in a chart."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """What the sections of a report draw from."""

    run: RunRecord
    net: Net
    preprocess: Preprocess
    labels: Sequence[str]
    scores: Scores | None = None
    source: Source | None = None
    """What `scores` were measured on."""
    measured_on: str = "validation"
    baselines: Mapping[str, Scores] = field(default_factory=dict)
    other_runs: Mapping[str, RunRecord] = field(default_factory=dict)
    """Other runs by what was different about them."""
    unreadable: Sequence[tuple[str, str]] = ()
    """Keys of images that could not be read, and why."""
    command: str | None = None

    @property
    def multi_label(self) -> bool:
        """Whether images have several labels."""
        return self.run.multi_label or (self.scores is not None and self.scores.average_precisions is not None)

    @cached_property
    def _short_labels(self) -> list[str]:
        return unique_abbreviations(self.labels, MAX_NAME_LENGTH)

    def short_label(self, index: int) -> str:
        """A class name for a chart: short, and different from every other's."""
        return self._short_labels[index] if 0 <= index < len(self.labels) else self.label(index)

    def label(self, index: int) -> str:
        """A class's name, as people write it."""
        return self.labels[index].replace("_", " ") if 0 <= index < len(self.labels) else f"class {index}"

    def pixels(self, index: int) -> Pixels | None:
        """As the network sees it: resized and cropped; None where it cannot be read."""
        if self.source is None:
            return None
        try:
            return as_rgb(self.preprocess.pixels(self.source[index].image))
        except VitrailError:
            return None

    def key(self, index: int) -> str:
        return self.source.key(index) if self.source is not None else str(index)

    def true_labels(self, samples: SampleResults, row: int) -> str:
        """The true class or classes of a measured image, by name."""
        if samples.truth.ndim == 1:
            return self.short_label(int(samples.truth[row]))
        return ", ".join(self.short_label(int(k)) for k in np.flatnonzero(samples.truth[row])) or "none"


@dataclass(frozen=True)
class Mistake:
    """An image and the class it was wrongly given."""

    row: int
    """In the samples."""
    predicted: int
    score: float


def most_confident_errors(samples: SampleResults, most: int) -> list[Mistake]:
    """What the model was surest of and wrong about; of several labels, a class it does not have."""
    if samples.scores is None:
        wrong = np.flatnonzero(~samples.correct)
        said, score = samples.prediction[wrong], samples.score[wrong]
    else:
        false = np.where(samples.truth, -1.0, samples.scores)  # N K
        said, score = false.argmax(1), false.max(1)
        wrong = np.flatnonzero(score >= 0.5)
        said, score = said[wrong], score[wrong]
    order = np.argsort(-score, kind="stable")[:most]
    return [Mistake(int(wrong[i]), int(said[i]), float(score[i])) for i in order]


def typical_correct(samples: SampleResults, most: int) -> list[int]:
    """Rows of right answers, class by class in turn, of middling certainty: what is usual."""
    right = np.flatnonzero(samples.correct)
    classes = samples.prediction[right]
    there = np.unique(classes)
    piles = []
    for one in there[np.linspace(0, len(there) - 1, min(most, len(there))).astype(int)]:
        rows = right[classes == one]
        middle = np.argsort(np.abs(samples.score[rows] - np.median(samples.score[rows])), kind="stable")
        piles.append(rows[middle])
    turns = [
        pile[turn] for turn in range(max((len(p) for p in piles), default=0)) for pile in piles if turn < len(pile)
    ]
    return [int(row) for row in turns[:most]]


@dataclass(frozen=True)
class ClassScore:
    """One class: how much of it is found."""

    index: int
    value: float
    """Share named correctly; for several labels the average precision."""
    count: int
    low: float | None = None
    high: float | None = None


def class_scores(scores: Scores) -> list[ClassScore]:
    """Every class that occurs, in order."""
    samples = scores.samples
    if scores.average_precisions is not None and samples is not None:
        counts = samples.truth.sum(0)
        pairs = enumerate(zip(scores.average_precisions, counts, strict=True))
        return [ClassScore(k, float(ap), int(n)) for k, (ap, n) in pairs if n]
    if scores.confusion is not None:
        counts, right = scores.confusion.sum(1), scores.confusion.diagonal()
    elif samples is not None:
        size = int(samples.truth.max()) + 1
        counts = np.bincount(samples.truth, minlength=size)
        right = np.bincount(samples.truth[samples.correct], minlength=size)
    else:
        return []
    return [
        ClassScore(k, r / n, int(n), *wilson_interval(r, n))
        for k, (r, n) in enumerate(zip(right, counts, strict=True))
        if n
    ]


def confused_pairs(scores: Scores, most: int) -> list[tuple[int, int, int]]:
    """(true class, said class, how often), the commonest first."""
    if scores.samples is not None:
        return pairs_of(scores.samples, most)
    if scores.confusion is None:
        return []
    wrong = scores.confusion.copy()
    np.fill_diagonal(wrong, 0)
    flat = np.argsort(-wrong, axis=None, kind="stable")[:most]
    pairs = [(int(i), int(j), int(wrong[i, j])) for i, j in zip(*np.unravel_index(flat, wrong.shape), strict=True)]
    return [p for p in pairs if p[2]]
