"""The figure of how cost grows: time and memory per image against each variable, on logarithmic axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from vitrail.bench.power_law import Sweep
from vitrail.explain.canvas import COLORS, FAINT, INK, QUIET, new_figure, set_title

MIN_SPAN = 4.0
"""Smallest ratio of the ends of a vertical axis."""
LABELS = {"ms": "ms per image", "memory_mb": "peak MB per image"}


def growth_chart(sweeps: Sequence[Sweep], environment: Mapping[str, Any]) -> Figure:
    """One column for each variable: the time above, the memory below. Dashed: FLOPs, through the last point."""
    sweeps = [sweep for sweep in sweeps if any(point.ms for point in sweep.points)]
    figure = new_figure(1.0 + 3.4 * max(len(sweeps), 1), 6.2)
    axes = figure.subplots(2, max(len(sweeps), 1), squeeze=False)
    for column, sweep in enumerate(sweeps):
        for line, quantity in enumerate(LABELS):
            _draw(axes[line][column], sweep, quantity)
    about = f"{environment['device']}, torch {environment['torch']}; dashed: proportional to FLOPs"
    subject = sweeps[0].title.partition(",")[0] if sweeps else ""
    set_title(figure, f"Cost of one image: {subject}", about)
    return figure


def _draw(ax: Axes, sweep: Sweep, quantity: str) -> None:
    points = [(p.value, getattr(p, quantity), p.gflops) for p in sweep.points if getattr(p, quantity)]
    x, y = [value for value, _, _ in points], [cost for _, cost, _ in points]
    if quantity == "ms":
        last = points[-1]
        ax.plot(x, [last[1] * flops / last[2] for _, _, flops in points], color=QUIET, linewidth=1, linestyle="--")
    ax.plot(x, y, color=COLORS[0], linewidth=1.8, marker="o", markersize=5)
    ax.set_xscale("log")
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    if high / low < MIN_SPAN:  # else small differences fill the panel
        middle = (low * high) ** 0.5
        ax.set_ylim(middle / MIN_SPAN**0.5, middle * MIN_SPAN**0.5)
    ax.set_xticks(x, [f"{value}" for value in x])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    overall, last_two = sweep.exponent(quantity), sweep.last_exponent(quantity)
    if overall is not None and last_two is not None:
        ax.set_title(f"exponent {overall:z.2f}; at the end {last_two:z.2f}", fontsize=9, color=INK, loc="left")
    ax.set_xlabel(f"{sweep.variable}{', px' * (sweep.variable == 'image size')}", color=INK, fontsize=9)
    ax.set_ylabel(LABELS[quantity], color=INK, fontsize=9)
    ax.grid(color=FAINT, linewidth=0.7)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_color(QUIET)
    ax.tick_params(labelsize=8.5, colors=INK)
