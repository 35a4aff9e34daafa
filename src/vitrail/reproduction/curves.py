"""Curves of accuracy over data or compute: where they cross, what they are worth in data, which points are best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from vitrail.reproduction.results import Results, SeedMean, mean_over_seeds

Points = Mapping[float, float]
"""x -> y; between the points, y is linear in log x."""


def x_where(curve: Points, y: float) -> float | None:
    """The smallest x at which the curve reaches y; None if it never does or starts above it."""
    points = sorted(curve.items())
    if not points or points[0][1] > y:
        return None
    for (x0, y0), (x1, y1) in pairwise(points):
        if y0 <= y <= y1:
            return x0 if y1 == y0 else x0 * (x1 / x0) ** ((y - y0) / (y1 - y0))
    return points[0][0] if points[0][1] == y else None


def crossings(first: Points, second: Points) -> list[float]:
    """Every x at which the difference of two curves changes its sign, from the x that both have."""
    gaps = [(x, first[x] - second[x]) for x in sorted(set(first) & set(second))]
    gaps = [(x, gap) for x, gap in gaps if gap != 0]
    found = []
    for (x0, gap0), (x1, gap1) in pairwise(gaps):
        if gap0 * gap1 < 0:
            found.append(x0 * (x1 / x0) ** (gap0 / (gap0 - gap1)))
    return found


def slope_weights(costs: Mapping[str, float]) -> dict[str, float]:
    """Arm -> its weight in the least-squares slope over log2 of the cost; empty for fewer than two costs."""
    mean = sum(map(math.log2, costs.values())) / max(len(costs), 1)
    deviations = {arm: math.log2(cost) - mean for arm, cost in costs.items()}
    total = sum(deviation**2 for deviation in deviations.values())
    return {arm: deviation / total for arm, deviation in deviations.items()} if len(set(costs.values())) > 1 else {}


def best_so_far(curve: Points) -> dict[float, float]:
    """The points that are higher than all points of a smaller x."""
    found: dict[float, float] = {}
    for x, y in sorted(curve.items(), key=lambda point: (point[0], -point[1])):
        if not found or y > max(found.values()):
            found[x] = y
    return found


def pareto_front(costs: Mapping[str, float], scores: Mapping[str, float]) -> list[str]:
    """The names with a higher score than every name that costs as much or less, the cheapest first."""
    front: list[str] = []
    for name in sorted(set(costs) & set(scores), key=lambda name: (costs[name], -scores[name])):
        if not front or scores[name] > scores[front[-1]]:
            front.append(name)
    return front


def mean_curve(results: Results, arms: Mapping[float, str], metric: str = "test") -> dict[float, SeedMean]:
    """x -> mean over seeds, for the arms that have one."""
    means = {x: results.mean(arm, metric) for x, arm in arms.items()}
    return {x: mean for x, mean in means.items() if mean is not None}


def curve_of_seed(results: Results, arms: Mapping[float, str], seed: int, metric: str = "test") -> dict[float, float]:
    """x -> value of one seed, for the arms that have it."""
    values = {x: results.values(arm, metric) for x, arm in arms.items()}
    return {x: found[seed] for x, found in values.items() if seed in found}


def log_error(curve: Points, y: float, error: float) -> float:
    """The error of log x at which the curve reaches y, from the error of y; 0 where it does not."""
    x = x_where(curve, y)
    moved = [at for shifted in (y - error, y + error) if (at := x_where(curve, shifted)) is not None]
    return 0.0 if x is None else max((abs(math.log(at / x)) for at in moved), default=0.0)


def geometric_mean(ratios: Sequence[float], least_log_variance: float = 0.0) -> SeedMean | None:
    """The geometric mean with the 95 % interval of the mean logarithm."""
    if not ratios:
        return None
    mean = mean_over_seeds([math.log(ratio) for ratio in ratios], least_log_variance)
    return SeedMean(math.exp(mean.value), math.exp(mean.low), math.exp(mean.high), mean.count)
