"""Metrics of classifiers and of frozen features.

evaluate, probing             the functions behind `vitrail eval` and `probe`
accuracy, scores              top-1, top-5, loss and confusion matrix of a network over batches
intervals, calibration        95 % intervals; expected calibration error
per_class, imagenet_real      precision and recall per class; ImageNet-ReaL accuracy
class_matching, synsets       mapping from a data set's classes to a model's outputs
summary                       the result of one evaluation: `Evaluation`
features, feature_file        feature extraction; features read from files and folders of parts
fewshot, knn, logistic        classifiers on frozen features
"""

from vitrail.evaluation.accuracy import measure
from vitrail.evaluation.masked_prediction import MaskedPredictionScores, measure_masked_prediction
from vitrail.evaluation.pixel_knn import pixel_knn_applies, pixel_knn_baseline
from vitrail.evaluation.scores import SampleResults, Scores, average_precision, wilson_interval

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
