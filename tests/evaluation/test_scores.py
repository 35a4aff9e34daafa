"""Wilson intervals and average precision against hand calculations and scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score

from vitrail.evaluation import SampleResults, Scores, average_precision, wilson_interval


def test_wilson_interval_matches_the_hand_calculation():
    # 8 of 10, z = 1.96: center (0.8 + 0.19208) / 1.38416, half 1.96 / 1.38416 * sqrt(0.016 + 0.009604).
    low, high = wilson_interval(8, 10, z=1.96)
    assert low == pytest.approx(0.716738 - 0.226581, abs=1e-6)
    assert high == pytest.approx(0.716738 + 0.226581, abs=1e-6)


def test_wilson_interval_of_0_in_20_matches_the_textbook():
    low, high = wilson_interval(0, 20)  # z^2 / (n + z^2)
    assert low == 0.0
    assert high == pytest.approx(3.841459 / 23.841459, abs=1e-6)


def test_wilson_interval_of_zero_images_is_0_to_1():
    assert wilson_interval(0, 0) == (0.0, 1.0)


@given(st.integers(1, 10_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_interval_contains_its_proportion_and_is_symmetric(pair: tuple[int, int]):
    right, count = pair
    low, high = wilson_interval(right, count)
    assert 0 <= low <= right / count <= high <= 1
    assert wilson_interval(count - right, count) == pytest.approx((1 - high, 1 - low), abs=1e-12)


@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_average_precision_with_ties_equals_scikit_learns(count: int, levels: int, seed: int):
    rng = np.random.default_rng(seed)
    truth, score = rng.random(count) < 0.4, rng.integers(0, levels, count) / levels
    truth[rng.integers(count)] = True
    assert average_precision(truth, score) == pytest.approx(average_precision_score(truth, score), abs=1e-12)


def test_class_without_images_has_no_average_precision():
    assert math.isnan(average_precision(np.zeros(3, bool), np.arange(3.0)))


def test_nan_scores_have_no_average_precision():
    assert math.isnan(average_precision(np.ones(2, bool), np.array([0.5, math.nan])))


def test_mean_average_precision_skips_classes_without_images():
    scores = Scores(top1=1, top5=1, loss=0, count=1, low=0, high=1, average_precisions=np.array([0.5, math.nan, 1.0]))
    assert scores.mean_average_precision == 0.75
    assert scores.to_dict()["map"] == 0.75


def test_to_dict_contains_plain_numbers():
    scores = Scores(top1=0.5, top5=1.0, loss=0.7, count=4, low=0.15, high=0.85)
    assert scores.to_dict() == {"top1": 0.5, "top5": 1.0, "loss": 0.7, "low": 0.15, "high": 0.85, "count": 4}


def test_prediction_is_correct_if_it_is_one_of_several_labels():
    samples = SampleResults(
        index=np.arange(2),
        truth=np.array([[True, False, True], [True, False, False]]),
        prediction=np.array([2, 2]),
        score=np.ones(2),
        truth_score=np.ones(2),
    )
    assert samples.correct.tolist() == [True, False]
