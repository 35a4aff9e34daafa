"""Each class by itself: scikit-learn's numbers, the worst first, and what is mixed up with what."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import balanced_accuracy_score, confusion_matrix, precision_recall_fscore_support

from vitrail.evaluate import SampleResults
from vitrail.evaluate.per_class import confused_pairs, measure_per_class, mistaken_for, partial_confusion


def samples(truth: list[int], said: list[int], loss: list[float] | None = None) -> SampleResults:
    count = len(truth)
    return SampleResults(
        index=np.arange(count),
        truth=np.array(truth),
        prediction=np.array(said),
        score=np.ones(count),
        truth_score=np.ones(count),
        loss=np.array(loss if loss is not None else [0.0] * count),
    )


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=60))
def test_the_numbers_are_scikit_learns(pairs: list[tuple[int, int]]):
    truth, said = [t for t, _ in pairs], [s for _, s in pairs]
    found = measure_per_class(samples(truth, said), 6)
    precision, recall, f1, support = precision_recall_fscore_support(truth, said, labels=range(6), zero_division=np.nan)
    np.testing.assert_allclose(found.precision, precision)
    np.testing.assert_allclose(found.recall, recall)
    np.testing.assert_allclose(found.f1, f1)
    assert found.support.tolist() == support.tolist()
    own = samples(truth, said)
    table = confusion_matrix(truth, said, labels=range(6))
    assert np.array_equal(partial_confusion(own, range(6))[:, :6], table)
    some = partial_confusion(own, [1, 4])
    assert np.array_equal(some[:, :2], table[[1, 4]][:, [1, 4]])
    assert some.sum() == support[[1, 4]].sum()


def test_the_balanced_accuracy_is_scikit_learns():
    truth, said = [0, 0, 0, 1, 2, 2], [0, 0, 1, 1, 2, 0]
    assert measure_per_class(samples(truth, said), 9).macro_recall == pytest.approx(
        balanced_accuracy_score(truth, said)
    )


def test_several_labels_are_scikit_learns_too():
    rng = np.random.default_rng(0)
    truth, scores = rng.random((40, 4)) < 0.4, rng.random((40, 4))
    own = SampleResults(
        index=np.arange(40),
        truth=truth,
        prediction=scores.argmax(1),
        score=scores.max(1),
        truth_score=scores.max(1),
        scores=scores,
        loss=np.arange(40.0),
    )
    found = measure_per_class(own, 4, average_precisions=np.array([0.3, 0.1, 0.9, 0.2]))
    precision, recall, _, support = precision_recall_fscore_support(truth, scores >= 0.5)
    np.testing.assert_allclose(found.precision, precision)
    np.testing.assert_allclose(found.recall, recall)
    assert found.support.tolist() == support.tolist()
    assert found.loss[2] == pytest.approx(np.arange(40.0)[truth[:, 2]].mean())
    assert found.worst(2) == [1, 3]
    assert confused_pairs(own, 5) == []
    assert mistaken_for(own, 0) == []


def test_the_worst_classes_come_first_and_of_equals_the_one_that_loses_most():
    truth = [0, 0, 1, 2, 3, 3]
    found = measure_per_class(samples(truth, [0, 1, 0, 0, 3, 3], loss=[0.1, 2, 1.0, 5.0, 0.1, 0.2]), 5)
    assert found.worst(10) == [2, 1, 0, 3]  # 4 has no images
    assert found.worst(1) == [2]


def test_a_class_that_is_never_said_has_no_precision():
    row = measure_per_class(samples([0, 1], [0, 0]), 3).to_row(1, "dog")
    assert row["name"] == "dog"
    assert (row["support"], row["predicted"], row["recall"], row["precision"], row["f1"]) == (1, 0, 0.0, None, 0.0)
    assert math.isnan(measure_per_class(samples([0], [0]), 3).recall[2])


def test_pairs_are_counted_one_way_and_the_commonest_comes_first():
    own = samples([0, 0, 0, 1, 1, 2], [1, 1, 0, 0, 1, 1])
    assert confused_pairs(own, 9) == [(0, 1, 2), (1, 0, 1), (2, 1, 1)]
    assert confused_pairs(own, 1) == [(0, 1, 2)]
    assert mistaken_for(own, 0) == [(1, 2)]
    assert confused_pairs(samples([0, 1], [0, 1]), 9) == []
