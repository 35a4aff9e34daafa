"""Time and size of the report's charts as inline SVG, compared with matplotlib's SVG of the same curves.

    python benchmarks/charts.py [--rounds 9]

matplotlib writes text as text (`svg.fonttype: none`); its time excludes replacing its colors by those of the page's
style sheet, and its charts have no labels at the ends of the lines.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time

import matplotlib
import numpy as np

from vitrail.explain.canvas import COLORS, DASHES, FAINT, INK, new_figure
from vitrail.report.charts import Chart, Series, downsample, to_svg
from vitrail.report.formatting import format_number, format_percent

POINTS = 2000


def make_charts() -> list[Chart]:
    """Loss, accuracy, learning rate and speed of a run of 40 epochs."""
    rng, x, epochs = np.random.default_rng(0), np.arange(1, POINTS + 1) / 50, np.arange(1, 41.0)
    noise = rng.standard_normal(POINTS)
    loss = [
        Series("training", (x, (2.3 * np.exp(-x / 8) + 0.05) * np.exp(0.15 * noise)), thin=True),
        Series("validation", (epochs, 2.3 * np.exp(-epochs / 8) + 0.1)),
        Series("another run", (epochs, 2.3 * np.exp(-epochs / 9) + 0.12), color_index=1),
    ]
    accuracy = Series("validation", (epochs, 0.97 - 0.9 * np.exp(-epochs / 8)))
    return [
        Chart("Loss", tuple(loss), format_number, log=True),
        Chart("Accuracy", (accuracy,), format_percent, ceiling=1.0),
        Chart("Learning rate", (Series("", (x, 1e-3 * np.cos(x / 60))),), format_number, floor=0.0),
        Chart("Images per second", (Series("", (x, 5000 + 100 * noise)),), format_number, floor=0.0),
    ]


def matplotlib_svg(chart: Chart) -> str:
    figure, text = new_figure(5.8, 3.5), io.StringIO()
    ax = figure.subplots()
    for series in chart.visible_series:
        x, mean, low, high = downsample(series.curve)
        color = COLORS[series.color_index]
        if low is not mean:
            ax.fill_between(x, low, high, color=color, alpha=0.12, linewidth=0)
        ax.plot(x, mean, color=color, linestyle=DASHES[series.color_index], label=series.name)
    if chart.log:
        ax.set_yscale("log")
    ax.yaxis.set_major_formatter(lambda value, _: chart.format_value(value))
    ax.set_xlabel(chart.x_label, color=INK)
    ax.grid(axis="y", color=FAINT)
    ax.spines[["top", "right", "left"]].set_visible(False)
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(text, format="svg", transparent=True)
    return text.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds, charts = parser.parse_args().rounds, make_charts()
    times: dict[str, list[float]] = {"vitrail": [], "matplotlib": []}
    sizes = {}
    for _ in range(rounds):
        for name, draw in (("vitrail", to_svg), ("matplotlib", matplotlib_svg)):
            start = time.perf_counter()
            sizes[name] = sum(len(draw(chart)) for chart in charts)
            times[name].append(time.perf_counter() - start)
    for name, taken in times.items():
        print(f"{name:10} {1e3 * statistics.median(taken):.0f} ms, {sizes[name]:,} bytes for {len(charts)} charts")


if __name__ == "__main__":
    main()
