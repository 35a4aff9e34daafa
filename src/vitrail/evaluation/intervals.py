"""95 % bootstrap intervals over the images that a metric was measured on.

    proportion             of zeros and ones: the bootstrap distribution is binomial, so its quantiles are exact
    bootstrap_statistic    any function of column sums: images are resampled with replacement
    paired_difference      of two models, or two image sizes, on the same images
    mean_of_proportions    over separate sets of images, such as tasks

The bootstrap interval of a proportion near 0 or 1 is too narrow: three correct of three would give 100 % to 100 %.
Wilson's interval is used there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from vitrail.evaluation.scores import Floats, Ints, wilson_interval

# N images, S values per image, R resamples, B resamples at a time

RESAMPLES = 2000
CONFIDENCE_LEVEL = 0.95
SEED = 0
MIN_BOOTSTRAP_COUNT = 10
"""With fewer correct or fewer wrong answers than this, Wilson's interval is used."""
MAX_COUNTS_IN_MEMORY = 4_000_000
"""Upper bound on the resample counts held in memory at a time."""
MAX_AP_OPERATIONS = 500_000_000
"""Upper bound on images x classes x resamples of average precision: a few seconds. Resamples are reduced to meet it."""

IntervalMethod = Literal["bootstrap", "wilson"]
Statistic = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]
"""S sums -> one value; R S sums -> R values."""


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float
    interval_method: IntervalMethod = "bootstrap"

    def to_dict(self) -> dict[str, Any]:
        return {"value": self.value, "low": self.low, "high": self.high, "interval_method": self.interval_method}


def proportion(correct: int, count: int) -> Estimate | None:
    """`correct` of `count`; None if `count` is 0."""
    if count == 0:
        return None
    value = correct / count
    if min(correct, count - correct) < MIN_BOOTSTRAP_COUNT:
        return Estimate(value, *wilson_interval(correct, count), "wilson")
    low, high = binomial_quantiles(count, value, ((1 - CONFIDENCE_LEVEL) / 2, (1 + CONFIDENCE_LEVEL) / 2))
    return Estimate(value, low / count, high / count)


def binomial_quantiles(count: int, prob: float, levels: tuple[float, ...]) -> tuple[int, ...]:
    """The smallest k with P(X <= k) >= level, for each level; X is Binomial(count, prob) and 0 < prob < 1."""
    log_factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, count + 1)))])
    k = np.arange(count + 1)
    log_binomials = log_factorials[count] - log_factorials - log_factorials[::-1]
    cdf = np.cumsum(np.exp(log_binomials + k * math.log(prob) + (count - k) * math.log1p(-prob)))
    return tuple(int(i) for i in np.searchsorted(cdf, levels))


def bootstrap_mean(values: Floats, *, resamples: int = RESAMPLES, seed: int = SEED) -> Estimate:
    """The mean of N values."""
    return bootstrap_statistic(values[:, None], lambda sums: sums[..., 0] / len(values), resamples=resamples, seed=seed)


def bounded_mean(values: Floats, *, resamples: int = RESAMPLES, seed: int = SEED) -> Estimate:
    """The mean of N values from 0 to 1, such as accuracies over seeds; Wilson's interval if it is close to 0 or 1."""
    total = float(np.sum(values))
    if min(total, len(values) - total) < MIN_BOOTSTRAP_COUNT:
        return Estimate(total / len(values), *wilson_interval(total, len(values)), "wilson")
    return bootstrap_mean(values, resamples=resamples, seed=seed)


def bootstrap_statistic(
    columns: Floats, statistic: Statistic, *, resamples: int = RESAMPLES, seed: int = SEED
) -> Estimate:
    """A statistic that is a function of the column sums of N S values."""
    return bootstrap_statistics([(columns, statistic)], resamples=resamples, seed=seed)[0]


def bootstrap_statistics(
    requests: Sequence[tuple[Floats, Statistic]], *, resamples: int = RESAMPLES, seed: int = SEED
) -> list[Estimate]:
    """Several statistics of the same N images, with shared resamples, since resampling takes most of the time."""
    whole = np.concatenate([np.asarray(columns, np.float64) for columns, _ in requests], axis=1)
    ends = np.cumsum([columns.shape[1] for columns, _ in requests])[:-1]
    resampled: list[list[npt.NDArray[np.float64]]] = [[] for _ in requests]
    for counts in resample_counts(len(whole), resamples, seed):
        parts = np.split(counts @ whole, ends, axis=1)
        for results, part, (_, statistic) in zip(resampled, parts, requests, strict=True):
            results.append(statistic(part))
    values = [float(statistic(np.asarray(columns, np.float64).sum(0))) for columns, statistic in requests]
    pairs = zip(values, resampled, strict=True)
    return [percentile_interval(value, np.concatenate(results)) for value, results in pairs]


def percentile_interval(value: float, resampled: npt.NDArray[np.float64]) -> Estimate:
    """The central 95 % of the resampled values, extended to contain `value`.

    The extension matters for sums of absolute values, such as a calibration error: they grow with noise, and resamples
    are noisier than the data.
    """
    resampled = resampled[~np.isnan(resampled)]
    if math.isnan(value) or not len(resampled):
        return Estimate(value, math.nan, math.nan)
    low, high = np.quantile(resampled, [(1 - CONFIDENCE_LEVEL) / 2, (1 + CONFIDENCE_LEVEL) / 2])
    return Estimate(value, min(float(low), value), max(float(high), value))


def resample_counts(count: int, resamples: int = RESAMPLES, seed: int = SEED) -> Iterator[npt.NDArray[np.float64]]:
    """Yield blocks of B N counts: how often each image occurs in each resample. Determined by the seed."""
    rng = np.random.default_rng(seed)
    size = max(MAX_COUNTS_IN_MEMORY // count, 1)
    for first in range(0, resamples, size):
        rows = min(size, resamples - first)
        drawn = rng.integers(0, count, (rows, count), dtype=np.int32)
        drawn += (np.arange(rows, dtype=np.int32) * count)[:, None]
        yield np.bincount(drawn.ravel(), minlength=rows * count).reshape(rows, count).astype(np.float64)


def paired_difference(
    correct: npt.NDArray[np.bool_], before: npt.NDArray[np.bool_], *, resamples: int = RESAMPLES, seed: int = SEED
) -> Estimate:
    """Mean of `correct` minus mean of `before`, N each, for the same images in the same order.

    Images on which both agree cancel out, so the interval is narrower than that of either proportion.
    """
    count = len(correct)
    up, down = int(np.sum(correct & ~before)), int(np.sum(before & ~correct))
    fractions = np.array([up, down, count - up - down]) / count
    drawn = np.random.default_rng(seed).multinomial(count, fractions, resamples)  # equivalent to resampling N images
    return percentile_interval((up - down) / count, (drawn[:, 0] - drawn[:, 1]) / count)


def mean_of_proportions(
    proportions: Sequence[tuple[float, int]], *, resamples: int = RESAMPLES, seed: int = SEED
) -> Estimate:
    """The mean of (proportion, number of images) over separate sets of images, each resampled by itself."""
    values, counts = (np.array(column) for column in zip(*proportions, strict=True))
    drawn = np.random.default_rng(seed).binomial(counts, values, (resamples, len(proportions))) / counts
    return percentile_interval(float(values.mean()), drawn.mean(1))


def bootstrap_mean_average_precision(
    truth: npt.NDArray[np.bool_], scores: Floats, value: float, *, resamples: int = RESAMPLES, seed: int = SEED
) -> Estimate:
    """The interval of `value`, the mean average precision over classes; `truth` and `scores` are N K.

    A class without an image in a resample is excluded from that resample's mean.
    """
    count, num_classes = truth.shape
    resamples = int(min(resamples, max(MAX_AP_OPERATIONS / (count * num_classes), 100)))
    present = np.flatnonzero(truth.any(0))
    if not len(present) or np.isnan(scores).any():
        return Estimate(value, math.nan, math.nan)
    steps = [_precision_steps(truth[:, k], scores[:, k]) for k in present]
    resampled = []
    for counts in resample_counts(count, resamples, seed):
        columns = np.ascontiguousarray(counts.T, np.float32)  # N B: sorting images then moves whole rows
        precisions = np.stack([_resampled_precisions(columns, *step) for step in steps])  # K B
        defined = ~np.isnan(precisions)
        resampled.append(np.where(defined, precisions, 0).sum(0) / np.maximum(defined.sum(0), 1))
    return percentile_interval(value, np.concatenate(resampled))


def _precision_steps(truth: npt.NDArray[np.bool_], score: Floats) -> tuple[Ints, Ints, Ints, Ints]:
    """Steps of a class's precision-recall curve: image order, step starts, order of its own images, their step starts.

    Images are sorted by score, highest first. A step ends with a run of equal scores that contains an image of the
    class; images after the last step do not matter.
    """
    order = np.argsort(-score, kind="stable")
    last = np.flatnonzero(np.append(np.diff(score[order]) != 0, True))
    own = np.flatnonzero(truth[order])
    runs, starts = np.unique(np.searchsorted(last, own), return_index=True)
    ends = last[runs] + 1
    return order[: ends[-1]], np.append(0, ends[:-1]), order[own], starts


def _resampled_precisions(
    counts: npt.NDArray[np.float32], order: Ints, starts: Ints, own: Ints, own_starts: Ints
) -> npt.NDArray[np.float32]:
    """B: `scores.average_precision` of each resample, from N B counts of how often each image is in it."""
    gained = np.add.reduceat(counts[own], own_starts, axis=0)
    seen = np.cumsum(np.add.reduceat(counts[order], starts, axis=0), axis=0)  # integers, so float32 is exact
    found = np.cumsum(gained, axis=0)
    with np.errstate(invalid="ignore"):
        return (gained * found / np.maximum(seen, 1)).sum(0) / found[-1]
