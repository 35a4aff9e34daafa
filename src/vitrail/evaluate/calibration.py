"""Whether a model is right as often as it says: the expected calibration error and the table behind it.

Images are sorted into bins by how sure the model is of its answer; in each, how sure it is on
average is held against how often it is right (Guo et al. 2017, with their 15 bins of equal width).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.evaluate.intervals import Estimate, Statistic, bootstrap_statistic
from vitrail.evaluate.scores import Floats, Ints

# N images, M bins

NUM_BINS = 15


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How sure, and how often right."""

    error: Estimate
    """ECE: the mean over images of how far their bin's certainty is from its accuracy."""
    edges: Floats
    """M + 1: a bin holds what is above its lower edge and not above its upper one."""
    counts: Ints
    """M: images."""
    confidence: Floats
    """M: mean score of the answers; NaN in an empty bin."""
    accuracy: Floats
    """M: share of them that are right; NaN in an empty bin."""

    @property
    def max_error(self) -> float:
        """The largest gap of a bin."""
        gaps = np.abs(self.confidence - self.accuracy)
        return float(np.nanmax(gaps)) if not np.isnan(gaps).all() else math.nan

    @property
    def overconfidence(self) -> float:
        """Mean score less accuracy: above 0 it is surer than it should be."""
        there = self.counts > 0
        gaps = (self.confidence - self.accuracy)[there]
        return float((gaps * self.counts[there]).sum() / self.counts.sum())

    def to_dict(self) -> dict[str, Any]:
        rows = zip(self.edges[:-1], self.edges[1:], self.counts, self.confidence, self.accuracy, strict=True)
        names = ("lower", "upper", "count", "confidence", "accuracy")
        bins = [dict(zip(names, (json_number(value) for value in row), strict=True)) for row in rows]
        error = {name: json_number(value) for name, value in self.error.to_dict().items()}
        return {
            "ece": error,
            "mce": json_number(self.max_error),
            "overconfidence": json_number(self.overconfidence),
            "bins": bins,
        }


def measure_calibration(
    score: Floats, correct: npt.NDArray[np.bool_], bins: int = NUM_BINS, error: Estimate | None = None
) -> Calibration:
    """From N scores of the answers, 0 to 1, and whether each is right; `error`, if it is known already."""
    score = np.asarray(score, np.float64)
    edges = np.linspace(0, 1, bins + 1)
    place = _bin_of_scores(score, bins)
    counts = np.bincount(place, minlength=bins)
    with np.errstate(invalid="ignore"):
        certainty = np.bincount(place, score, bins) / counts
        accuracy = np.bincount(place, correct, bins) / counts
    error = error or bootstrap_statistic(*calibration_gaps(score, correct, bins))
    return Calibration(error=error, edges=edges, counts=counts, confidence=certainty, accuracy=accuracy)


def calibration_gaps(score: Floats, correct: npt.NDArray[np.bool_], bins: int = NUM_BINS) -> tuple[Floats, Statistic]:
    """N M, each image's score less 1 or 0, in its bin; and the ECE, which needs only sums of that over images."""
    score = np.asarray(score, np.float64)
    found = np.zeros((len(score), bins))
    found[np.arange(len(score)), _bin_of_scores(score, bins)] = score - correct
    return found, lambda sums: np.abs(sums).sum(-1) / len(score)


def _bin_of_scores(score: Floats, bins: int) -> Ints:
    """N: the bin of each score; one on an edge is in the lower bin."""
    return np.searchsorted(np.linspace(0, 1, bins + 1)[1:-1], score, side="left")


def json_number(value: Any) -> Any:
    """A number as JSON has it: None for what is none."""
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
