"""How a run's display looks: the panel, laid out by hand, and the plain lines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment

if TYPE_CHECKING:
    from vitrail.train.display import Display

TWO_COLUMNS = 66
"""From this width on the panel has two columns."""
WIDEST = 96
BORDER = "blue"
BLOCKS = "▁▂▃▄▅▆▇█"


class Drawn:
    """The panel, drawn anew from the numbers whenever it is asked for.

    Spans of text are laid out by hand: rich's own tables take ten times as long, and every
    millisecond here is one in which Python does not train.
    """

    def __init__(self, display: Display) -> None:
        self.display = display

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, WIDEST)
        for line in panel(self.display, width):
            for text, style in line:
                yield Segment(text, console.get_style(style) if style else None)
            yield Segment.line()

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)


Span = tuple[str, str]
"""Text and its style."""


def panel(display: Display, width: int) -> list[list[Span]]:
    """The whole panel, line by line, exactly `width` columns wide."""
    inside = width - 4
    lines = [_bar(display, inside), _pace(display, inside), []]
    results, machinery = _results(display), _machinery(display)
    if width >= TWO_COLUMNS:
        left = inside * 9 // 16
        for i in range(max(len(results), len(machinery))):
            pair = [side[i] if i < len(side) else [] for side in (results, machinery)]
            lines.append([*fit(pair[0], left - 1), (" ", ""), *fit(pair[1], inside - left)])
    else:
        lines += results + machinery
    title = [("─ ", BORDER), ("vitrail", "bold"), (f" · {display.title}" if display.title else "", ""), (" ", "")]
    footer = [("─ ", BORDER), (f"{display.subtitle} ", "dim")] if display.subtitle else []
    return [
        [("╭", BORDER), *fit(title, width - 2, "─"), ("╮", BORDER)],
        *([("│ ", BORDER), *fit(line, inside), (" │", BORDER)] for line in lines),
        [("╰", BORDER), *fit(footer, width - 2, "─"), ("╯", BORDER)],
    ]


def fit(line: list[Span], width: int, fill: str = " ") -> list[Span]:
    """Cut or filled to so many columns."""
    fitted: list[Span] = []
    for text, style in line:
        if (room := width - sum(cell_len(t) for t, _ in fitted)) <= 0:
            break
        fitted.append((text if cell_len(text) <= room else set_cell_size(text, room), style))
    rest = width - sum(cell_len(t) for t, _ in fitted)
    return [*fitted, (fill * rest, BORDER if fill != " " else "")] if rest else fitted


def _apart(width: int, *parts: list[Span]) -> list[Span]:
    """Left, (center,) right."""
    sizes = [sum(cell_len(t) for t, _ in part) for part in parts]
    if len(parts) == 2:
        return [*parts[0], (" " * max(width - sum(sizes), 1), ""), *parts[1]]
    before = max((width - sizes[1]) // 2 - sizes[0], 1)
    after = max(width - sum(sizes) - before, 1)
    return [*parts[0], (" " * before, ""), *parts[1], (" " * after, ""), *parts[2]]


def _bar(display: Display, width: int) -> list[Span]:
    share = min(display.seen.step / max(display.total, 1), 1.0)
    length = max(width - 7, 1)
    done = int(share * length)
    return [("━" * done, "blue"), ("━" * (length - done), "bright_black"), (f"  {int(100 * share):3d} %", "bold")]


def _pace(display: Display, width: int) -> list[Span]:
    now, left = display.clock() - display.seen.started, display.left
    epoch: list[Span] = []
    if display.epoch is not None and display.epochs is not None and width >= TWO_COLUMNS - 4:
        epoch = [(f"epoch {display.epoch:.1f}", ""), (f" / {_short(display.epochs)}", "dim")]
    return _apart(
        width,
        [(f"step {display.seen.step:,}", ""), (f" / {display.total:,}", "dim")],
        epoch,
        [(f"{clock(now)}  ", "dim"), (f"{clock(left)} left" if left is not None else "", "")],
    )


def _named(name: str, *spans: Span) -> list[Span]:
    return [(f"{name:<15}", "dim"), *spans]


def _results(display: Display) -> list[list[Span]]:
    values, seen = display.seen.values, display.seen
    lines = [_named("loss", (f"{number(values.get('loss')):<10}", "bold"), (sparkline(seen.losses, 16), "blue"))]
    if values.get("accuracy") is not None:
        lines.append(_named("accuracy", (f"{percent(values['accuracy']):<10}", ""), ("in training", "dim")))
    if seen.measuring is not None:
        lines.append(_named("evaluation", (f"{100 * seen.measuring:.0f} % done", "")))
    if seen.evaluation is not None:
        lines.append(_named("validation", *_validation(seen.evaluation)))
        if seen.best is not None:
            shown = number(seen.best[0]) if seen.evaluation["name"] == "loss" else percent(seen.best[0])
            lines.append(_named("best so far", (f"{shown:<10}", ""), (f"at step {seen.best[1]:,}", "dim")))
    return lines


def _validation(found: Mapping[str, Any]) -> list[Span]:
    value = found.get(found["name"])
    if found["name"] == "loss":
        return [(f"{number(value):<10}", "bold green"), ("loss", "dim")]
    if found["name"] == "map":
        return [(f"{percent(value):<10}", "bold green"), ("mAP", "dim")]
    interval = f"{100 * found['low']:.2f} to {100 * found['high']:.2f}" if found.get("low") is not None else ""
    return [(f"{percent(value):<10}", "bold green"), (interval, "dim")]


def _machinery(display: Display) -> list[list[Span]]:
    values, rate = display.seen.values, display.rate
    lines = [
        _named("images/s", ("–" if rate is None else f"{rate:,.0f}", "")),
        _named("learning rate", (number(values.get("lr"), 3), "")),
        _named("gradient norm", (number(values.get("grad_norm"), 3), "")),
    ]
    if display.share is not None and display.peak:
        used = (f"{100 * display.share:.0f} %", ""), (f" of {flops_words(display.peak)}", "dim")
        lines.insert(1, _named("device", *used))
    memory = display.memory
    if memory is not None:
        lines.append(_named("memory", (f"{memory[0]:.1f}", ""), (f" of {memory[1]:.0f} GB", "dim")))
    return lines


def plain_step(display: Display) -> str:
    """One logged step as a line."""
    values = display.seen.values
    parts = [
        _where(display, display.seen.step),
        f"loss {number(values.get('loss')):>8}",
        f"accuracy {percent(values['accuracy']):>7}" if values.get("accuracy") is not None else "",
        f"lr {number(values.get('lr'), 3):>8}",
        f"grad {number(values.get('grad_norm'), 3):>7}" if values.get("grad_norm") is not None else "",
        *_speed(display),
    ]
    return "  ".join(p for p in parts if p)


def plain_progress(display: Display) -> str:
    """A step that is not logged: where the run is, and how fast."""
    return "  ".join(p for p in (_where(display, display.seen.step), *_speed(display)) if p)


def _speed(display: Display) -> tuple[str, ...]:
    return (
        f"images/s {display.rate:>7,.0f}" if display.rate else "",
        f"peak {100 * display.share:>3.0f} %" if display.share is not None else "",
        f"left {clock(display.left)}" if display.left is not None else "",
    )


def plain_measuring(display: Display) -> str:
    """An evaluation under way."""
    return f"{_where(display, display.seen.step)}  evaluation {100 * (display.seen.measuring or 0):.0f} % done"


def plain_evaluation(display: Display) -> str:
    """One measurement as a line."""
    found = display.seen.evaluation
    assert found is not None
    parts = [_where(display, found["step"]), "evaluation of the average" if found["ema"] else "evaluation"]
    if found.get("map") is not None:
        parts.append(f"map {percent(found['map'])}")
    if found.get("top1") is not None:
        interval = f" ({100 * found['low']:.2f} to {100 * found['high']:.2f})" if found.get("low") is not None else ""
        parts.append(f"top1 {percent(found['top1'])}{interval}")
    if found.get("top5") is not None and (display.classes is None or display.classes > 5):
        parts.append(f"top5 {percent(found['top5'])}")
    parts.append(f"loss {number(found.get('loss'))}")
    if display.seen.best is not None and display.seen.best[1] == found["step"]:
        parts.append("best")
    return "  ".join(parts)


def _where(display: Display, step: int) -> str:
    width = len(f"{display.total:,}")
    where = f"step {step:>{width},}/{display.total:,}"
    if display.epoch_images and display.epochs:
        whole = len(f"{display.epochs:.0f}") + 2
        where += f"  epoch {step * display.images / display.epoch_images:>{whole}.1f}/{_short(display.epochs)}"
    return where


def sparkline(values: list[float], width: int) -> str:
    """The whole history in a few characters, each the mean of its share of it."""
    if len(values) < 2:
        return ""
    width = min(width, len(values))
    edges = [len(values) * i // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    span = high - low or 1.0
    return "".join(BLOCKS[round((m - low) / span * (len(BLOCKS) - 1))] for m in means)


def number(value: float | None, digits: int = 4) -> str:
    """1.2345, 0.02, 3.1e-05; a dash for none."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    return f"{value:.{digits - 1}e}" if value and not 1e-3 <= abs(value) < 1e5 else f"{value:#.{digits}g}".rstrip(".")


def _short(value: float) -> str:
    """40, 100.7."""
    return f"{value:.1f}".removesuffix(".0")


def percent(share: float | None) -> str:
    return "–" if share is None or not math.isfinite(share) else f"{100 * share:.2f} %"


def clock(seconds: float | None) -> str:
    """1:02:03, 4:05."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def flops_words(flops: float) -> str:
    """96 GFLOP/s, 793 TFLOP/s."""
    size, unit = next((s, u) for s, u in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (0.0, "")) if flops >= s)
    return f"{flops / size if size else flops:.3g} {unit}FLOP/s"
