"""Writes an experiment's page, as HTML and as Markdown, from the same blocks."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path

from vitrail.config import TrainConfig
from vitrail.config.format_version import VERSION
from vitrail.explain.canvas import save
from vitrail.report.formatting import format_duration
from vitrail.report.markup import Markup, join, tag
from vitrail.reproduction.analysis import Analysis, Cell, Metric, Paragraph, Plot, Table
from vitrail.reproduction.experiment import Experiment
from vitrail.reproduction.results import Results, SeedMean
from vitrail.storage.atomic_write import write_json, write_text

OUTCOME_MARKS = {"holds": "✓", "does not hold": "✗", "undecided": "?"}


@dataclass(frozen=True, kw_only=True)
class PageInfo:
    """What a page states about the runs besides their results."""

    finished: int
    total: int
    """Number of runs in the experiment."""
    left_out: str | None
    command: str | None
    written: float
    """Time of writing, in seconds since the epoch."""


def write_page(out: Path, experiment: Experiment, results: Results, analysis: Analysis, info: PageInfo) -> None:
    """Write index.html, page.md, results.json and figures/ into the folder."""
    figures = {}
    for block in analysis.blocks:
        if isinstance(block, Plot):
            figures[block.name] = save(block.draw(), out / "figures" / f"{block.name}.png")
    about = list(_facts(experiment, results, info))
    write_text(out / "index.html", _html(experiment, results, analysis, about, figures), overwrite=True)
    write_text(out / "page.md", _markdown(experiment, results, analysis, about), overwrite=True)
    found = {
        "format_version": VERSION,
        "experiment": experiment.name,
        "scale": results.scale,
        "data": _first_config(results).data.source,
        "devices": results.devices,
        "seconds": results.seconds,
        "finished": info.finished,
        "total": info.total,
        "left_out": info.left_out,
        "command": info.command,
        "date": _date(info.written),
        "summary": analysis.summary,
        "verdicts": [asdict(verdict) for verdict in analysis.verdicts],
        "figures": list(figures),
        "trials": [asdict(results.trials[key]) for key in sorted(results.trials)],
    }
    write_json(out / "results.json", found, overwrite=True)


def _facts(experiment: Experiment, results: Results, info: PageInfo) -> Iterator[tuple[str, str]]:
    """Rows about how the numbers were made."""
    yield "Source", experiment.source
    yield "Scale", f"{results.scale}: {_first_config(results).data.source}, {_lengths(results)}"
    left_out = f"; left out: {info.left_out}" if info.left_out else ""
    yield "Runs", f"{info.finished} of {info.total}{left_out}"
    diverged = [key for key, trial in sorted(results.trials.items()) if trial.diverged]
    if diverged:
        yield "Diverged", f"{', '.join(diverged)}; they have no scores, and means are over the other seeds"
    searched = [arm for arm in results.arms.values() if arm.learning_rates]
    if searched:
        lists = dict.fromkeys(", ".join(f"{lr:g}" for lr in sorted(arm.learning_rates)) for arm in searched)
        at_edge = sum(results.selected_rate(arm.name) in (min(arm.rates), max(arm.rates)) for arm in searched)
        edge = f". {at_edge} of {len(searched)} arms use the smallest or the largest rate of their list: "
        edge += "one beyond may be better"
        yield (
            "Learning rates",
            f"each arm uses the best of {', or of '.join(lists)}, selected with seed 0 on training images that are "
            f"held out; the test images are used for the final number only{edge if at_edge else ''}",
        )
    yield (
        "Intervals",
        "95 %, Student's t over seeds, with the sampling error of the test images added to that of accuracies; Welch's "
        "between arms, where seeds vary by at least that error; with one seed, Wilson's interval of the images",
    )
    where = f", on {' and '.join(results.devices)}" if results.devices else ""
    yield "Time", f"{format_duration(results.seconds)} in all runs together{where}"
    yield "Versions", f"{' and '.join(results.versions)}, {_date(info.written)}".removeprefix(", ")
    if info.command:
        yield "Command", info.command


def _lengths(results: Results) -> str:
    """Duration and batch size of the runs: `10 to 50 epochs, batch size 256`."""
    configs = [arm.config for arm in results.arms.values()]
    durations = sorted({config.duration for config in configs}, key=lambda duration: (duration.unit, duration.count))
    batch_sizes = sorted({config.batch_size for config in configs}, key=lambda size: size if size != "auto" else 0)
    first, last = durations[0], durations[-1]
    one_unit = first != last and first.unit == last.unit
    shown = f"{first.count:g} to {last}" if one_unit else " or ".join(map(str, durations))
    return f"{shown}, batch size {' to '.join(str(size) for size in dict.fromkeys((batch_sizes[0], batch_sizes[-1])))}"


def _first_config(results: Results) -> TrainConfig:
    return next(iter(results.arms.values())).config


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))


def format_cell(cell: Cell, metric: Metric) -> str:
    """`97.31 (96.80 to 97.82)`; the mean alone without an interval."""
    if cell is None:
        return "–"
    if isinstance(cell, str):
        return cell
    value = metric.format(cell.value)
    return f"{value} ({metric.format(cell.low)} to {metric.format(cell.high)})" if cell.has_interval else value


def _html(
    experiment: Experiment,
    results: Results,
    analysis: Analysis,
    about: Sequence[tuple[str, str]],
    figures: dict[str, Path],
) -> str:
    style = files("vitrail.report").joinpath("style.css").read_text(encoding="utf-8")
    style += files("vitrail.reproduction").joinpath("experiment_page.css").read_text(encoding="utf-8")
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{experiment.title} · vitrail"),
        tag("style", Markup(style)),
    ]
    panes = [tag("i", cls=f"pane p{(7 * i + 3 * (i // 3)) % 5}") for i in range(9)]
    header = tag(
        "header",
        tag("p", tag("span", *panes, cls="window", aria_hidden="true"), "vitrail · reproduction", cls="brand"),
        tag("h1", experiment.title),
        tag("p", experiment.claim, cls="headline"),
        tag("p", experiment.source, cls="sub"),
    )
    verdicts = [
        tag(
            "li",
            tag("span", f"{OUTCOME_MARKS[v.outcome]} {v.outcome}", cls=f"outcome {v.outcome.replace(' ', '-')}"),
            tag("div", tag("b", v.claim), tag("p", v.reason)),
        )
        for v in analysis.verdicts
    ]
    summary = [tag("p", text, cls="prose") for text in (analysis.agreement, analysis.differences) if text]
    blocks = []
    for block in analysis.blocks:
        if isinstance(block, Plot):
            data = base64.b64encode(figures[block.name].read_bytes()).decode()
            image = tag("img", src=f"data:image/png;base64,{data}", alt=block.caption)
            blocks.append(tag("figure", tag("div", image, cls="plot"), tag("figcaption", block.caption, cls="caption")))
        elif isinstance(block, Table):
            blocks.append(_html_table(block))
        else:
            blocks.append(tag("p", block.text, cls="prose"))
    rows = [tag("tr", tag("th", name, scope="row"), tag("td", value)) for name, value in about]
    body = join(
        header,
        tag("section", tag("h2", "Verdict"), tag("ul", *verdicts, cls="verdicts"), *summary),
        tag("section", tag("h2", "Results"), *blocks),
        tag("section", tag("h2", "How this was measured"), tag("table", *rows, cls="about")),
        tag("footer", tag("p", "This file is self-contained; results.json beside it has all numbers.")),
    )
    html = tag("html", tag("head", *head), tag("body", body), lang="en")
    return f"<!doctype html>\n{html}\n"


def _html_table(table: Table) -> Markup:
    head = tag("tr", *(tag("th", name, scope="col") for name in table.columns))
    rows = []
    for row in table.rows:
        cells = []
        for i, cell in enumerate(row):
            if isinstance(cell, SeedMean):
                interval = None
                if cell.has_interval:
                    low, high = table.metric.format(cell.low), table.metric.format(cell.high)
                    interval = tag("span", f"{low} to {high}", cls="interval")
                cells.append(tag("td", tag("b", table.metric.format(cell.value)), " ", interval, cls="number"))
            else:
                cells.append(tag("th" if i == 0 else "td", cell or "–", scope="row" if i == 0 else None))
        rows.append(tag("tr", *cells))
    shown = tag("table", tag("thead", head), tag("tbody", *rows), cls="results")
    return join(tag("p", table.caption, cls="caption"), tag("div", shown, cls="wide"))


def _markdown(experiment: Experiment, results: Results, analysis: Analysis, about: Sequence[tuple[str, str]]) -> str:
    lines = [f"# {experiment.title}", "", f"> {experiment.claim}", ">", f"> {experiment.source}", ""]
    lines += ["| | claim | numbers |", "| --- | --- | --- |"]
    lines += [f"| **{v.outcome}** | {_escape(v.claim)} | {_escape(v.reason)} |" for v in analysis.verdicts]
    lines += ["", analysis.agreement, *(["", analysis.differences] if analysis.differences else [])]
    for block in analysis.blocks:
        lines.append("")
        if isinstance(block, Plot):
            lines += [f"![{block.caption}](figures/{block.name}.png)", "", f"*{block.caption}*"]
        elif isinstance(block, Paragraph):
            lines.append(block.text)
        else:
            lines += [
                block.caption,
                "",
                "| " + " | ".join(map(_escape, block.columns)) + " |",
                "| " + " | ".join("---" for _ in block.columns) + " |",
            ]
            lines += [
                "| " + " | ".join(_escape(format_cell(c, block.metric)) for c in row) + " |" for row in block.rows
            ]
    lines += ["", "## How this was measured", "", "| | |", "| --- | --- |"]
    lines += [f"| {name} | {_escape(value if name != 'Command' else f'`{value}`')} |" for name, value in about]
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
