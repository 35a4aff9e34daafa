"""The report's figures as PNG files, for slides and papers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from vitrail.evaluation.scores import Scores
from vitrail.explain.canvas import COLORS, DASHES, FAINT, INK, new_figure, save
from vitrail.explain.overlays import Pixels, upscale
from vitrail.report.charts import Chart, downsample
from vitrail.report.report_data import ReportData


def draw_charts(charts: list[Chart], path: Path, title: str) -> None:
    """Draw charts side by side."""
    charts = [c for c in charts if c.visible_series]
    if not charts:
        return
    figure = new_figure(4.8 * len(charts), 3.6)
    for chart, ax in zip(charts, figure.subplots(1, len(charts), squeeze=False)[0], strict=True):
        for series in chart.visible_series:
            x, mean, low, high = downsample(series.curve)
            color = COLORS[series.color_index % len(COLORS)]
            style = {"linewidth": 1.2, "alpha": 0.6} if series.thin else {"linewidth": 2.2}
            if low is not mean:
                ax.fill_between(x, low, high, color=color, alpha=0.13, linewidth=0)
            dash = DASHES[series.color_index % len(DASHES)]
            ax.plot(x, mean, color=color, linestyle=dash, label=series.name, **style)
        if chart.log:
            ax.set_yscale("log")
        ax.yaxis.set_major_formatter(lambda value, _, form=chart.format_tick or chart.format_value: form(value))
        ax.set_title(chart.title, loc="left", color=INK, fontsize=11)
        ax.set_xlabel(chart.x_label, color=INK)
        ax.grid(axis="y", color=FAINT, linewidth=0.7)
        ax.spines[["top", "right", "left"]].set_visible(False)
        if len(chart.visible_series) > 1:
            ax.legend(frameon=False, fontsize=9)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=INK)
    save(figure, path)


def draw_confusion(report: ReportData, scores: Scores, path: Path) -> None:
    """Draw the confusion matrix, with each row colored by its fractions."""
    table = scores.confusion
    if table is None or not 2 <= len(table) <= 50:
        return
    size = 2.2 + 0.42 * len(table)
    figure = new_figure(size, size)
    names = [report.short_label(k) for k in range(len(table))]
    ax = draw_counts(figure, table, names, names)
    ax.set_title(f"{report.run.name}: confusion", loc="left", fontsize=11, color=INK)
    save(figure, path)


def draw_counts(figure: Figure, table: npt.NDArray[np.int64], rows: Sequence[str], columns: Sequence[str]) -> Axes:
    """Fill a figure with the counts of true classes (rows) by predicted classes (columns)."""
    ax = figure.subplots()
    shares = table / np.maximum(table.sum(1, keepdims=True), 1)
    ax.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for i, j in zip(*np.nonzero(table), strict=True):
        color = "white" if shares[i, j] > 0.5 else INK
        ax.text(j, i, f"{table[i, j]}", ha="center", va="center", fontsize=8, color=color)
    long = max(map(len, columns)) > 2
    ax.set_xticks(range(len(columns)), columns, rotation=45 if long else 0, ha="right" if long else "center")
    ax.set_yticks(range(len(rows)), rows)
    ax.tick_params(length=0, labelsize=8)
    ax.set_xlabel("predicted", color=INK)
    ax.set_ylabel("true", color=INK)
    ax.spines[:].set_visible(False)
    return ax


def save_image(pixels: Pixels, path: Path, min_size: int = 480) -> None:
    """Save an image as PNG on a white background, enlarged to at least `min_size` pixels."""
    image = Image.fromarray(upscale(pixels, min_size))
    if image.mode == "RGBA":
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image).convert("RGB")
    image.save(path, "png", optimize=True)
