"""Expected calibration error (ECE) and the reliability table behind it.

Images are binned by the model's confidence in its prediction. In each bin, the mean confidence is compared with the
accuracy (Guo et al. 2017, with their 15 bins of equal width).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.evaluation.intervals import Estimate, Statistic, bootstrap_statistic
from vitrail.evaluation.scores import Floats, Ints

# N images, M bins

NUM_BINS = 15


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Confidence and accuracy by bin."""

    error: Estimate
    """ECE: the mean over images of the gap between their bin's mean confidence and its accuracy."""
    edges: Floats
    """M + 1: a bin includes its upper edge and excludes its lower one."""
    counts: Ints
    """M: number of images."""
    confidence: Floats
    """M: mean confidence, that is the score of the predicted class; NaN in an empty bin."""
    accuracy: Floats
    """M: fraction of correct predictions; NaN in an empty bin."""

    @property
    def max_error(self) -> float:
        """MCE: the largest gap between confidence and accuracy of any bin."""
        gaps = np.abs(self.confidence - self.accuracy)
        return float(np.nanmax(gaps)) if not np.isnan(gaps).all() else math.nan

    @property
    def overconfidence(self) -> float:
        """Mean confidence minus accuracy: above 0 if the model is overconfident."""
        nonempty = self.counts > 0
        gaps = (self.confidence - self.accuracy)[nonempty]
        return float((gaps * self.counts[nonempty]).sum() / self.counts.sum())

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
    """N scores of the predicted classes, 0 to 1, and whether each is correct; `error` if the ECE is already known."""
    score = np.asarray(score, np.float64)
    edges = np.linspace(0, 1, bins + 1)
    bin_index = _bin_of_scores(score, bins)
    counts = np.bincount(bin_index, minlength=bins)
    with np.errstate(invalid="ignore"):
        confidence = np.bincount(bin_index, score, bins) / counts
        accuracy = np.bincount(bin_index, correct, bins) / counts
    error = error or bootstrap_statistic(*calibration_gaps(score, correct, bins))
    return Calibration(error=error, edges=edges, counts=counts, confidence=confidence, accuracy=accuracy)


def calibration_gaps(score: Floats, correct: npt.NDArray[np.bool_], bins: int = NUM_BINS) -> tuple[Floats, Statistic]:
    """N M: each image's score minus 1 if correct, in the column of its bin; and the ECE from column sums."""
    score = np.asarray(score, np.float64)
    gaps = np.zeros((len(score), bins))
    gaps[np.arange(len(score)), _bin_of_scores(score, bins)] = score - correct
    return gaps, lambda sums: np.abs(sums).sum(-1) / len(score)


def _bin_of_scores(score: Floats, bins: int) -> Ints:
    """N: the bin of each score; a score on an edge belongs to the lower bin."""
    return np.searchsorted(np.linspace(0, 1, bins + 1)[1:-1], score, side="left")


def json_number(value: Any) -> Any:
    """A Python number for JSON; None for NaN and infinity."""
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
