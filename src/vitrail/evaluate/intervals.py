"""How far a number may be off: bootstrap intervals over the images that it was measured on.

    share          of 0 and 1: the bootstrap's distribution is a binomial one, and its quantiles are exact
    mean, sums     other numbers: images drawn again, with replacement, by their counts
    difference     of two models on the same images
    mean_of_proportions of several sets of images, such as tasks

The bootstrap of a share that is nearly nothing or nearly all says too little: three of three right
would be 100 % to 100 %. Wilson's interval takes its place there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from vitrail.evaluate.scores import Floats, Ints, wilson_interval

# N images, S numbers of each, R resamples of all of them, B resamples at a time

RESAMPLES = 2000
CONFIDENCE_LEVEL = 0.95
SEED = 0
MIN_BOOTSTRAP_COUNT = 10
"""Fewer right or wrong ones than this and Wilson's interval is taken."""
MAX_COUNTS_IN_MEMORY = 4_000_000
"""Counts that are held at once."""
MAX_AP_OPERATIONS = 500_000_000
"""Images times classes times resamples of average precisions, which takes seconds; of more, fewer resamples."""

IntervalMethod = Literal["bootstrap", "wilson"]
Statistic = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]
"""S sums, or R S, -> a number, or R of them."""


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float
    interval_method: IntervalMethod = "bootstrap"

    def to_dict(self) -> dict[str, Any]:
        return {"value": self.value, "low": self.low, "high": self.high, "interval_method": self.interval_method}


def proportion(correct: int, count: int) -> Estimate | None:
    """`right` of `count`; None of nothing."""
    if count == 0:
        return None
    value = correct / count
    if min(correct, count - correct) < MIN_BOOTSTRAP_COUNT:
        return Estimate(value, *wilson_interval(correct, count), "wilson")
    low, high = binomial_quantiles(count, value, ((1 - CONFIDENCE_LEVEL) / 2, (1 + CONFIDENCE_LEVEL) / 2))
    return Estimate(value, low / count, high / count)


def binomial_quantiles(count: int, prob: float, levels: tuple[float, ...]) -> tuple[int, ...]:
    """The least k of 0 to `count` that so many draws in all stay within, for each level; 0 < chance < 1."""
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, count + 1)))])  # of the factorials
    k = np.arange(count + 1)
    ways = logs[count] - logs - logs[::-1]
    within = np.cumsum(np.exp(ways + k * math.log(prob) + (count - k) * math.log1p(-prob)))
    return tuple(int(i) for i in np.searchsorted(within, levels))


def bootstrap_mean(values: Floats, *, resamples: int = RESAMPLES, seed: int = SEED) -> Estimate:
    """Of N numbers."""
    return bootstrap_statistic(values[:, None], lambda sums: sums[..., 0] / len(values), resamples=resamples, seed=seed)


def bounded_mean(values: Floats, *, resamples: int = RESAMPLES, seed: int = SEED) -> Estimate:
    """Of N numbers from 0 to 1, such as how many of a few tries were right: Wilson's where nearly all are the same."""
    right = float(np.sum(values))
    if min(right, len(values) - right) < MIN_BOOTSTRAP_COUNT:
        return Estimate(right / len(values), *wilson_interval(right, len(values)), "wilson")
    return bootstrap_mean(values, resamples=resamples, seed=seed)


def bootstrap_statistic(
    columns: Floats, statistic: Statistic, *, resamples: int = RESAMPLES, seed: int = SEED
) -> Estimate:
    """Of a number that depends on the sums of N S alone."""
    return bootstrap_statistics([(columns, statistic)], resamples=resamples, seed=seed)[0]


def bootstrap_statistics(
    requests: Sequence[tuple[Floats, Statistic]], *, resamples: int = RESAMPLES, seed: int = SEED
) -> list[Estimate]:
    """Several such numbers of the same N images: they are drawn again once, which takes most of the time."""
    whole = np.concatenate([np.asarray(columns, np.float64) for columns, _ in requests], axis=1)
    ends = np.cumsum([columns.shape[1] for columns, _ in requests])[:-1]
    drawn: list[list[npt.NDArray[np.float64]]] = [[] for _ in requests]
    for counts in resample_counts(len(whole), resamples, seed):
        parts = np.split(counts @ whole, ends, axis=1)
        for kept, part, (_, statistic) in zip(drawn, parts, requests, strict=True):
            kept.append(statistic(part))
    values = [float(statistic(np.asarray(columns, np.float64).sum(0))) for columns, statistic in requests]
    return [percentile_interval(value, np.concatenate(kept)) for value, kept in zip(values, drawn, strict=True)]


def percentile_interval(value: float, drawn: npt.NDArray[np.float64]) -> Estimate:
    """The middle 95 % of what the resamples gave.

    It holds the number itself, which a sum of absolute values, such as a calibration error, else need
    not: that grows with noise, and a resample is noisier.
    """
    drawn = drawn[~np.isnan(drawn)]
    if math.isnan(value) or not len(drawn):
        return Estimate(value, math.nan, math.nan)
    low, high = np.quantile(drawn, [(1 - CONFIDENCE_LEVEL) / 2, (1 + CONFIDENCE_LEVEL) / 2])
    return Estimate(value, min(float(low), value), max(float(high), value))


def resample_counts(count: int, resamples: int = RESAMPLES, seed: int = SEED) -> Iterator[npt.NDArray[np.float64]]:
    """B N, block after block: how often each image is in each resample. The same for the same seed."""
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
    """The share of `right` less that of `before`, image by image the same ones: N each.

    What both have right or wrong drops out, so it is known better than either share.
    """
    count = len(correct)
    up, down = int(np.sum(correct & ~before)), int(np.sum(before & ~correct))
    shares = np.array([up, down, count - up - down]) / count
    drawn = np.random.default_rng(seed).multinomial(count, shares, resamples)  # what N draws of images come to
    return percentile_interval((up - down) / count, (drawn[:, 0] - drawn[:, 1]) / count)


def mean_of_proportions(
    proportions: Sequence[tuple[float, int]], *, resamples: int = RESAMPLES, seed: int = SEED
) -> Estimate:
    """The mean of shares of separate sets of images, each given with its count; each set is drawn again by itself."""
    values, counts = (np.array(column) for column in zip(*proportions, strict=True))
    drawn = np.random.default_rng(seed).binomial(counts, values, (resamples, len(proportions))) / counts
    return percentile_interval(float(values.mean()), drawn.mean(1))


def bootstrap_map(
    truth: npt.NDArray[np.bool_], scores: Floats, value: float, *, resamples: int = RESAMPLES, seed: int = SEED
) -> Estimate:
    """Of `value`, the mean over classes of their average precisions: both N K.

    A class that a resample has no image of is left out of that one's mean.
    """
    count, classes = truth.shape
    resamples = int(min(resamples, max(MAX_AP_OPERATIONS / (count * classes), 100)))
    there = np.flatnonzero(truth.any(0))
    if not len(there) or np.isnan(scores).any():
        return Estimate(value, math.nan, math.nan)
    sorted_ = [_precision_steps(truth[:, k], scores[:, k]) for k in there]
    drawn = []
    for counts in resample_counts(count, resamples, seed):
        columns = np.ascontiguousarray(counts.T, np.float32)  # N B: images are put in order by whole rows
        each = np.stack([_resampled_precisions(columns, *one) for one in sorted_])  # K B
        known = ~np.isnan(each)
        drawn.append(np.where(known, each, 0).sum(0) / np.maximum(known.sum(0), 1))
    return percentile_interval(value, np.concatenate(drawn))


def _precision_steps(truth: npt.NDArray[np.bool_], score: Floats) -> tuple[Ints, Ints, Ints, Ints]:
    """Images by their scores, cut where the recall rises: order, first of each stretch; the same of the class alone.

    A stretch ends with a run of equal scores that holds an image of the class; what comes after the
    last one does not matter.
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
    """B: `scores.average_precision` of each resample, given as how often each image is in it, N B."""
    gained = np.add.reduceat(counts[own], own_starts, axis=0)
    seen = np.cumsum(np.add.reduceat(counts[order], starts, axis=0), axis=0)  # whole numbers: exact
    found = np.cumsum(gained, axis=0)
    with np.errstate(invalid="ignore"):
        return (gained * found / np.maximum(seen, 1)).sum(0) / found[-1]
