"""Per-class metrics against scikit-learn, the worst classes, and confused pairs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import balanced_accuracy_score, confusion_matrix, precision_recall_fscore_support

from vitrail.evaluation import SampleResults
from vitrail.evaluation.per_class import confused_pairs, measure_per_class, mistaken_for, partial_confusion


def samples(truth: list[int], prediction: list[int], loss: list[float] | None = None) -> SampleResults:
    count = len(truth)
    return SampleResults(
        index=np.arange(count),
        truth=np.array(truth),
        prediction=np.array(prediction),
        score=np.ones(count),
        truth_score=np.ones(count),
        loss=np.array(loss if loss is not None else [0.0] * count),
    )


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=60))
def test_metrics_equal_scikit_learns(pairs: list[tuple[int, int]]):
    truth, prediction = [t for t, _ in pairs], [s for _, s in pairs]
    metrics = measure_per_class(samples(truth, prediction), 6)
    precision, recall, f1, support = precision_recall_fscore_support(
        truth, prediction, labels=range(6), zero_division=np.nan
    )
    np.testing.assert_allclose(metrics.precision, precision)
    np.testing.assert_allclose(metrics.recall, recall)
    np.testing.assert_allclose(metrics.f1, f1)
    assert metrics.support.tolist() == support.tolist()
    results = samples(truth, prediction)
    table = confusion_matrix(truth, prediction, labels=range(6))
    assert np.array_equal(partial_confusion(results, range(6))[:, :6], table)
    partial = partial_confusion(results, [1, 4])
    assert np.array_equal(partial[:, :2], table[[1, 4]][:, [1, 4]])
    assert partial.sum() == support[[1, 4]].sum()


def test_macro_recall_equals_scikit_learns_balanced_accuracy():
    truth, prediction = [0, 0, 0, 1, 2, 2], [0, 0, 1, 1, 2, 0]
    assert measure_per_class(samples(truth, prediction), 9).macro_recall == pytest.approx(
        balanced_accuracy_score(truth, prediction)
    )


def test_multi_label_metrics_equal_scikit_learns():
    rng = np.random.default_rng(0)
    truth, scores = rng.random((40, 4)) < 0.4, rng.random((40, 4))
    results = SampleResults(
        index=np.arange(40),
        truth=truth,
        prediction=scores.argmax(1),
        score=scores.max(1),
        truth_score=scores.max(1),
        scores=scores,
        loss=np.arange(40.0),
    )
    metrics = measure_per_class(results, 4, average_precisions=np.array([0.3, 0.1, 0.9, 0.2]))
    precision, recall, _, support = precision_recall_fscore_support(truth, scores >= 0.5)
    np.testing.assert_allclose(metrics.precision, precision)
    np.testing.assert_allclose(metrics.recall, recall)
    assert metrics.support.tolist() == support.tolist()
    assert metrics.loss[2] == pytest.approx(np.arange(40.0)[truth[:, 2]].mean())
    assert metrics.worst(2) == [1, 3]
    assert confused_pairs(results, 5) == []
    assert mistaken_for(results, 0) == []


def test_worst_classes_are_sorted_by_recall_and_then_by_loss():
    truth = [0, 0, 1, 2, 3, 3]
    metrics = measure_per_class(samples(truth, [0, 1, 0, 0, 3, 3], loss=[0.1, 2, 1.0, 5.0, 0.1, 0.2]), 5)
    assert metrics.worst(10) == [2, 1, 0, 3]  # 4 has no images
    assert metrics.worst(1) == [2]


def test_class_that_is_never_predicted_has_no_precision():
    row = measure_per_class(samples([0, 1], [0, 0]), 3).to_row(1, "dog")
    assert row["name"] == "dog"
    assert (row["support"], row["predicted"], row["recall"], row["precision"], row["f1"]) == (1, 0, 0.0, None, 0.0)
    assert math.isnan(measure_per_class(samples([0], [0]), 3).recall[2])


def test_confused_pairs_are_directed_and_sorted_by_count():
    results = samples([0, 0, 0, 1, 1, 2], [1, 1, 0, 0, 1, 1])
    assert confused_pairs(results, 9) == [(0, 1, 2), (1, 0, 1), (2, 1, 1)]
    assert confused_pairs(results, 1) == [(0, 1, 2)]
    assert mistaken_for(results, 0) == [(1, 2)]
    assert confused_pairs(samples([0, 1], [0, 1]), 9) == []
