"""What an experiment found: verdicts, tables and figures, independent of how they are shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Literal

from matplotlib.figure import Figure

from vitrail.reproduction.results import Results, SeedMean

Outcome = Literal["holds", "does not hold", "undecided"]


@dataclass(frozen=True)
class Verdict:
    """Whether the results agree with one claim."""

    claim: str
    outcome: Outcome
    reason: str
    """The numbers that decide it, and, if it does not hold, why that may be."""


@dataclass(frozen=True)
class Metric:
    """How a number is shown: accuracies as percentages, others with a unit."""

    percent: bool = True
    digits: int = 2
    unit: str = ""
    signed: bool = False

    def number(self, value: float) -> str:
        return f"{100 * value if self.percent else value:{'+' * self.signed},.{self.digits}f}"

    def format(self, value: float) -> str:
        return f"{self.number(value)}{self.unit}"


POINTS = Metric(unit=" points", signed=True)
"""Differences of accuracies."""
PERCENT = Metric(unit=" %")
PLAIN = Metric(percent=False)


Cell = str | SeedMean | None
"""Text, a mean with its interval, or an empty cell."""


@dataclass(frozen=True)
class Table:
    """A table; its numbers are means over seeds with 95 % intervals."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    metric: Metric = Metric()


@dataclass(frozen=True)
class Plot:
    """A figure, which is drawn when the page is written."""

    name: str
    """File name without its extension."""
    caption: str
    draw: Callable[[], Figure]


@dataclass(frozen=True)
class Paragraph:
    """Plain text."""

    text: str


Block = Table | Plot | Paragraph


@dataclass(frozen=True)
class Analysis:
    """The content of an experiment's page, below the claim."""

    verdicts: Sequence[Verdict]
    blocks: Sequence[Block]
    """The first plot is the one that the overview shows."""
    differences: str = ""
    """How these runs differ from the source's, which may be why results do."""

    @property
    def summary(self) -> str:
        """One line: how many claims hold, do not hold and are undecided."""
        counts = {outcome: sum(v.outcome == outcome for v in self.verdicts) for outcome in OUTCOMES}
        words = {"holds": ("holds", "hold"), "does not hold": ("does not hold", "do not hold")}
        parts = [f"{n} {words.get(outcome, (outcome,) * 2)[n > 1]}" for outcome, n in counts.items() if n]
        return ", ".join(parts) or "no result yet"

    @property
    def agreement(self) -> str:
        """Which claims agree with the source and which do not, in plain sentences."""
        claims = {outcome: [v.claim.rstrip(".") for v in self.verdicts if v.outcome == outcome] for outcome in OUTCOMES}
        count = len(claims["holds"])
        found = [f"{count} of {len(self.verdicts)} claims {'agrees' if count == 1 else 'agree'} with the source."]
        if claims["does not hold"]:
            found.append(f"These do not: {_quoted(claims['does not hold'])}.")
        if claims["undecided"]:
            found.append(f"These runs do not decide: {_quoted(claims['undecided'])}.")
        return " ".join(found)


def _quoted(texts: Sequence[str]) -> str:
    return "; ".join(f"“{text}”" for text in texts)


OUTCOMES: tuple[Outcome, ...] = ("holds", "does not hold", "undecided")


def judge(
    claim: str,
    mean: SeedMean | None,
    name: str,
    *,
    above: float = -math.inf,
    below: float = math.inf,
    metric: Metric = POINTS,
    why_not: str = "",
) -> Verdict:
    """The verdict on "`name` lies between `above` and `below`".

    It holds if the whole interval does, and does not hold if the whole interval lies outside.
    """
    if mean is None:
        return Verdict(claim, "undecided", f"{name}: too few of the runs are finished.")
    if not mean.has_interval:
        return Verdict(claim, "undecided", f"{name}: {metric.format(mean.value)} with one seed, without an interval.")
    seeds = f"{mean.count} seed{'s' * (mean.count != 1)}"
    reason = f"{name}: {metric.format(mean.value)} ({metric.number(mean.low)} to {metric.number(mean.high)}, {seeds})"
    limits = [(word, limit) for word, limit in (("above", above), ("below", below)) if math.isfinite(limit)]
    if any(limit for _, limit in limits):
        reason += f"; the claim is {' and '.join(f'{word} {metric.number(limit)}' for word, limit in limits)}"
    if mean.low > above and mean.high < below:
        return Verdict(claim, "holds", f"{reason}.")
    if mean.high < above or mean.low > below:
        return Verdict(claim, "does not hold", f"{reason}. {why_not}".strip())
    included = [metric.number(limit).lstrip("+") for _, limit in limits if mean.low <= limit <= mean.high]
    return Verdict(claim, "undecided", f"{reason}; the interval includes {' and '.join(included)}.")


def compare(claim: str, difference: SeedMean | None, better: str, worse: str, *, why_not: str = "") -> Verdict:
    """The verdict on "`better` is better than `worse`", from their difference."""
    return judge(claim, difference, f"{better} minus {worse}", above=0.0, why_not=why_not)


def shrinks(
    claim: str, results: Results, first: Sequence[str], last: Sequence[str], places: Sequence[str], *, why_not: str = ""
) -> Verdict:
    """The verdict on "the advantage of one arm over another is smaller in the `last` pair of arms than in the `first`".

    Without an advantage at first, it does not hold if the advantage grows, and is undecided otherwise.
    places: what the pairs are called, "at 10 %".
    """
    advantage = results.difference(*first)
    change = results.contrast({first[0]: 1.0, first[1]: -1.0, last[0]: -1.0, last[1]: 1.0})
    verdict = judge(claim, change, f"advantage {places[0]} minus advantage {places[1]}", above=0.0, why_not=why_not)
    if verdict.outcome == "does not hold" or advantage is None or not advantage.has_interval or advantage.low > 0:
        return verdict
    found = judge(claim, advantage, f"{first[0]} minus {first[1]}", above=0.0)
    return replace(found, outcome="undecided", reason=f"There is no certain advantage to shrink: {found.reason}")


def similar(
    claim: str, results: Results, arms: Sequence[str], large: Mapping[str, float], *, why_not: str = ""
) -> Verdict:
    """The verdict on "these arms are alike": any two differ by less than a third of a large difference.

    large: arm -> weight in a difference that the source calls large, from the same runs.

    Each pair has the interval of its difference less a third of the large one, so that the uncertainty of both counts.
    The claim holds if every pair's interval lies below zero: since all have to pass, this needs no correction. It does
    not hold if that of any pair lies above zero, at a level divided by the number of pairs (Bonferroni).
    """
    gap, found = results.contrast(large), [arm for arm in arms if results.values(arm)]
    if len(found) < 2 or gap is None:
        return Verdict(claim, "undecided", "Too few of the runs are finished.")
    if gap.value <= 0:
        return Verdict(claim, "undecided", "These runs show no difference that theirs could be compared with.")
    pairs = {(one, other): _less_a_third(one, other, large) for one, other in permutations(found, 2)}
    plain = {pair: results.contrast(weights) for pair, weights in pairs.items()}
    known = {pair: excess for pair, excess in plain.items() if excess is not None}
    (best, worst), excess = max(known.items(), key=lambda item: item[1].value)
    third, largest = gap.value / 3, excess.value + gap.value / 3
    reason = (
        f"The largest difference is “{best}” minus “{worst}”, {100 * largest:.2f} points; less a third of the "
        f"difference that they are compared with ({100 * third:.2f}), {POINTS.format(excess.value)}"
    )
    if not excess.has_interval:
        return Verdict(claim, "undecided", f"{reason} with one seed, without an interval.")
    num_pairs = len(pairs) // 2
    reason += f" ({POINTS.number(excess.low)} to {POINTS.number(excess.high)}, {excess.count} seeds)"
    if all(each.high < 0 for each in known.values()):
        if missing := [arm for arm in arms if arm not in found]:
            return Verdict(claim, "undecided", f"{reason}; not finished: {_quoted(missing)}.")
        return Verdict(claim, "holds", f"{reason}{', and below zero in all pairs' * (num_pairs > 1)}.")
    strict = [results.contrast(weights, confidence=1 - 0.05 / num_pairs) for weights in pairs.values()]
    if any(each.low > 0 for each in strict if each is not None):
        level = f", above zero at a level of 5 % / {num_pairs} pairs" if num_pairs > 1 else ""
        return Verdict(claim, "does not hold", f"{reason}{level}. {why_not}".strip())
    return Verdict(claim, "undecided", f"{reason}.")


def _less_a_third(one: str, other: str, large: Mapping[str, float]) -> dict[str, float]:
    """Weights of the difference of two arms less a third of the large difference."""
    weights = {arm: -weight / 3 for arm, weight in large.items()}
    for arm, weight in ((one, 1.0), (other, -1.0)):
        weights[arm] = weights.get(arm, 0.0) + weight
    return weights


def arm_table(
    results: Results,
    caption: str,
    metrics: Mapping[str, str],
    *,
    arms: Sequence[str] | None = None,
    reference: str | None = None,
    published: Mapping[str, Mapping[str, str]] | None = None,
) -> Table:
    """A row for each arm: its factors, learning rate, means of the metrics, difference from a reference arm.

    metrics: name of a metric -> column title. published: column title -> arm -> the source's own value, as text.
    """
    names = list(results.arms) if arms is None else list(arms)
    factors = list(dict.fromkeys(name for arm in names for name in results.arms[arm].factors))
    searched = any(results.arms[arm].learning_rates for arm in names)
    columns = [*factors, *(["learning rate"] if searched else []), *metrics.values()]
    columns += [f"minus {reference}"] if reference is not None else []
    columns += list(published or {})
    rows: list[list[Cell]] = []
    for arm in names:
        rate = results.selected_rate(arm)
        row: list[Cell] = [str(results.arms[arm].factors.get(name, "–")) for name in factors] or [arm]
        row += [f"{rate:g}" if rate is not None else None] if searched else []
        row += [results.mean(arm, metric) for metric in metrics]
        if reference is not None:
            row.append(results.difference(arm, reference) if arm != reference else None)
        row += [values.get(arm) for values in (published or {}).values()]
        rows.append(row)
    return Table(caption, columns if factors else ["", *columns], rows)
