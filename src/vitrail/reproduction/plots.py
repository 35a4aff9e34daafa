"""Figures of experiments: means with intervals as dots or lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vitrail.explain.canvas import COLORS, DASHES, FAINT, INK, QUIET, new_figure, set_title
from vitrail.reproduction.curves import mean_curve
from vitrail.reproduction.results import Results, SeedMean

MARKERS = ("o", "s", "^", "D", "v", "P")
LINE_COLORS = (*COLORS, INK)


@dataclass(frozen=True)
class Panel:
    """One pair of axes of a dot plot: a mean for each row."""

    title: str
    means: Mapping[str, SeedMean | None]
    """Row -> its mean; rows without one stay empty."""


def dot_plot(
    rows: Sequence[str],
    panels: Sequence[Panel],
    title: str,
    subtitle: str,
    groups: Mapping[str, int] | None = None,
) -> Figure:
    """One row for each arm and one panel for each metric, in percent; metrics without a value have no panel.

    groups: row -> index of its color.
    """
    panels = [panel for panel in panels if any(panel.means.values())] or panels[:1]
    figure = new_figure(3.0 + 2.9 * len(panels), 1.35 + 0.3 * len(rows))
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for ax, panel in zip(axes, panels, strict=True):
        for i, row in enumerate(rows):
            mean, color = panel.means.get(row), LINE_COLORS[(groups or {}).get(row, 0) % len(LINE_COLORS)]
            if mean is not None:
                if mean.has_interval:
                    ax.plot([100 * mean.low, 100 * mean.high], [i, i], color=color, linewidth=5, alpha=0.3)
                ax.plot(100 * mean.value, i, "o", color=color, markersize=6)
        ax.set_xlabel(panel.title, color=INK, fontsize=9)
        ax.grid(axis="x", color=FAINT, linewidth=0.7)
        _plain(ax)
        ax.tick_params(axis="y", length=0)
    axes[0].set_yticks(range(len(rows)), rows)
    axes[0].invert_yaxis()
    set_title(figure, title, subtitle)
    return figure


@dataclass(frozen=True)
class Line:
    """A line of a plot: x -> mean."""

    name: str
    points: Mapping[float, SeedMean]


def line_plot(
    lines: Sequence[Line],
    title: str,
    subtitle: str,
    x_label: str,
    y_label: str,
    *,
    log_x: bool = False,
    percent: bool = True,
    x_ticks: Sequence[float] = (),
    bands: bool = True,
) -> Figure:
    """Means over seeds with their intervals, as bands or, where those of many lines would overlap, as bars."""
    figure = new_figure(7.6, 4.0)
    ax = figure.subplots()
    factor, drawn = 100.0 if percent else 1.0, [line for line in lines if line.points]
    for i, line in enumerate(drawn):
        color, points = LINE_COLORS[i % len(LINE_COLORS)], sorted(line.points.items())
        x, y = [x for x, _ in points], [factor * mean.value for _, mean in points]
        low = [factor * (mean.low if mean.has_interval else mean.value) for _, mean in points]
        high = [factor * (mean.high if mean.has_interval else mean.value) for _, mean in points]
        if bands:
            ax.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
        else:
            ax.vlines(x, low, high, color=color, alpha=0.3, linewidth=4)
        dash, marker = DASHES[i % len(DASHES)], MARKERS[i % len(MARKERS)]
        ax.plot(x, y, color=color, linewidth=1.8, label=line.name, linestyle=dash, marker=marker, markersize=5)
    if log_x:
        ax.set_xscale("log")
    if x_ticks:
        ax.set_xticks(list(x_ticks), [f"{tick:g}" for tick in x_ticks])
        ax.minorticks_off()
    ax.set_xlabel(x_label, color=INK)
    ax.set_ylabel(y_label, color=INK)
    ax.grid(color=FAINT, linewidth=0.7)
    _plain(ax)
    outside_legend(figure, ax)
    set_title(figure, title, subtitle)
    return figure


def curve_plot(
    results: Results,
    arms: Mapping[str, Mapping[float, str]],
    title: str,
    x_label: str,
    metric: str = "test",
    y_label: str = "test accuracy, %",
) -> Figure:
    """A line of means over a logarithmic x for each name. arms: name of the line -> x -> arm."""
    lines = [Line(name, mean_curve(results, of_line, metric)) for name, of_line in arms.items()]
    ticks = sorted({x for of_line in arms.values() for x in of_line})
    return line_plot(lines, title, results.origin, x_label, y_label, log_x=True, x_ticks=ticks)


def outside_legend(figure: Figure, ax: Axes) -> None:
    """The names of the lines at the right of the axes, where they cover none."""
    handles, names = ax.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles, names, loc="outside right center", frameon=False, fontsize=9, labelcolor=INK, handlelength=3.2
        )


def _plain(ax: Axes) -> None:
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(labelsize=9, colors=INK)
    ax.spines["bottom"].set_color(QUIET)
