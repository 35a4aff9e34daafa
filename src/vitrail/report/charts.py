"""Line charts as inline SVG, with light and dark colors from the page's style sheet and a label at each line's end.

matplotlib's SVG of the same four charts is 3 times as large and takes more than 8 times as long
(`python benchmarks/charts.py`); its colors would have to be replaced in its output to follow the style sheet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from vitrail.explain.label_text import unique_abbreviations
from vitrail.report.markup import Markup, join, tag
from vitrail.runs.run_record import Curve

Values = npt.NDArray[np.float64]

WIDTH, HEIGHT = 420, 250
LEFT, RIGHT, TOP, BOTTOM = 46, 110, 14, 34
MAX_POINTS = 160
"""Longer curves are averaged over this many intervals and drawn with a band from minimum to maximum."""
LABEL_HEIGHT = 27
"""Height of a line's label: its last value and name."""
MAX_NAME_LENGTH = 19
"""Characters of a curve's name."""


@dataclass(frozen=True)
class Series:
    """One curve."""

    name: str
    curve: Curve
    color_index: int = 0
    """Index of its run: 0 is the reported one."""
    thin: bool = False
    """Draw a thin line, so that evaluations stand out from training curves."""


@dataclass(frozen=True)
class Chart:
    """Curves on one pair of axes."""

    title: str
    series: tuple[Series, ...]
    format_value: Callable[[float], str]
    """Formats a value."""
    x_label: str = "epoch"
    floor: float | None = None
    """The vertical axis starts here or lower."""
    ceiling: float | None = None
    log: bool = False
    format_tick: Callable[[float], str] | None = None
    """Formats an axis tick, in few characters."""
    label_lines: bool = True
    """Whether to label lines with their names and last values."""

    @property
    def visible_series(self) -> tuple[Series, ...]:
        return tuple(s for s in self.series if len(s.curve[0]))


def needs_log_scale(curves: Sequence[Curve], spread: float = 30.0) -> bool:
    """Whether the range of values is so large that a linear axis would hide the small ones."""
    values = [y for _, ys in curves for y in ys.tolist()]
    return bool(values) and min(values) > 0 and max(values) / min(values) > spread


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from low to high, about `count` at most."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    base = 10.0 ** math.floor(math.log10(raw))
    step = next(m * base for m in (1, 2, 2.5, 5, 10) if m * base >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten; with 2 and 5, or 3, in between if there are few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks = (1,) if len(powers) > 4 else (1, 3) if len(powers) > 3 else (1, 2, 5)
    return [t for t in (m * 10.0**p for p in powers for m in marks) if low * 0.999 <= t <= high * 1.001]


def downsample(curve: Curve, max_points: int = MAX_POINTS) -> tuple[Values, Values, Values, Values]:
    """x, mean, minimum and maximum over `max_points` intervals; a short curve is returned as it is."""
    x, y = curve
    if len(x) <= max_points:
        return x, y, y, y
    edges = np.linspace(0, len(x), max_points + 1).astype(int)
    parts = [(x[a:b], y[a:b]) for a, b in pairwise(edges)]
    means = [(px.mean(), py.mean(), py.min(), py.max()) for px, py in parts]
    columns = np.array(means).T
    return columns[0], columns[1], columns[2], columns[3]


@dataclass(frozen=True)
class Axes:
    """Maps values to coordinates of the SVG."""

    x: tuple[float, float]
    y: tuple[float, float]
    log: bool

    def to_x(self, x: float) -> float:
        return LEFT + (x - self.x[0]) / (self.x[1] - self.x[0]) * (WIDTH - LEFT - RIGHT)

    def to_y(self, y: float) -> float:
        low, high, y = (math.log10(v) for v in (*self.y, y)) if self.log else (*self.y, y)
        return HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def axes_of(chart: Chart) -> Axes:
    xs = [float(v) for s in chart.visible_series for v in (s.curve[0][0], s.curve[0][-1])]
    ys = [float(v) for s in chart.visible_series for v in (s.curve[1].min(), s.curve[1].max())]
    left, right = min([0.0, *xs]), max(xs)
    low, high = min(ys), max(ys)
    if chart.log:
        low, high = low / 1.15, high * 1.15
    else:
        low = low if chart.floor is None else min(low, chart.floor)
        high = high if chart.ceiling is None else max(high, chart.ceiling)
        room = 0.05 * ((high - low) or abs(high) or 1.0)
        low -= 0 if low == chart.floor else room
        high += 0 if high == chart.ceiling else room
    return Axes((left, right if right > left else left + 1), (low, high), chart.log)


def to_svg(chart: Chart) -> Markup:
    """The chart as one inline SVG; empty if there is nothing to draw."""
    if not chart.visible_series:
        return Markup("")
    axes = axes_of(chart)
    ends = "; ".join(
        f"{s.name} ends at {chart.format_value(float(s.curve[1][-1]))}".strip() for s in chart.visible_series
    )
    return tag(
        "svg",
        tag("title", f"{chart.title}: {ends}"),
        _grid(chart, axes),
        *(_line(s, axes) for s in chart.visible_series),
        _line_labels(chart, axes),
        viewbox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        cls="chart",
    )


def _grid(chart: Chart, axes: Axes) -> Markup:
    parts = []
    for value in log_ticks(*axes.y) if axes.log else ticks(*axes.y):
        y = axes.to_y(value)
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, cls="grid"))
        parts.append(tag("text", (chart.format_tick or chart.format_value)(value), x=LEFT - 7, y=y + 4, cls="tick end"))
    base = HEIGHT - BOTTOM
    parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=base, y2=base, cls="axis"))
    for value in ticks(*axes.x, count=4):
        parts.append(tag("text", f"{value:,g}", x=axes.to_x(value), y=base + 17, cls="tick middle"))
    parts.append(tag("text", chart.x_label, x=WIDTH - RIGHT + 26, y=base + 17, cls="tick"))
    return tag("g", *parts)


def _line(series: Series, axes: Axes) -> Markup:
    x, mean, low, high = downsample(series.curve)
    across = [axes.to_x(v) for v in x]
    parts = []
    if low is not mean:
        upper = [(a, axes.to_y(v)) for a, v in zip(across, high, strict=True)]
        lower = [(a, axes.to_y(v)) for a, v in zip(across, low, strict=True)][::-1]
        parts.append(tag("path", d=_path(upper + lower) + "Z", cls="band"))
    points = [(a, axes.to_y(v)) for a, v in zip(across, mean, strict=True)]
    parts.append(tag("path", d=_path(points), cls="curve"))
    if len(points) == 1 or (not series.thin and len(points) <= 40):
        parts += [tag("circle", cx=a, cy=b, r=2.6) for a, b in points]
    return tag("g", *parts, cls=f"run{series.color_index % 5}{' quiet' if series.thin else ''}")


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)


def _line_labels(chart: Chart, axes: Axes) -> Markup:
    """Each line's last value and name next to its end, moved apart if they would overlap."""
    ends = [axes.to_y(float(downsample(s.curve)[1][-1])) for s in chart.visible_series]
    positions = spread_labels(ends, LABEL_HEIGHT, TOP + 4, HEIGHT - BOTTOM - 16)
    parts = []
    named = chart.visible_series if chart.label_lines else ()
    names = unique_abbreviations([series.name for series in named], MAX_NAME_LENGTH)
    for series, end, y, short_name in zip(named, ends, positions, names, strict=False):
        x = axes.to_x(float(series.curve[0][-1]))
        cls = f"run{series.color_index % 5}{' quiet' if series.thin else ''}"
        lead = tag("path", d=f"M{x + 4:.1f} {end:.1f}L{WIDTH - RIGHT + 8:.1f} {y:.1f}", cls="lead")
        value = tag("text", chart.format_value(float(series.curve[1][-1])), x=WIDTH - RIGHT + 12, y=y + 1, cls="value")
        name = tag("text", short_name, x=WIDTH - RIGHT + 12, y=y + 13, cls="name")
        parts.append(tag("g", lead, value, name, cls=cls))
    return join(*parts)


def spread_labels(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions in the same order, at least `gap` apart, within low and high, as close to the originals as possible."""
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    moved = [min(max(positions[i], low), high) for i in order]
    for i in range(1, len(moved)):
        moved[i] = max(moved[i], moved[i - 1] + gap)
    if moved and moved[-1] > high:  # push back up from the bottom
        moved[-1] = high
        for i in range(len(moved) - 2, -1, -1):
            moved[i] = min(moved[i], moved[i + 1] - gap)
    result = [0.0] * len(positions)
    for i, position in zip(order, moved, strict=True):
        result[i] = position
    return result
