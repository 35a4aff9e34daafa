"""Baseline: k nearest training images by pixel distance."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from vitrail.data.sources.base import Source
from vitrail.errors import DataError
from vitrail.evaluation.scores import MAX_CONFUSION_CLASSES, SampleResults, Scores, wilson_interval

# N training and M test images of P pixel values, K classes

MAX_COMPARISONS = 2e10
"""Upper bound on N M P, a few seconds: digits has 3e7, MNIST 5e11."""


def pixel_knn_applies(train: Any, test: Source) -> bool:
    """Whether the baseline can be computed, and quickly: one label per image, one image size, little data."""
    known, queries = getattr(train, "pixels", None), test.pixels
    if known is None or queries is None or train.multi_label or not len(known) or not len(queries):
        return False
    return known[0].shape == queries[0].shape and len(known) * queries.size <= MAX_COMPARISONS


def pixel_knn_baseline(train: Source, test: Source, k: int = 3) -> Scores:
    """Classify each test image by the majority class of its k nearest training images.

    Euclidean distance of raw pixels, by scikit-learn. `loss` is NaN, because votes are not probabilities.
    """
    from sklearn.neighbors import KNeighborsClassifier  # takes a second to import

    if train.multi_label or train.pixels is None or test.pixels is None:
        raise DataError("the nearest-neighbor baseline needs decoded images of one size with one label each.")
    train_targets, test_targets = (np.asarray(source.targets, dtype=np.int64) for source in (train, test))
    train_labeled, test_labeled = train_targets >= 0, test_targets >= 0
    if train_labeled.sum() < k or not test_labeled.any():
        raise DataError(f"{k} nearest neighbors need at least {k} labeled training images and one labeled test image.")
    x, y = train.pixels[train_labeled], train_targets[train_labeled]
    model = KNeighborsClassifier(n_neighbors=k, algorithm="brute").fit(x.reshape(len(x), -1).astype(np.float32), y)
    queries = test.pixels[test_labeled]
    votes = model.predict_proba(queries.reshape(len(queries), -1).astype(np.float32))  # M, classes in the training data
    num_classes = len(train.labels)
    fractions = np.zeros((len(votes), num_classes))
    fractions[:, model.classes_] = votes
    return _scores(fractions, test_targets[test_labeled], np.flatnonzero(test_labeled), num_classes)


def _scores(fractions: np.ndarray, truth: np.ndarray, index: np.ndarray, num_classes: int) -> Scores:
    ranked = np.argsort(-fractions, axis=1, kind="stable")  # ties go to the lower class index, as in scikit-learn
    correct = ranked == truth[:, None]
    rows = np.arange(len(truth))
    prediction = ranked[:, 0]
    low, high = wilson_interval(correct[:, 0].sum(), len(truth))
    confusion = np.zeros((num_classes, num_classes), np.int64) if num_classes <= MAX_CONFUSION_CLASSES else None
    if confusion is not None:
        np.add.at(confusion, (truth, prediction), 1)
    return Scores(
        top1=float(correct[:, 0].mean()),
        top5=float(correct[:, :5].any(1).mean()),
        loss=math.nan,
        count=len(truth),
        low=low,
        high=high,
        confusion=confusion,
        samples=SampleResults(
            index=index,
            truth=truth,
            prediction=prediction,
            score=fractions[rows, prediction],
            truth_score=fractions[rows, truth],
            rank=correct.argmax(1),
            top_classes=ranked[:, :5],
        ),
    )
