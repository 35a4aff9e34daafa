"""What an experiment found: verdicts, tables and figures, independent of how they are shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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

    def format(self, value: float) -> str:
        return f"{100 * value:.{self.digits}f}" if self.percent else f"{value:,.{self.digits}f}{self.unit}"


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

    @property
    def summary(self) -> str:
        """One line: how many claims hold, do not hold and are undecided."""
        counts = {outcome: sum(v.outcome == outcome for v in self.verdicts) for outcome in OUTCOMES}
        words = {"holds": ("holds", "hold"), "does not hold": ("does not hold", "do not hold")}
        parts = [f"{n} {words.get(outcome, (outcome,) * 2)[n > 1]}" for outcome, n in counts.items() if n]
        return ", ".join(parts) or "no result yet"


OUTCOMES: tuple[Outcome, ...] = ("holds", "does not hold", "undecided")


def compare(
    claim: str, difference: SeedMean | None, better: str, worse: str, *, why_not: str = "", margin: float = 0.0
) -> Verdict:
    """The verdict on "`better` is better than `worse`" by at least `margin`, from the difference of two arms.

    It holds if the interval of the difference lies above the margin, and does not hold if it lies below.
    """
    if difference is None:
        return Verdict(claim, "undecided", f"{better} or {worse} has no finished run.")
    points = f"{better} minus {worse}: {100 * difference.value:+.2f} points"
    if not difference.has_interval:
        return Verdict(claim, "undecided", f"{points} with one seed; more seeds give an interval.")
    reason = f"{points} ({100 * difference.low:+.2f} to {100 * difference.high:+.2f}, {difference.count} seeds)."
    if difference.low > margin:
        return Verdict(claim, "holds", reason)
    if difference.high < margin:
        return Verdict(claim, "does not hold", f"{reason} {why_not}".strip())
    return Verdict(claim, "undecided", f"{reason} The interval includes {100 * margin:g}.")


def similar(claim: str, results: Results, arms: Sequence[str], gap: float | None, *, why_not: str = "") -> Verdict:
    """The verdict on "these arms are alike": the best and the worst differ by at most a third of `gap`.

    It holds if the whole interval of their difference is at most that, and does not hold if all of it is more.
    gap: a difference that the source calls large, from the same runs.
    """
    means = {arm: results.mean(arm) for arm in arms}
    found = {arm: mean.value for arm, mean in means.items() if mean is not None}
    if len(found) < 2 or gap is None:
        return Verdict(claim, "undecided", "Too few of the runs are finished.")
    best, worst = max(found, key=lambda a: found[a]), min(found, key=lambda a: found[a])
    spread = results.difference(best, worst)
    limit = gap / 3
    if spread is None or gap <= 0:
        return Verdict(claim, "undecided", "These runs show no difference that theirs could be compared with.")
    points = f"{best} and {worst} differ by {100 * spread.value:.2f} points"
    compared = f"; a third of the difference they are compared with is {100 * limit:.2f}."
    if not spread.has_interval:
        return Verdict(claim, "undecided", f"{points} with one seed{compared}")
    reason = f"{points} ({100 * spread.low:+.2f} to {100 * spread.high:+.2f}){compared}"
    if spread.high <= limit:
        return Verdict(claim, "holds", reason)
    if spread.low > limit:
        return Verdict(claim, "does not hold", f"{reason} {why_not}".strip())
    return Verdict(claim, "undecided", reason)


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
