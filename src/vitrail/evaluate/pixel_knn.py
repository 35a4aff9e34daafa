"""What to stand a model beside: the nearest training images, pixel by pixel, decide."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from vitrail.data.sources.base import Source
from vitrail.errors import DataError
from vitrail.evaluate.scores import MAX_CONFUSION_CLASSES, SampleResults, Scores, wilson_interval

# N training and M test images of P numbers each, K classes

MAX_COMPARISONS = 2e10
"""N M P up to which the comparison takes seconds: digits has 3e7, MNIST 5e11."""


def pixel_knn_applies(train: Any, test: Source) -> bool:
    """Whether raw pixels can be compared, and soon: one label each, one size, not too many. A stream cannot."""
    known, asked = getattr(train, "pixels", None), test.pixels
    if known is None or asked is None or train.multi_label or not len(known) or not len(asked):
        return False
    return known[0].shape == asked[0].shape and len(known) * asked.size <= MAX_COMPARISONS


def pixel_knn_baseline(train: Source, test: Source, k: int = 3) -> Scores:
    """Each test image gets the commonest class among the k training images nearest to it.

    Pixels as they are, distances Euclidean, by scikit-learn. `loss` is NaN: votes are no probabilities.
    """
    from sklearn.neighbors import KNeighborsClassifier  # takes a second to import

    if train.multi_label or train.pixels is None or test.pixels is None:
        raise DataError("nearest neighbors need decoded images of one size with one label each.")
    taught, wanted = (np.asarray(source.targets, dtype=np.int64) for source in (train, test))
    known, asked = taught >= 0, wanted >= 0
    if known.sum() < k or not asked.any():
        raise DataError(f"{k} nearest neighbors need {k} labeled training images or more, and one to test.")
    x, y = train.pixels[known], taught[known]
    model = KNeighborsClassifier(n_neighbors=k, algorithm="brute").fit(x.reshape(len(x), -1).astype(np.float32), y)
    queries = test.pixels[asked]
    votes = model.predict_proba(queries.reshape(len(queries), -1).astype(np.float32))  # M classes seen
    classes = len(train.labels)
    shares = np.zeros((len(votes), classes))
    shares[:, model.classes_] = votes
    return _scores(shares, wanted[asked], np.flatnonzero(asked), classes)


def _scores(shares: np.ndarray, truth: np.ndarray, index: np.ndarray, num_classes: int) -> Scores:
    ranked = np.argsort(-shares, axis=1, kind="stable")  # of equals the lower number, as scikit-learn has it
    right = ranked == truth[:, None]
    places = np.arange(len(truth))
    prediction = ranked[:, 0]
    low, high = wilson_interval(right[:, 0].sum(), len(truth))
    confusion = np.zeros((num_classes, num_classes), np.int64) if num_classes <= MAX_CONFUSION_CLASSES else None
    if confusion is not None:
        np.add.at(confusion, (truth, prediction), 1)
    return Scores(
        top1=float(right[:, 0].mean()),
        top5=float(right[:, :5].any(1).mean()),
        loss=math.nan,
        count=len(truth),
        low=low,
        high=high,
        confusion=confusion,
        samples=SampleResults(
            index=index,
            truth=truth,
            prediction=prediction,
            score=shares[places, prediction],
            truth_score=shares[places, truth],
            rank=right.argmax(1),
            top_classes=ranked[:, :5],
        ),
    )
