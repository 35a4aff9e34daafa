"""Renders the display of a run: the terminal panel and the plain lines."""

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
    from vitrail.training.display import Display

TWO_COLUMN_WIDTH = 66
"""Minimum width at which the panel has two columns."""
MAX_WIDTH = 96
BORDER = "blue"
BLOCKS = "▁▂▃▄▅▆▇█"


class PanelRenderable:
    """The panel as a rich renderable, built from the current state on every redraw.

    The text is laid out here: rich's tables take ten times as long, during which the training thread cannot run Python.
    """

    def __init__(self, display: Display) -> None:
        self.display = display

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, MAX_WIDTH)
        for line in panel_lines(self.display, width):
            for text, style in line:
                yield Segment(text, console.get_style(style) if style else None)
            yield Segment.line()

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)


Span = tuple[str, str]
"""Text and its style."""


def panel_lines(display: Display, width: int) -> list[list[Span]]:
    """The lines of the panel, each exactly `width` columns wide."""
    inside = width - 4
    lines = [_progress_bar(display, inside), _position_line(display, inside), []]
    results, speed = _result_rows(display), _speed_rows(display)
    if width >= TWO_COLUMN_WIDTH:
        left = inside * 9 // 16
        for i in range(max(len(results), len(speed))):
            pair = [side[i] if i < len(side) else [] for side in (results, speed)]
            lines.append([*fit_width(pair[0], left - 1), (" ", ""), *fit_width(pair[1], inside - left)])
    else:
        lines += results + speed
    title = [("─ ", BORDER), ("vitrail", "bold"), (f" · {display.title}" if display.title else "", ""), (" ", "")]
    footer = [("─ ", BORDER), (f"{display.subtitle} ", "dim")] if display.subtitle else []
    return [
        [("╭", BORDER), *fit_width(title, width - 2, "─"), ("╮", BORDER)],
        *([("│ ", BORDER), *fit_width(line, inside), (" │", BORDER)] for line in lines),
        [("╰", BORDER), *fit_width(footer, width - 2, "─"), ("╯", BORDER)],
    ]


def fit_width(line: list[Span], width: int, fill: str = " ") -> list[Span]:
    """Cut or pad a line to `width` columns."""
    fitted: list[Span] = []
    for text, style in line:
        if (room := width - sum(cell_len(t) for t, _ in fitted)) <= 0:
            break
        fitted.append((text if cell_len(text) <= room else set_cell_size(text, room), style))
    padding = width - sum(cell_len(t) for t, _ in fitted)
    return [*fitted, (fill * padding, BORDER if fill != " " else "")] if padding else fitted


def _justify(width: int, *parts: list[Span]) -> list[Span]:
    """Two or three parts: left-aligned, (centered,) right-aligned."""
    sizes = [sum(cell_len(t) for t, _ in part) for part in parts]
    if len(parts) == 2:
        return [*parts[0], (" " * max(width - sum(sizes), 1), ""), *parts[1]]
    before = max((width - sizes[1]) // 2 - sizes[0], 1)
    after = max(width - sum(sizes) - before, 1)
    return [*parts[0], (" " * before, ""), *parts[1], (" " * after, ""), *parts[2]]


def _progress_bar(display: Display, width: int) -> list[Span]:
    fraction = min(display.state.step / max(display.total_steps, 1), 1.0)
    length = max(width - 7, 1)
    done = int(fraction * length)
    return [("━" * done, "blue"), ("━" * (length - done), "bright_black"), (f"  {int(100 * fraction):3d} %", "bold")]


def _position_line(display: Display, width: int) -> list[Span]:
    now, left = display.clock() - display.state.started_at, display.seconds_left
    epoch: list[Span] = []
    if display.epoch is not None and display.total_epochs is not None and width >= TWO_COLUMN_WIDTH - 4:
        epoch = [(f"epoch {display.epoch:.1f}", ""), (f" / {_format_count(display.total_epochs)}", "dim")]
    return _justify(
        width,
        [(f"step {display.state.step:,}", ""), (f" / {display.total_steps:,}", "dim")],
        epoch,
        [(f"{format_time(now)}  ", "dim"), (f"{format_time(left)} left" if left is not None else "", "")],
    )


def _row(name: str, *spans: Span) -> list[Span]:
    return [(f"{name:<15}", "dim"), *spans]


def _result_rows(display: Display) -> list[list[Span]]:
    values, state = display.state.values, display.state
    lines = [_row("loss", (f"{format_number(values.get('loss')):<10}", "bold"), (sparkline(state.losses, 16), "blue"))]
    if values.get("accuracy") is not None:
        lines.append(_row("accuracy", (f"{format_percent(values['accuracy']):<10}", ""), ("in training", "dim")))
    if state.evaluation_progress is not None:
        lines.append(_row("evaluation", (f"{100 * state.evaluation_progress:.0f} % done", "")))
    if state.evaluation is not None:
        lines.append(_row("validation", *_validation_spans(state.evaluation)))
        if state.best is not None:
            best = format_number(state.best[0]) if state.evaluation["name"] == "loss" else format_percent(state.best[0])
            lines.append(_row("best so far", (f"{best:<10}", ""), (f"at step {state.best[1]:,}", "dim")))
    return lines


def _validation_spans(scores: Mapping[str, Any]) -> list[Span]:
    value = scores.get(scores["name"])
    if scores["name"] == "loss":
        return [(f"{format_number(value):<10}", "bold green"), ("loss", "dim")]
    if scores["name"] == "map":
        return [(f"{format_percent(value):<10}", "bold green"), ("mAP", "dim")]
    interval = f"{100 * scores['low']:.2f} to {100 * scores['high']:.2f}" if scores.get("low") is not None else ""
    return [(f"{format_percent(value):<10}", "bold green"), (interval, "dim")]


def _speed_rows(display: Display) -> list[list[Span]]:
    values, rate = display.state.values, display.images_per_s
    lines = [
        _row("images/s", ("–" if rate is None else f"{rate:,.0f}", "")),
        _row("learning rate", (format_number(values.get("lr"), 3), "")),
        _row("gradient norm", (format_number(values.get("grad_norm"), 3), "")),
    ]
    if display.mfu is not None and display.peak_flops:
        used = (f"{100 * display.mfu:.0f} %", ""), (f" of {format_flops(display.peak_flops)}", "dim")
        lines.insert(1, _row("MFU", *used))
    memory = display.memory
    if memory is not None:
        lines.append(_row("memory", (f"{memory[0]:.1f}", ""), (f" of {memory[1]:.0f} GB", "dim")))
    return lines


def plain_step(display: Display) -> str:
    """The line of a logged step."""
    values = display.state.values
    parts = [
        _format_position(display, display.state.step),
        f"loss {format_number(values.get('loss')):>8}",
        f"accuracy {format_percent(values['accuracy']):>7}" if values.get("accuracy") is not None else "",
        f"lr {format_number(values.get('lr'), 3):>8}",
        f"grad_norm {format_number(values.get('grad_norm'), 3):>7}" if values.get("grad_norm") is not None else "",
        *_speed_parts(display),
    ]
    return "  ".join(p for p in parts if p)


def plain_progress(display: Display) -> str:
    """The line of a step that is not logged: position and speed."""
    return "  ".join(p for p in (_format_position(display, display.state.step), *_speed_parts(display)) if p)


def _speed_parts(display: Display) -> tuple[str, ...]:
    return (
        f"images/s {display.images_per_s:>7,.0f}" if display.images_per_s else "",
        f"mfu {100 * display.mfu:>3.0f} %" if display.mfu is not None else "",
        f"eta {format_time(display.seconds_left)}" if display.seconds_left is not None else "",
    )


def plain_evaluation_progress(display: Display) -> str:
    """The line of an evaluation in progress."""
    done = 100 * (display.state.evaluation_progress or 0)
    return f"{_format_position(display, display.state.step)}  evaluation {done:.0f} % done"


def plain_evaluation(display: Display) -> str:
    """The line of a finished evaluation."""
    scores = display.state.evaluation
    assert scores is not None
    parts = [_format_position(display, scores["step"]), "evaluation (EMA)" if scores["ema"] else "evaluation"]
    if scores.get("map") is not None:
        parts.append(f"map {format_percent(scores['map'])}")
    if scores.get("top1") is not None:
        interval = (
            f" ({100 * scores['low']:.2f} to {100 * scores['high']:.2f})" if scores.get("low") is not None else ""
        )
        parts.append(f"top1 {format_percent(scores['top1'])}{interval}")
    if scores.get("top5") is not None and (display.num_classes is None or display.num_classes > 5):
        parts.append(f"top5 {format_percent(scores['top5'])}")
    parts.append(f"loss {format_number(scores.get('loss'))}")
    if display.state.best is not None and display.state.best[1] == scores["step"]:
        parts.append("best")
    return "  ".join(parts)


def _format_position(display: Display, step: int) -> str:
    width = len(f"{display.total_steps:,}")
    position = f"step {step:>{width},}/{display.total_steps:,}"
    if display.images_per_epoch and display.total_epochs:
        width = len(f"{display.total_epochs:.0f}") + 2
        epoch = step * display.images_per_step / display.images_per_epoch
        position += f"  epoch {epoch:>{width}.1f}/{_format_count(display.total_epochs)}"
    return position


def sparkline(values: list[float], width: int) -> str:
    """`values` as at most `width` block characters, each the mean of a slice."""
    if len(values) < 2:
        return ""
    width = min(width, len(values))
    edges = [len(values) * i // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    span = high - low or 1.0
    return "".join(BLOCKS[round((m - low) / span * (len(BLOCKS) - 1))] for m in means)


def format_number(value: float | None, digits: int = 4) -> str:
    """Such as 1.234, 0.0200, 3.100e-05; a dash for None."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    return f"{value:.{digits - 1}e}" if value and not 1e-3 <= abs(value) < 1e5 else f"{value:#.{digits}g}".rstrip(".")


def _format_count(value: float) -> str:
    """Such as 40 or 100.7."""
    return f"{value:.1f}".removesuffix(".0")


def format_percent(fraction: float | None) -> str:
    return "–" if fraction is None or not math.isfinite(fraction) else f"{100 * fraction:.2f} %"


def format_time(seconds: float | None) -> str:
    """Such as 1:02:03 or 4:05."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    minutes, whole_seconds = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{whole_seconds:02d}" if hours else f"{minutes}:{whole_seconds:02d}"


def format_flops(flops: float) -> str:
    """Such as 96 GFLOP/s or 793 TFLOP/s."""
    size, unit = next((s, u) for s, u in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (0.0, "")) if flops >= s)
    return f"{flops / size if size else flops:.3g} {unit}FLOP/s"
