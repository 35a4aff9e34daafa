"""Comparisons of two measurements of the same run, such as the trained model's with that of its initial weights."""

from __future__ import annotations

from vitrail.reproduction.analysis import Metric, Verdict
from vitrail.reproduction.results import Results, SeedMean, mean_over_seeds

PLAIN = Metric(percent=False)


def change_within(results: Results, arm: str, metric: str, reference: str) -> SeedMean | None:
    """The mean of `metric` minus `reference` over the seeds of an arm; None without a value of both."""
    if arm not in results.arms:
        return None
    after, before = results.values(arm, metric), results.values(arm, reference)
    common = sorted(set(after) & set(before))
    return mean_over_seeds([after[seed] - before[seed] for seed in common]) if common else None


def negated(mean: SeedMean | None) -> SeedMean | None:
    """The mean and interval of the same values with the opposite sign."""
    return None if mean is None else SeedMean(-mean.value, -mean.high, -mean.low, mean.count)


def exceeds(
    claim: str, mean: SeedMean | None, name: str, limit: float = 0.0, *, metric: Metric = PLAIN, why_not: str = ""
) -> Verdict:
    """The verdict on "`name` is above `limit`": it holds if the interval lies above, and does not if it lies below."""
    if mean is None:
        return Verdict(claim, "undecided", f"{name}: no finished run.")
    if not mean.has_interval:
        return Verdict(
            claim, "undecided", f"{name}: {metric.format(mean.value)} with one seed, which gives no interval."
        )
    interval = f"({metric.format(mean.low)} to {metric.format(mean.high)}, {mean.count} seeds)"
    asked = f"; above {metric.format(limit)} is asked" if limit else ""
    reason = f"{name}: {metric.format(mean.value)} {interval}{asked}"
    if mean.low > limit:
        return Verdict(claim, "holds", f"{reason}.")
    if mean.high < limit:
        return Verdict(claim, "does not hold", f"{reason}. {why_not}".strip())
    return Verdict(claim, "undecided", f"{reason}; the interval includes {metric.format(limit)}.")
