"""The calibration error against a slow transcription of its definition, and cases worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from vitrail.evaluate.calibration import measure_calibration


def slow(score: np.ndarray, right: np.ndarray, bins: int) -> float:
    """Guo et al. 2017, equation 3: the sum over bins ((m - 1)/M, m/M] of |B|/n |acc(B) - conf(B)|."""
    total, edges = 0.0, np.linspace(0, 1, bins + 1)
    for m in range(bins):
        inside = [
            i for i, s in enumerate(score) if (s > edges[m] or (m == 0 and s >= 0)) and s <= edges[m + 1]
        ]  # fmt: skip
        if inside:
            accuracy = sum(bool(right[i]) for i in inside) / len(inside)
            certainty = sum(float(score[i]) for i in inside) / len(inside)
            total += len(inside) / len(score) * abs(accuracy - certainty)
    return total


@given(st.integers(1, 60), st.sampled_from([1, 2, 10, 15]), st.data())
def test_the_error_is_its_definitions(count: int, bins: int, data: st.DataObject):
    # Tenths and fifteenths lie on the edges of bins.
    grid = st.sampled_from([*np.linspace(0, 1, 16), *np.linspace(0, 1, 11), 0.123, 0.999])
    score = data.draw(arrays(np.float64, count, elements=grid))
    right = data.draw(arrays(np.bool_, count))
    found = measure_calibration(score, right, bins)
    assert found.error.value == pytest.approx(slow(score, right, bins), abs=1e-12)
    assert found.counts.sum() == count
    assert abs(score.mean() - right.mean()) - 1e-12 <= found.error.value <= 1
    assert found.overconfidence == pytest.approx(score.mean() - right.mean(), abs=1e-12)


def test_four_images_by_hand():
    # Two bins: (0, .5] holds .4 wrong; (.5, 1] holds .6 wrong, .8 right, .9 right: certainty 2.3/3, accuracy 2/3.
    found = measure_calibration(np.array([0.4, 0.6, 0.8, 0.9]), np.array([False, False, True, True]), bins=2)
    assert found.counts.tolist() == [1, 3]
    assert found.confidence == pytest.approx([0.4, 2.3 / 3])
    assert found.accuracy == pytest.approx([0, 2 / 3])
    assert found.error.value == pytest.approx(0.25 * 0.4 + 0.75 * 0.1)
    assert found.max_error == pytest.approx(0.4)
    assert found.overconfidence == pytest.approx(0.675 - 0.5)


def test_a_model_that_is_right_as_often_as_it_says_is_near_zero():
    rng = np.random.default_rng(0)
    score = rng.uniform(0.2, 1, 20_000)
    found = measure_calibration(score, rng.random(20_000) < score)
    assert found.error.value < 0.02
    assert found.error.low <= found.error.value <= found.error.high


def test_one_that_is_always_sure_and_half_right_is_half_off():
    found = measure_calibration(np.ones(100), np.arange(100) < 50)
    assert found.error.value == 0.5
    assert found.overconfidence == 0.5
    assert found.error.low == pytest.approx(0.4, abs=0.03)
    assert found.error.high == pytest.approx(0.6, abs=0.03)


def test_empty_bins_say_nothing():
    found = measure_calibration(np.array([0.95]), np.array([True]))
    assert math.isnan(found.confidence[0])
    bins = found.to_dict()["bins"]
    assert bins[0] == {"lower": 0.0, "upper": pytest.approx(1 / 15), "count": 0, "confidence": None, "accuracy": None}
    assert bins[-1]["accuracy"] == 1.0
