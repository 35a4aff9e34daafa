"""Rows as tables: the cells that the command prints, and Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from vitrail.bench.measurement import Benchmark, Row


def _number(text: str) -> Callable[[Any], str]:
    return lambda value: "" if value is None else format(value, text)


def _rate(value: float | None) -> str:
    return "" if value is None else format(value, ",.0f" if value >= 100 else ".3g")


HEADINGS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "library": ("library", str),
    "version": ("version", str),
    "setting": ("setting", str),
    "precision": ("precision", str),
    "images_per_s": (
        "images/s",
        lambda value: "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}",
    ),
    "spread": ("spread", _number(".1%")),
    "step_ms": ("ms/step", _number(",.3g")),
    "ratio": ("ratio", _number(".2f")),
    "tflops": ("TFLOP/s", _number(".3g")),
    "share": ("share", _number(".0%")),
    "memory_gb": ("peak GB", _number(".2f")),
    "compile_s": ("compile s", _number(".1f")),
    "error": ("error", _number(".1e")),
    "top1": ("top-1", _number(".2%")),
    "cpu_ms": ("CPU ms/image", _number(".3g")),
    "status": ("", lambda value: "" if value == "ok" else value),
}
"""Column -> its heading, and the text of a value. The columns that name the group are in its title."""


def sort_rows(rows: Sequence[Row]) -> list[Row]:
    """The fastest first, then those without a result."""
    return sorted(rows, key=lambda row: -(row.images_per_s or 0))


def cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and lines of the table of a group, without empty columns."""
    columns = [
        name
        for name in HEADINGS
        if any(getattr(row, name) not in (None, "", "ok") for row in rows) or name == "library"
    ]
    lines = [[HEADINGS[name][1](getattr(row, name)) for name in columns] for row in sort_rows(rows)]
    return [HEADINGS[name][0] for name in columns], lines


def group_title(row: Row) -> str:
    mode = {"train": "training", "explain": "attention"}.get(row.mode, row.mode)
    return f"{row.model} {mode}, batch {row.batch_size}"


def by_group(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Title and rows of each group."""
    for title, group in groupby(rows, key=group_title):
        yield title, list(group)


def markdown(result: Benchmark, command: str) -> str:
    """All tables with the command, the machine, and what the columns mean."""
    about = ", ".join(str(value) for value in (result.environment["device"], f"torch {result.environment['torch']}"))
    parts = [f"`{command}`", about]
    for title, rows in by_group(result.rows):
        headings, lines = cells(rows)
        parts.append(f"## {title}")
        table = [headings, ["---"] * len(headings), *lines]
        parts.append("\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in table))
        if baseline := result.baselines.get(title):
            parts.append(f"ratio: to {baseline}")
    return "\n\n".join([*parts, LEGEND]) + "\n"


LEGEND = (
    "Medians over rounds in which all take turns. spread: highest minus lowest round, of the median. ratio: to the "
    "best other library whose outputs agree. TFLOP/s: with one FLOP count for all. share: of the rate of a large "
    "matrix product in the same precision and run. error: largest relative error of the outputs, and in training of "
    "the gradients, compared with the plain float32 network. compile s: of the first step."
)
