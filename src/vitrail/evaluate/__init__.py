"""Model + data -> numbers."""

from vitrail.evaluate.accuracy import evaluating, measure
from vitrail.evaluate.neighbours import comparable, neighbours_baseline
from vitrail.evaluate.scores import Samples, Scores, average_precision, wilson

__all__ = [
    "Samples",
    "Scores",
    "average_precision",
    "comparable",
    "evaluating",
    "measure",
    "neighbours_baseline",
    "wilson",
]
