"""The bar chart of a benchmark: images per second of each library, a panel for each group."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vitrail.bench.measurement import Benchmark, Row
from vitrail.bench.result_tables import HEADINGS, by_group, sort_rows
from vitrail.explain.canvas import COLORS, FAINT, INK, QUIET, new_figure, set_title

PANELS_IN_ROW = 2


def speed_chart(result: Benchmark) -> Figure:
    """This package's bars are colored, the others' gray; whiskers span the rounds."""
    groups = [(title, drawn) for title, rows in by_group(result.rows) if (drawn := _drawn(rows))]
    columns = min(len(groups), PANELS_IN_ROW)
    lines = [groups[i : i + columns] for i in range(0, len(groups), columns)]
    heights = [max(len(rows) for _, rows in line) for line in lines]
    figure = new_figure(5.6 * columns, 0.7 + sum(0.75 + 0.28 * bars for bars in heights))
    axes = figure.subplots(len(lines), columns, squeeze=False, height_ratios=[2.7 + bars for bars in heights])
    for line, panels, bars in zip(lines, axes, heights, strict=True):
        for ax, (title, rows) in zip(panels, line, strict=False):
            _draw(ax, title, rows, bars)
        for ax in panels[len(line) :]:
            ax.set_axis_off()
    about = f"{result.environment['device']}, torch {result.environment['torch']}"
    set_title(
        figure, "Images per second", f"{about}; medians, lines from the lowest to the highest round, [ratio]; * differs"
    )
    return figure


def _drawn(rows: Sequence[Row]) -> list[Row]:
    return [row for row in sort_rows(rows) if row.measured]


def _draw(ax: Axes, title: str, rows: Sequence[Row], bars: int) -> None:
    """Bars are equally high in all panels of a line, which has room for `bars` of them."""
    for i, row in enumerate(rows):
        assert row.images_per_s is not None
        ax.barh(i, row.images_per_s, color=COLORS[0] if row.is_own else FAINT, height=0.72)
        ax.plot([min(row.rounds), max(row.rounds)], [i, i], color=INK, linewidth=1)
        ratio = f" [{row.ratio:.2f}]" if row.ratio is not None else ""
        text = f"{HEADINGS['images_per_s'][1](row.images_per_s)}{ratio}"
        ax.annotate(
            text, (max(row.rounds), i), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8.5, color=INK
        )
    ax.set_yticks(range(len(rows)), [_label(row) for row in rows])
    ax.set_ylim(bars - 0.4, -0.6)
    ax.set_xlim(0, 1.4 * max(max(row.rounds) for row in rows))
    ax.set_title(title, fontsize=10, color=INK, loc="left")
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_color(QUIET)
    ax.tick_params(labelsize=8.5, colors=INK)
    ax.tick_params(axis="y", length=0)


def _label(row: Row) -> str:
    short = row.setting.replace(", fused AdamW", "")
    differs = " *" if row.status.startswith("differs") else ""
    return f"{row.library}, {short}, {row.precision}{differs}"
