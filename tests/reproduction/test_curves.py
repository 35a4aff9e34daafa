"""Curves of accuracy over data or compute."""

from __future__ import annotations

import math

import pytest
from reproduction.synthetic import make_arm, make_results

from vitrail.reproduction.curves import (
    best_so_far,
    crossings,
    geometric_mean,
    log_error,
    mean_curve,
    pareto_front,
    slope_weights,
    x_where,
)


def test_a_curve_is_linear_in_the_logarithm_of_x():
    curve = {1.0: 0.2, 10.0: 0.6, 100.0: 0.8}
    assert x_where(curve, 0.2) == pytest.approx(1)
    assert x_where(curve, 0.4) == pytest.approx(math.sqrt(10))
    assert x_where(curve, 0.7) == pytest.approx(10 * math.sqrt(10))
    assert x_where(curve, 0.8) == pytest.approx(100)


def test_an_error_of_y_becomes_one_of_log_x():
    curve = {1.0: 0.2, 10.0: 0.6, 100.0: 0.8}
    assert log_error(curve, 0.4, 0.1) == pytest.approx(math.log(10) / 4)
    assert log_error(curve, 0.6, 0.1) == pytest.approx(math.log(10) / 2)  # the steeper of both sides counts less
    assert log_error(curve, 0.2, 0.1) == pytest.approx(math.log(10) / 4)
    assert log_error(curve, 0.9, 0.05) == 0


def test_what_a_curve_does_not_reach_has_no_x():
    curve = {1.0: 0.2, 10.0: 0.6}
    assert x_where(curve, 0.7) is None
    assert x_where(curve, 0.1) is None  # below its start: the x is smaller than any that was measured
    assert x_where({}, 0.5) is None


def test_a_curve_that_falls_reaches_a_value_first_where_it_rises():
    assert x_where({1.0: 0.2, 2.0: 0.6, 4.0: 0.3, 8.0: 0.6}, 0.4) == pytest.approx(math.sqrt(2))


def test_curves_cross_where_their_difference_changes_its_sign():
    first, second = {1.0: 0.5, 10.0: 0.6, 100.0: 0.7}, {1.0: 0.3, 10.0: 0.5, 100.0: 0.9}
    (x,) = crossings(first, second)  # differences of 0.1 at 10 and -0.2 at 100: a third of the way
    assert x == pytest.approx(10 * 10 ** (1 / 3))
    assert crossings(second, first) == [pytest.approx(x)]
    assert crossings(first, {x: y - 0.1 for x, y in first.items()}) == []


def test_slope_weights_are_those_of_least_squares():
    def slope(points: dict[str, tuple[float, float]]) -> float:
        weights = slope_weights({name: x for name, (x, _) in points.items()})
        return sum(weights[name] * y for name, (_, y) in points.items())

    assert slope({"a": (1.0, 0.1), "b": (2.0, 0.3), "c": (4.0, 0.5)}) == pytest.approx(0.2)
    assert slope({"a": (1.0, 0.1), "b": (1.0, 0.3), "c": (2.0, 0.4)}) == pytest.approx(0.2)
    assert slope_weights({"a": 1.0}) == slope_weights({"a": 1.0, "b": 1.0}) == slope_weights({}) == {}


def test_the_front_has_no_point_that_another_beats_for_less():
    costs = {"a": 1.0, "b": 2.0, "c": 2.0, "d": 4.0, "e": 3.0}
    scores = {"a": 0.5, "b": 0.6, "c": 0.7, "d": 0.7, "e": 0.9}
    assert pareto_front(costs, scores) == ["a", "c", "e"]
    assert best_so_far({1.0: 0.5, 2.0: 0.4, 3.0: 0.6}) == {1.0: 0.5, 3.0: 0.6}


def test_intervals_of_proportions_stay_within_bounds():
    arms = [make_arm("a")]
    mean = mean_curve(make_results(arms, {"a": [0.5, 1.0]}), {1.0: "a"})[1.0]
    assert (mean.value, mean.low, mean.high) == (0.75, 0.0, 1.0)


def test_the_geometric_mean_of_ratios():
    mean = geometric_mean([2.0, 8.0])
    assert mean is not None
    assert mean.value == pytest.approx(4)
    assert mean.low < 2 < 8 < mean.high
    assert geometric_mean([]) is None
