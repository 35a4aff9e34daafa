"""Calibration error against a slow implementation of its definition and hand calculations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from vitrail.evaluation.calibration import measure_calibration


def slow_calibration_error(score: np.ndarray, right: np.ndarray, bins: int) -> float:
    """Guo et al. 2017, equation 3: the sum over bins ((m - 1)/M, m/M] of |B|/n |acc(B) - conf(B)|."""
    total, edges = 0.0, np.linspace(0, 1, bins + 1)
    for m in range(bins):
        in_bin = [
            i for i, s in enumerate(score) if (s > edges[m] or (m == 0 and s >= 0)) and s <= edges[m + 1]
        ]  # fmt: skip
        if in_bin:
            accuracy = sum(bool(right[i]) for i in in_bin) / len(in_bin)
            confidence = sum(float(score[i]) for i in in_bin) / len(in_bin)
            total += len(in_bin) / len(score) * abs(accuracy - confidence)
    return total


@given(st.integers(1, 60), st.sampled_from([1, 2, 10, 15]), st.data())
def test_error_matches_its_definition(count: int, bins: int, data: st.DataObject):
    # Tenths and fifteenths lie on the edges of bins.
    grid = st.sampled_from([*np.linspace(0, 1, 16), *np.linspace(0, 1, 11), 0.123, 0.999])
    score = data.draw(arrays(np.float64, count, elements=grid))
    right = data.draw(arrays(np.bool_, count))
    calibration = measure_calibration(score, right, bins)
    assert calibration.error.value == pytest.approx(slow_calibration_error(score, right, bins), abs=1e-12)
    assert calibration.counts.sum() == count
    assert abs(score.mean() - right.mean()) - 1e-12 <= calibration.error.value <= 1
    assert calibration.overconfidence == pytest.approx(score.mean() - right.mean(), abs=1e-12)


def test_four_images_match_the_hand_calculation():
    # Two bins: (0, .5] holds .4 wrong; (.5, 1] holds .6 wrong, .8 right, .9 right: confidence 2.3/3, accuracy 2/3.
    calibration = measure_calibration(np.array([0.4, 0.6, 0.8, 0.9]), np.array([False, False, True, True]), bins=2)
    assert calibration.counts.tolist() == [1, 3]
    assert calibration.confidence == pytest.approx([0.4, 2.3 / 3])
    assert calibration.accuracy == pytest.approx([0, 2 / 3])
    assert calibration.error.value == pytest.approx(0.25 * 0.4 + 0.75 * 0.1)
    assert calibration.max_error == pytest.approx(0.4)
    assert calibration.overconfidence == pytest.approx(0.675 - 0.5)


def test_calibrated_model_has_an_error_near_zero():
    rng = np.random.default_rng(0)
    score = rng.uniform(0.2, 1, 20_000)
    calibration = measure_calibration(score, rng.random(20_000) < score)
    assert calibration.error.value < 0.02
    assert calibration.error.low <= calibration.error.value <= calibration.error.high


def test_certain_model_with_half_accuracy_has_an_error_of_one_half():
    calibration = measure_calibration(np.ones(100), np.arange(100) < 50)
    assert calibration.error.value == 0.5
    assert calibration.overconfidence == 0.5
    assert calibration.error.low == pytest.approx(0.4, abs=0.03)
    assert calibration.error.high == pytest.approx(0.6, abs=0.03)


def test_empty_bins_have_no_confidence_and_accuracy():
    calibration = measure_calibration(np.array([0.95]), np.array([True]))
    assert math.isnan(calibration.confidence[0])
    bins = calibration.to_dict()["bins"]
    assert bins[0] == {"lower": 0.0, "upper": pytest.approx(1 / 15), "count": 0, "confidence": None, "accuracy": None}
    assert bins[-1]["accuracy"] == 1.0
