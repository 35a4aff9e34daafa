"""Bootstrap intervals against scipy and a slow loop over resampled images, and their invariants."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from vitrail.evaluation import average_precision, intervals, wilson_interval


@given(st.integers(1, 3000), st.floats(0.001, 0.999))
def test_binomial_quantiles_equal_scipys(count: int, probability: float):
    levels = (0.025, 0.975)
    assert intervals.binomial_quantiles(count, probability, levels) == tuple(
        stats.binom.ppf(levels, count, probability)
    )


def test_proportion_of_a_million_has_the_normal_interval():
    estimate = intervals.proportion(743_000, 1_000_000)
    margin = 1.96 * math.sqrt(0.743 * 0.257 / 1e6)
    assert (estimate.low, estimate.high) == pytest.approx((0.743 - margin, 0.743 + margin), abs=2e-6)


def test_proportion_interval_equals_that_of_resampled_images():
    right = np.arange(200) < 130
    rng = np.random.default_rng(7)
    resampled = [right[rng.integers(0, 200, 200)].mean() for _ in range(20_000)]
    estimate = intervals.proportion(130, 200)
    assert estimate.interval_method == "bootstrap"
    assert (estimate.low, estimate.high) == pytest.approx(tuple(np.quantile(resampled, [0.025, 0.975])), abs=0.0051)


@pytest.mark.parametrize(("right", "count"), [(3, 3), (0, 3), (9, 5000), (4991, 5000)])
def test_extreme_proportions_have_the_wilson_interval(right: int, count: int):
    estimate = intervals.proportion(right, count)
    assert estimate.interval_method == "wilson"
    assert (estimate.low, estimate.high) == wilson_interval(right, count)


def test_proportion_of_zero_images_is_none():
    assert intervals.proportion(0, 0) is None


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_interval_contains_its_proportion(pair: tuple[int, int]):
    estimate = intervals.proportion(*pair)
    assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1


def test_interval_of_a_mean_equals_scipys():
    values = np.random.default_rng(3).exponential(size=400)
    expected = stats.bootstrap((values,), np.mean, method="percentile", n_resamples=9999, rng=np.random.default_rng(0))
    estimate = intervals.bootstrap_mean(values)
    assert estimate.value == values.mean()
    assert estimate.low == pytest.approx(expected.confidence_interval.low, abs=0.01)
    assert estimate.high == pytest.approx(expected.confidence_interval.high, abs=0.01)


def test_interval_of_a_mean_is_deterministic():
    values = np.random.default_rng(3).random(1000)
    assert intervals.bootstrap_mean(values) == intervals.bootstrap_mean(values)


def test_every_resample_has_as_many_images_as_the_data():
    blocks = list(intervals.resample_counts(37, 2500))
    counts = np.concatenate(blocks)
    assert counts.shape == (2500, 37)
    assert (counts.sum(1) == 37).all()
    np.testing.assert_allclose(counts.mean(0), 1, atol=0.1)


def test_nan_values_have_no_interval():
    estimate = intervals.bootstrap_mean(np.array([1.0, math.nan]))
    assert math.isnan(estimate.low)
    assert math.isnan(estimate.high)


def test_paired_difference_has_a_narrower_interval_than_a_proportion():
    correct_before = np.arange(1000) < 700
    correct_after = correct_before.copy()
    correct_after[690:730] = [False] * 10 + [True] * 30  # 10 lost, 30 gained
    difference, proportion = intervals.paired_difference(correct_after, correct_before), intervals.proportion(720, 1000)
    assert difference.value == pytest.approx(0.02)
    assert 0 < difference.low < 0.02 < difference.high
    assert difference.high - difference.low < (proportion.high - proportion.low) / 2
    margin = 1.96 * math.sqrt((0.04 - 0.02**2) / 1000)  # of values -1, 0, 1
    assert (difference.low, difference.high) == pytest.approx((0.02 - margin, 0.02 + margin), abs=0.0015)


def test_equal_predictions_have_a_difference_of_exactly_zero():
    correct = np.arange(50) % 2 == 0
    assert intervals.paired_difference(correct, correct) == intervals.Estimate(0.0, 0.0, 0.0)


@pytest.mark.parametrize("levels", [4, 1000])
def test_bootstrap_of_the_mean_average_precision_equals_a_slow_loop(levels: int):
    rng = np.random.default_rng(levels)
    truth, scores = rng.random((60, 4)) < 0.2, rng.integers(0, levels, (60, 4)) / levels  # with ties and without
    truth[:, 3] = False  # a class without images
    truth[:, 2] = np.arange(60) == 5  # a class that is missing from many resamples

    def mean_precision(rows: np.ndarray) -> float:
        return float(np.nanmean([average_precision(truth[rows, k], scores[rows, k]) for k in range(3)]))

    resampled = [
        mean_precision(np.repeat(np.arange(60), row.astype(int)))
        for block in intervals.resample_counts(60, 300)
        for row in block
    ]
    value = mean_precision(np.arange(60))
    estimate = intervals.bootstrap_mean_average_precision(truth, scores, value, resamples=300)
    assert (estimate.low, estimate.high) == pytest.approx(tuple(np.quantile(resampled, [0.025, 0.975])), abs=1e-6)


def test_map_of_classes_without_images_has_no_interval():
    estimate = intervals.bootstrap_mean_average_precision(np.zeros((5, 2), bool), np.ones((5, 2)), math.nan)
    assert math.isnan(estimate.low)


def test_bootstrap_statistics_share_one_pass_of_resampling(monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(0)
    mean_statistic, sum_statistic = (
        (rng.normal(size=(40, 1)), first_mean),
        (rng.normal(size=(40, 3)), lambda sums: np.abs(sums).sum(-1)),
    )
    separate = [intervals.bootstrap_statistic(*mean_statistic), intervals.bootstrap_statistic(*sum_statistic)]
    calls, resample_counts = list[int](), intervals.resample_counts

    def counted(*arguments: int) -> Iterator[np.ndarray]:
        calls.append(1)
        return resample_counts(*arguments)

    monkeypatch.setattr(intervals, "resample_counts", counted)
    for estimate, expected in zip(
        intervals.bootstrap_statistics([mean_statistic, sum_statistic]), separate, strict=True
    ):
        assert (estimate.value, estimate.low, estimate.high) == pytest.approx(
            (expected.value, expected.low, expected.high), rel=1e-9
        )
    assert len(calls) == 1


def first_mean(sums: np.ndarray) -> np.ndarray:
    return sums[..., 0] / 40


def test_mean_of_proportions_has_the_normal_interval_for_many_images():
    proportions = [(0.3, 4000), (0.8, 1000), (0.5, 9000)]
    estimate = intervals.mean_of_proportions(proportions)
    margin = 1.96 * math.sqrt(sum(p * (1 - p) / n for p, n in proportions)) / 3
    assert estimate.value == pytest.approx(1.6 / 3)
    assert (estimate.value - estimate.low, estimate.high - estimate.value) == pytest.approx((margin, margin), rel=0.08)


def test_bounded_mean_of_equal_values_has_the_wilson_interval():
    all_correct = intervals.bounded_mean(np.ones(22))
    assert (all_correct.value, all_correct.interval_method) == (1.0, "wilson")
    assert (all_correct.low, all_correct.high) == pytest.approx(wilson_interval(22, 22))
    mixed = intervals.bounded_mean(np.tile([0.0, 1 / 3, 2 / 3, 1.0], 50))
    assert mixed.interval_method == "bootstrap"
    assert mixed == intervals.bootstrap_mean(np.tile([0.0, 1 / 3, 2 / 3, 1.0], 50))
