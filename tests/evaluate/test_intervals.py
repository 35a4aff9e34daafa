"""Bootstrap intervals against scipy, a slow loop over resampled images, and what they must hold."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from vitrail.evaluate import average_precision, intervals, wilson_interval


@given(st.integers(1, 3000), st.floats(0.001, 0.999))
def test_the_quantiles_of_a_share_are_scipys(count: int, chance: float):
    levels = (0.025, 0.975)
    assert intervals.binomial_quantiles(count, chance, levels) == tuple(stats.binom.ppf(levels, count, chance))


def test_a_share_of_a_million_is_no_trouble():
    found = intervals.proportion(743_000, 1_000_000)
    spread = 1.96 * math.sqrt(0.743 * 0.257 / 1e6)
    assert (found.low, found.high) == pytest.approx((0.743 - spread, 0.743 + spread), abs=2e-6)


def test_a_share_has_the_interval_that_drawing_images_again_gives():
    right = np.arange(200) < 130
    rng = np.random.default_rng(7)
    drawn = [right[rng.integers(0, 200, 200)].mean() for _ in range(20_000)]
    found = intervals.proportion(130, 200)
    assert found.interval_method == "bootstrap"
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(drawn, [0.025, 0.975])), abs=0.0051)


@pytest.mark.parametrize(("right", "count"), [(3, 3), (0, 3), (9, 5000), (4991, 5000)])
def test_nearly_none_and_nearly_all_have_wilsons_interval(right: int, count: int):
    found = intervals.proportion(right, count)
    assert found.interval_method == "wilson"
    assert (found.low, found.high) == wilson_interval(right, count)


def test_a_share_of_nothing_is_none():
    assert intervals.proportion(0, 0) is None


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_an_interval_holds_its_share(pair: tuple[int, int]):
    found = intervals.proportion(*pair)
    assert 0 <= found.low <= found.value <= found.high <= 1


def test_the_interval_of_a_mean_is_scipys():
    values = np.random.default_rng(3).exponential(size=400)
    expected = stats.bootstrap((values,), np.mean, method="percentile", n_resamples=9999, rng=np.random.default_rng(0))
    found = intervals.bootstrap_mean(values)
    assert found.value == values.mean()
    assert found.low == pytest.approx(expected.confidence_interval.low, abs=0.01)
    assert found.high == pytest.approx(expected.confidence_interval.high, abs=0.01)


def test_the_interval_of_a_mean_is_the_same_each_time():
    values = np.random.default_rng(3).random(1000)
    assert intervals.bootstrap_mean(values) == intervals.bootstrap_mean(values)


def test_every_resample_has_as_many_images_as_there_are():
    blocks = list(intervals.resample_counts(37, 2500))
    counts = np.concatenate(blocks)
    assert counts.shape == (2500, 37)
    assert (counts.sum(1) == 37).all()
    np.testing.assert_allclose(counts.mean(0), 1, atol=0.1)


def test_what_is_not_a_number_has_no_interval():
    found = intervals.bootstrap_mean(np.array([1.0, math.nan]))
    assert math.isnan(found.low)
    assert math.isnan(found.high)


def test_a_difference_on_the_same_images_is_known_better_than_either_share():
    before = np.arange(1000) < 700
    right = before.copy()
    right[690:730] = [False] * 10 + [True] * 30  # ten lost, thirty won
    found, alone = intervals.paired_difference(right, before), intervals.proportion(720, 1000)
    assert found.value == pytest.approx(0.02)
    assert 0 < found.low < 0.02 < found.high
    assert found.high - found.low < (alone.high - alone.low) / 2
    spread = 1.96 * math.sqrt((0.04 - 0.02**2) / 1000)  # of values -1, 0, 1
    assert (found.low, found.high) == pytest.approx((0.02 - spread, 0.02 + spread), abs=0.0015)


def test_no_difference_is_none_for_certain():
    same = np.arange(50) % 2 == 0
    assert intervals.paired_difference(same, same) == intervals.Estimate(0.0, 0.0, 0.0)


@pytest.mark.parametrize("levels", [4, 1000])
def test_mean_average_precision_is_resampled_as_a_slow_loop_does_it(levels: int):
    rng = np.random.default_rng(levels)
    truth, scores = rng.random((60, 4)) < 0.2, rng.integers(0, levels, (60, 4)) / levels  # with ties and without
    truth[:, 3] = False  # a class nobody has
    truth[:, 2] = np.arange(60) == 5  # one that many resamples have not

    def precision(rows: np.ndarray) -> float:
        return float(np.nanmean([average_precision(truth[rows, k], scores[rows, k]) for k in range(3)]))

    drawn = [
        precision(np.repeat(np.arange(60), row.astype(int)))
        for block in intervals.resample_counts(60, 300)
        for row in block
    ]
    value = precision(np.arange(60))
    found = intervals.bootstrap_map(truth, scores, value, resamples=300)
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(drawn, [0.025, 0.975])), abs=1e-6)


def test_classes_that_nobody_has_have_no_mean_precision():
    found = intervals.bootstrap_map(np.zeros((5, 2), bool), np.ones((5, 2)), math.nan)
    assert math.isnan(found.low)


def test_numbers_found_together_are_those_found_alone_and_images_are_drawn_once(monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(0)
    one, other = (rng.normal(size=(40, 1)), first), (rng.normal(size=(40, 3)), lambda sums: np.abs(sums).sum(-1))
    alone = [intervals.bootstrap_statistic(*one), intervals.bootstrap_statistic(*other)]
    passes, draws = list[int](), intervals.resample_counts

    def counted(*arguments: int) -> Iterator[np.ndarray]:
        passes.append(1)
        return draws(*arguments)

    monkeypatch.setattr(intervals, "resample_counts", counted)
    for found, expected in zip(intervals.bootstrap_statistics([one, other]), alone, strict=True):
        assert (found.value, found.low, found.high) == pytest.approx(
            (expected.value, expected.low, expected.high), rel=1e-9
        )
    assert len(passes) == 1


def first(sums: np.ndarray) -> np.ndarray:
    return sums[..., 0] / 40


def test_the_interval_of_a_mean_of_shares_is_the_normal_one_for_many_images():
    shares = [(0.3, 4000), (0.8, 1000), (0.5, 9000)]
    found = intervals.mean_of_proportions(shares)
    spread = 1.96 * math.sqrt(sum(p * (1 - p) / n for p, n in shares)) / 3
    assert found.value == pytest.approx(1.6 / 3)
    assert (found.value - found.low, found.high - found.value) == pytest.approx((spread, spread), rel=0.08)


def test_shares_that_are_nearly_all_the_same_have_wilsons_interval():
    all_right = intervals.bounded_mean(np.ones(22))
    assert (all_right.value, all_right.interval_method) == (1.0, "wilson")
    assert (all_right.low, all_right.high) == pytest.approx(wilson_interval(22, 22))
    mixed = intervals.bounded_mean(np.tile([0.0, 1 / 3, 2 / 3, 1.0], 50))
    assert mixed.interval_method == "bootstrap"
    assert mixed == intervals.bootstrap_mean(np.tile([0.0, 1 / 3, 2 / 3, 1.0], 50))
