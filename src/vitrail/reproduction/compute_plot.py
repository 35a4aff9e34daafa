"""A figure of accuracy over cost: FLOPs and seconds, with the Pareto front of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from vitrail.explain.canvas import COLORS, DASHES, FAINT, INK, QUIET, new_figure, set_title
from vitrail.reproduction.curves import pareto_front
from vitrail.reproduction.plots import MARKERS, outside_legend
from vitrail.reproduction.results import SeedMean


@dataclass(frozen=True)
class Group:
    """Arms that are connected by a line."""

    name: str
    arms: Sequence[str]
    color: int
    dash: int = 0


def compute_plot(
    groups: Sequence[Group],
    costs: Mapping[str, Mapping[str, float]],
    scores: Mapping[str, SeedMean],
    title: str,
    subtitle: str,
) -> Figure:
    """`costs`: label of an axis -> arm -> cost, a panel for each. Arms without a cost or a score stay empty."""
    figure = new_figure(2.6 + 3.6 * len(costs), 4.2)
    panels = figure.subplots(1, len(costs), sharey=True, squeeze=False)[0]
    for ax, (label, cost) in zip(panels, costs.items(), strict=True):
        front = pareto_front(cost, {arm: mean.value for arm, mean in scores.items()})
        if front:
            x, y = [cost[arm] for arm in front], [100 * scores[arm].value for arm in front]
            ax.plot(x, y, color=FAINT, linewidth=7, solid_capstyle="round", zorder=1, label="best for the cost")
        for group in groups:
            points = sorted(
                ((cost[arm], scores[arm]) for arm in group.arms if arm in cost and arm in scores),
                key=lambda point: point[0],
            )
            if not points:
                continue
            color = COLORS[group.color % len(COLORS)]
            for x0, mean in points:
                if mean.has_interval:
                    interval = [100 * max(mean.low, 0.0), 100 * min(mean.high, 1.0)]
                    ax.plot([x0, x0], interval, color=color, linewidth=4, alpha=0.25)
            ax.plot(
                [x0 for x0, _ in points], [100 * mean.value for _, mean in points], color=color, linewidth=1.6,
                linestyle=DASHES[group.dash % len(DASHES)], marker=MARKERS[group.color % len(MARKERS)], markersize=5,
                label=group.name,
            )  # fmt: skip
        if front:
            ax.set_xscale("log")
            ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
            ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
            ax.xaxis.set_minor_formatter(NullFormatter())
        ax.set_xlabel(label, color=INK)
        ax.grid(color=FAINT, linewidth=0.7)
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.spines["bottom"].set_color(QUIET)
        ax.tick_params(labelsize=9, colors=INK)
    panels[0].set_ylabel("test accuracy, %", color=INK)
    outside_legend(figure, panels[0])
    set_title(figure, title, subtitle)
    return figure
