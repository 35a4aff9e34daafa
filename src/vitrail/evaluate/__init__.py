"""Model + data -> numbers."""

from vitrail.evaluate.accuracy import evaluating, measure
from vitrail.evaluate.guesses import Guesses, guess
from vitrail.evaluate.neighbours import comparable, neighbours_baseline
from vitrail.evaluate.scores import Samples, Scores, average_precision, wilson

__all__ = [
    "Guesses",
    "Samples",
    "Scores",
    "average_precision",
    "comparable",
    "evaluating",
    "guess",
    "measure",
    "neighbours_baseline",
    "wilson",
]
