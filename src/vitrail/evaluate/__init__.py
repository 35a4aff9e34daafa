"""Model + data -> numbers.

accuracy, scores          every image once: top-1, top-5, loss, confusion
intervals, calibration    how far a number may be off; whether the model is right as often as it says
measure_per_class, real           each class by itself; ImageNet-ReaL's several labels
matching, synsets         the data's classes and the model's outputs
evaluation                all of it together
"""

from vitrail.evaluate.accuracy import measure
from vitrail.evaluate.masked_prediction import MaskedPredictionScores, measure_masked_prediction
from vitrail.evaluate.pixel_knn import pixel_knn_applies, pixel_knn_baseline
from vitrail.evaluate.scores import SampleResults, Scores, average_precision, wilson_interval

__all__ = [
    "MaskedPredictionScores",
    "SampleResults",
    "Scores",
    "average_precision",
    "measure",
    "measure_masked_prediction",
    "pixel_knn_applies",
    "pixel_knn_baseline",
    "wilson_interval",
]
