"""Model + data -> numbers.

accuracy, scores          every image once: top-1, top-5, loss, confusion
intervals, calibration    how far a number may be off; whether the model is right as often as it says
per_class, real           each class by itself; ImageNet-ReaL's several labels
matching, synsets         the data's classes and the model's outputs
evaluation                all of it together
"""

from vitrail.evaluate.accuracy import measure
from vitrail.evaluate.guesses import Guesses, guess
from vitrail.evaluate.neighbors import comparable, neighbors_baseline
from vitrail.evaluate.scores import Samples, Scores, average_precision, wilson

__all__ = [
    "Guesses",
    "Samples",
    "Scores",
    "average_precision",
    "comparable",
    "guess",
    "measure",
    "neighbors_baseline",
    "wilson",
]
