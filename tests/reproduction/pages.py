"""Read an experiment's page back, and recompute its numbers from the files of its trials.

page = read_html(folder)
assert page.tables == read_markdown(folder).tables
assert wrong_numbers(page, Trials(folder, arms)) == []
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from vitrail.reproduction.arm import Arm
from vitrail.reproduction.results import PROPORTIONS

NUMBER = r"[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"
ESTIMATE = re.compile(rf"({NUMBER})[^\d()]*\(({NUMBER})[^\d()]* to ({NUMBER})")
"""A value with its interval: `+2.00 points (+1.00 to +3.00, 3 seeds)`."""
DECIMAL = re.compile(r"[+-]?(?<![\w.])(?:\d[\d,]*\.\d+(?:e[+-]?\d+)?|\d+e[+-]\d+)")
TIMES = re.compile(
    rf"{NUMBER} \({NUMBER} to {NUMBER}\)(?= times)|^(?:at most |at least )?{NUMBER} \({NUMBER} to {NUMBER}\)$"
)
"""Ratios of amounts of data, which test_regularization checks."""
THIRD = re.compile(rf"a third of the difference that they are compared with \(({NUMBER})\)")
TITLES = {
    "test accuracy, %": "test",
    "test accuracy": "test",
    "validation accuracy, %": "validation",
    "5-shot accuracy, %": "5-shot",
    "after training, %": "test",
}
"""Titles of columns that mean the same metric in every experiment."""
FIELDS = ("test", "validation", "seconds", "images", "flops", "parameters")
FACTORS = (1.0, 100.0, 1e-3, 1e-6, 1e-12)
"""From stored numbers to shown ones: percentages, thousands, millions, 10^12."""

Values = npt.NDArray[np.float64]


@dataclass
class ShownTable:
    caption: str = ""
    columns: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)


@dataclass
class ShownPage:
    tables: list[ShownTable] = field(default_factory=list)
    verdicts: list[tuple[str, str, str]] = field(default_factory=list)
    """Outcome, claim and reason."""
    facts: dict[str, str] = field(default_factory=dict)


class _Reader(HTMLParser):
    """Collects the text of the elements that hold verdicts and tables."""

    def __init__(self) -> None:
        super().__init__()
        self.page, self.texts, self.kind, self.caption = ShownPage(), [""], "", ""
        self.cells: list[str] = []

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        css = dict(attributes).get("class") or ""
        if name in ("table", "ul"):
            self.kind = css
            if css == "results":
                self.page.tables.append(ShownTable(self.caption))
        if name in ("tr", "li"):
            self.cells = []
        if name in ("th", "td", "p", "b", "span", "section"):
            self.texts.append("")

    def handle_data(self, data: str) -> None:
        self.texts[-1] += data

    def handle_endtag(self, name: str) -> None:
        text = self.texts.pop() if name in ("th", "td", "p", "b", "span", "section") else ""
        if name in ("b", "span") and self.kind != "verdicts":
            self.texts[-1] += text
        elif name in ("th", "td", "b", "span", "p") and self.kind:
            self.cells.append(" ".join(text.split()))
        elif name == "p":
            self.caption = text
        elif name == "li":
            outcome, claim, reason = self.cells
            self.page.verdicts.append((outcome.partition(" ")[2], claim, reason))
        elif name == "tr" and self.kind == "results":
            table = self.page.tables[-1]
            if table.columns:
                table.rows.append(self.cells)
            else:
                table.columns = self.cells
        elif name == "tr":
            self.page.facts[self.cells[0]] = self.cells[1]
        elif name in ("table", "ul"):
            self.kind = ""


def read_html(folder: Path) -> ShownPage:
    reader = _Reader()
    reader.feed((folder / "index.html").read_text(encoding="utf-8"))
    return reader.page


def read_markdown(folder: Path) -> ShownPage:
    page = ShownPage()
    blocks = (folder / "page.md").read_text(encoding="utf-8").split("\n\n")
    tables = [(i, [_cells(line) for line in block.splitlines()]) for i, block in enumerate(blocks) if block[:1] == "|"]
    for i, (columns, _, *rows) in tables:
        assert all(len(row) == len(columns) for row in rows), columns
        if i == tables[0][0]:
            page.verdicts = [(outcome.strip("*"), claim, reason) for outcome, claim, reason in rows]
        elif i == tables[-1][0]:
            page.facts = {name: value.strip("`") for name, value in rows}
        else:
            page.tables.append(ShownTable(blocks[i - 1], columns, [[_plain(cell) for cell in row] for row in rows]))
    return page


def _cells(line: str) -> list[str]:
    cells = re.split(r"(?<!\\)\|", line)[1:-1]
    return [cell.strip().replace("\\|", "|") for cell in cells]


def _plain(cell: str) -> str:
    """A cell as the HTML has it, where the interval of a number has no parentheses."""
    return re.sub(r"\((\S.* to .*\S)\)$", r"\1", cell) if ESTIMATE.fullmatch(cell.removesuffix(")")) else cell


@dataclass(frozen=True)
class Pool:
    """Recomputed means with their intervals, which are NaN where there is none."""

    value: Values
    low: Values
    high: Values

    def has(self, texts: Sequence[str], factors: Iterable[float] = (1.0, 100.0)) -> bool:
        """Whether a shown value, alone or with its interval, is one of these to its last digit."""
        for factor in factors:
            found = np.ones(len(self.value), bool)
            for text, column in zip(texts, (self.value, self.low, self.high), strict=False):
                number, unit = _parse(text)
                found &= np.abs(factor * column - number) <= 0.5001 * unit + 1e-9 * abs(number)
            if found.any():
                return True
        return False


def _parse(text: str) -> tuple[float, float]:
    """A number and the value of its last digit."""
    mantissa, _, exponent = text.replace(",", "").partition("e")
    return float(text.replace(",", "")), 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))


def join_pools(pools: Sequence[Pool]) -> Pool:
    return Pool(*(np.concatenate([getattr(pool, name) for pool in pools]) for name in ("value", "low", "high")))


def estimate(values: Values) -> Pool:
    """Means over the last axis, the seeds, with Student's intervals; NaN for a missing seed."""
    values = np.atleast_2d(values)
    values = values[np.isfinite(values).any(1)]
    count = np.isfinite(values).sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.nansum(values, 1) / count
        deviation = np.sqrt(np.nansum((values - mean[:, None]) ** 2, 1) / (count - 1))
        half = np.where(count > 1, stats.t.ppf(0.975, np.maximum(count - 1, 1)) * deviation / np.sqrt(count), np.nan)
    return Pool(mean, mean - half, mean + half)


class Trials:
    """The files of an experiment's trials, and what can be computed from them."""

    def __init__(self, folder: Path, arms: Sequence[Arm]) -> None:
        self.folder, self.arms = folder / "trials", {arm.name: arm for arm in arms}
        self.found: list[dict[str, Any]] = [
            json.loads(path.read_text()) for path in sorted((folder / "trials").glob("*.json"))
        ]
        self.num_seeds = max((trial["seed"] for trial in self.found), default=0) + 1
        self.rates = {name: self._best_rate(arm) for name, arm in self.arms.items()}
        self.series: dict[tuple[str, str], Values] = {}
        """Arm and metric -> the value of each seed at the selected learning rate; NaN for a missing one."""
        for trial in self.found:
            if trial["lr"] == self.rates[trial["arm"]]:
                for metric, value in ({name: trial[name] for name in FIELDS} | trial["measures"]).items():
                    values = self.series.setdefault((trial["arm"], metric), np.full(self.num_seeds, np.nan))
                    values[trial["seed"]] = np.nan if value is None else value

    def _best_rate(self, arm: Arm) -> float | None:
        scores = {t["lr"]: t["validation"] or 0.0 for t in self.found if t["arm"] == arm.name and t["seed"] == 0}
        tried = [lr for lr in arm.learning_rates or (arm.config.optim.lr,) if lr in scores]
        return max(tried, key=scores.__getitem__) if tried else None

    def arrays(self, arm: str, seed: int) -> dict[str, npt.NDArray[Any]]:
        """The arrays of the trial of an arm at the selected learning rate; empty if there are none."""
        for trial in self.found:
            path = self.folder / trial["key"] / "arrays.npz"
            if (trial["arm"], trial["lr"], trial["seed"]) == (arm, self.rates[arm], seed) and path.exists():
                with np.load(path) as found:
                    return dict(found)
        return {}

    def num_images(self, arm: str, metric: str) -> int:
        """Number of images of which a metric is a proportion; 0 if it is none."""
        limit = next((most for name, most in PROPORTIONS.items() if metric.startswith(name)), 0)
        count = "validation_count" if metric == "validation" else "test_count"
        return min(max((t[count] for t in self.found if t["arm"] == arm), default=0), limit)

    def binomial(self, arm: str, metric: str) -> float:
        """Sampling variance of a proportion, with two correct and two wrong images more; 0 for other metrics."""
        count = self.num_images(arm, metric)
        correct = float(np.nanmean(self.series[arm, metric])) * count + 2
        return correct * (count + 4 - correct) / (count + 4) ** 3 if count else 0.0

    def mean(self, arm: str, metric: str) -> Pool:
        """The mean of an arm; with one seed, that of a proportion has Wilson's interval of its images."""
        values, count = self.series[arm, metric], self.num_images(arm, metric)
        found = estimate(values)
        if not count:
            return found
        if np.isfinite(values).sum() == 1:
            z, p = stats.norm.ppf(0.975), float(np.nanmean(values))
            center = (p + z**2 / (2 * count)) / (1 + z**2 / count)
            half = z * np.sqrt(p * (1 - p) / count + z**2 / (4 * count**2)) / (1 + z**2 / count)
            return Pool(found.value, np.array([max(center - half, 0)]), np.array([min(center + half, 1)]))
        half = np.sqrt((found.high - found.value) ** 2 + 3.8414588 * self.binomial(arm, metric))
        return Pool(found.value, np.maximum(found.value - half, 0.0), np.minimum(found.value + half, 1.0))

    @cached_property
    def names(self) -> list[tuple[str, str]]:
        return list(self.series)

    def combine(self, indices: Any, weights: Any, level: float = 0.95) -> Pool:
        """Weighted sums of means with Welch's intervals. indices: ... K series in `names`; weights: K."""
        indices, weights = np.asarray(indices), np.asarray(weights, float)
        if not indices.size:
            return EMPTY
        values = np.array([self.series[name] for name in self.names])
        least = np.array([self.binomial(*name) if np.isfinite(self.series[name]).any() else 0.0 for name in self.names])
        with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
            warnings.simplefilter("ignore", RuntimeWarning)  # of means and variances of nothing
            means, counts = np.nanmean(values, 1), np.isfinite(values).sum(1)
            variances = np.maximum(np.nanvar(values, 1, ddof=1), least) / counts
            value, parts = (weights * means[indices]).sum(-1), weights**2 * variances[indices]
            total, freedom = parts.sum(-1), counts[indices] - 1
            freedom = total**2 / (parts**2 / freedom).sum(-1)
            half = np.where(total == 0, 0.0, stats.t.ppf((1 + level) / 2, freedom) * np.sqrt(total))
            half = np.where(counts[indices].min(-1) > 1, half, np.nan)
        known = np.isfinite(value)
        return Pool(value[known], (value - half)[known], (value + half)[known])

    def contrast(self, weights: Mapping[str, float], level: float = 0.95) -> Pool:
        """The weighted sum of the test accuracies of arms."""
        if not all((arm, "test") in self.series for arm in weights):
            return EMPTY
        if self._share_parent(list(weights)):
            values = np.sum([weight * self.series[arm, "test"] for arm, weight in weights.items()], 0)
            return _paired(values, min(self.num_images(arm, "test") for arm in weights), level)
        return self.combine([[self.names.index((arm, "test")) for arm in weights]], list(weights.values()), level)

    def difference(self, arm: str, other: str, metric: str = "test") -> Pool:
        if self._share_parent([arm, other]):
            num_images = min(self.num_images(name, metric) for name in (arm, other))
            return _paired(self.series[arm, metric] - self.series[other, metric], num_images)
        return self.combine([[self.names.index((arm, metric)), self.names.index((other, metric))]], [1, -1])

    def change(self, arm: str, metric: str, reference: str) -> Pool:
        """The difference of two metrics of an arm, seed by seed."""
        return _paired(self.series[arm, metric] - self.series[arm, reference], self.num_images(arm, metric))

    def _share_parent(self, arms: Sequence[str]) -> bool:
        """Whether these arms are fine-tuned from the same model in every seed."""
        if len(set(arms)) < 2 or any(self.arms[arm].parent_setting != "init_from" for arm in arms):
            return False
        parents: dict[int, set[str]] = {}
        for trial in self.found:
            if trial["arm"] in arms and trial["lr"] == self.rates[trial["arm"]]:
                parents.setdefault(trial["seed"], set()).add(trial["parent"])
        return all(len(names) == 1 and "" not in names for names in parents.values())

    def means(self, arms: Collection[str]) -> Pool:
        """All metrics of these arms."""
        return join_pools([EMPTY, *(self.mean(arm, metric) for arm, metric in self.series if arm in arms)])

    @cached_property
    def differences(self) -> Pool:
        """All pairs of arms in one metric, and all pairs of metrics of one arm, seed by seed."""
        pairs = [
            (i, j)
            for i, one in enumerate(self.names)
            for j, other in enumerate(self.names)
            if i != j and one[1] == other[1]
        ]
        changes = [self.change(arm, one, other) for arm, one in self.names for a, other in self.names if a == arm]
        changes += [
            self.difference(one, other, metric)
            for one, metric in self.names
            for other, m in self.names
            if m == metric and self._share_parent([one, other])
        ]
        return join_pools([EMPTY, self.combine(pairs, [1, -1]), *changes])

    @cached_property
    def contrasts(self) -> Pool:
        """All differences of two differences of test accuracies."""
        tests = [i for i, (_, metric) in enumerate(self.names) if metric == "test"]
        return self.combine(np.array(np.meshgrid(tests, tests, tests, tests)).reshape(4, -1).T, [1, -1, -1, 1])

    @cached_property
    def single_values(self) -> Pool:
        """All stored numbers, their complements, and training FLOPs."""
        found = [v for values in self.series.values() for v in values]
        found += [value for trial in self.found for value in trial["measures"].values()]
        found += [3.0 * t["flops"] * t["images"] for t in self.found]
        found += [
            3.0 * np.nanmean(self.series[a, "flops"] * self.series[a, "images"]) for a, m in self.series if m == "test"
        ]
        found += [self.mean(arm, metric).value[0] for arm, metric in self.series]
        values = np.array(found)
        values = np.concatenate([values, 1 - values])
        return Pool(values, np.full_like(values, np.nan), np.full_like(values, np.nan))


def _paired(values: Values, num_images: int, level: float = 0.95) -> Pool:
    """Differences seed by seed; of proportions, each has at least the variance of the images that must differ."""
    mean, num_seeds = estimate(values).value, np.isfinite(values).sum()
    if num_seeds < 2:
        return Pool(mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan))
    least = np.maximum(np.abs(mean), 1 / num_images) / num_images if num_images else 0.0
    variance = np.maximum(np.nanvar(values, ddof=1), least)
    half = stats.t.ppf((1 + level) / 2, num_seeds - 1) * np.sqrt(variance / num_seeds)
    return Pool(mean, mean - half, mean + half)


NOTHING = np.zeros(0)
EMPTY = Pool(NOTHING, NOTHING, NOTHING)


def wrong_numbers(
    page: ShownPage, trials: Trials, constants: Collection[str] = (), extra: Mapping[str, Pool] | None = None
) -> list[str]:
    """Numbers of tables and of verdicts that are not those of the trials' files.

    constants: texts that do not depend on the results. extra: what one experiment computes besides means, differences
    and differences of these, by what it is.
    """
    pools = [trials.means(list(trials.arms)), trials.differences, *(extra or {}).values()]
    known = join_pools(pools)
    wrong = []
    for table in page.tables:
        for row in table.rows:
            arms = _arms_of_row(table.columns, row, trials.arms)
            for title, cell in zip(table.columns, row, strict=True):
                if cell not in constants and not _is_right(cell, title, arms, trials, known):
                    wrong.append(f"{table.caption} | {' '.join(row[:2])} | {title}: {cell}")
    known = join_pools([known, trials.contrasts])
    for _, _, reason in page.verdicts:
        wrong += [f"{reason}: {text}" for text in _wrong_in_reason(reason, trials, known, constants)]
    return wrong


def _arms_of_row(columns: Sequence[str], row: Sequence[str], arms: Mapping[str, Arm]) -> list[str]:
    """The arms that a row can be about, by its name or its factors; all if there are none."""
    if row[0] in arms:
        return [row[0]]
    factors = {name for arm in arms.values() for name in arm.factors}
    shown = {title: cell for title, cell in zip(columns, row, strict=True) if title in factors}
    found = [
        name
        for name, arm in arms.items()
        if shown and all(str(arm.factors.get(title, "–")) == cell for title, cell in shown.items())
    ]
    return found or list(arms)


def _is_right(cell: str, title: str, arms: Sequence[str], trials: Trials, known: Pool) -> bool:
    if title == "learning rate":
        return cell == "–" or cell in {f"{trials.rates[arm] or 0:g}" for arm in arms}
    shown = re.fullmatch(rf"({NUMBER})\D*?(?: ({NUMBER})\D*? to ({NUMBER})\D*)?", cell)
    if shown is None or TIMES.search(cell):
        return True
    texts = [text for text in shown.groups() if text is not None]
    if len(texts) == 1 and "." not in texts[0] and "," not in texts[0]:
        return trials.single_values.has(texts, FACTORS)
    if title.startswith("minus ") and (reference := title.removeprefix("minus ")) in trials.arms:
        return join_pools([trials.difference(arm, reference) for arm in arms]).has(texts)
    if title in TITLES:
        metric = TITLES[title]
        return join_pools([EMPTY, *(trials.mean(a, metric) for a in arms if (a, metric) in trials.series)]).has(texts)
    if len(arms) < len(trials.arms) and trials.means(arms).has(texts):
        return True
    return known.has(texts) or (len(texts) == 1 and trials.single_values.has(texts, FACTORS))


def _wrong_in_reason(reason: str, trials: Trials, known: Pool, constants: Collection[str]) -> list[str]:
    reason = TIMES.sub("", reason)
    wrong = [match[0] for match in ESTIMATE.finditer(reason) if not known.has(match.groups())]
    reason = ESTIMATE.sub("", reason)
    wrong += [m[0] for m in THIRD.finditer(reason) if not known.has([m[1]], (100 / 3,))]
    reason = THIRD.sub("", reason)
    for text in DECIMAL.findall(reason):
        if text not in constants and not known.has([text]) and not trials.single_values.has([text], FACTORS):
            wrong.append(text)
    return wrong
