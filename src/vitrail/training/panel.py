"""Renders the display of a run: the terminal panel, with rich's tables, and the plain lines.

A redraw of the panel takes 1.6 ms of the processor, in which the training thread cannot run Python; 4 redraws per
second cost 0.6 % of its time (`python benchmarks/panel.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vitrail.training.display_state import DisplayState

TWO_COLUMN_WIDTH = 66
"""Minimum width at which the panel has two columns."""
MAX_WIDTH = 96
LABEL_WIDTH = 15
BLOCKS = "▁▂▃▄▅▆▇█"

Span = tuple[str, str]
"""Text and its style."""
Row = tuple[str, list[Span]]
"""A label, and the text beside it."""


def render_panel(state: DisplayState, width: int) -> Panel:
    """The panel, `width` columns wide."""
    results, speed = _rows_table(_result_rows(state)), _rows_table(_speed_rows(state))
    body: RenderableType = Group(results, speed)
    if width >= TWO_COLUMN_WIDTH:
        body = Table.grid(expand=True, padding=(0, 1))
        body.add_column(ratio=9)
        body.add_column(ratio=7)
        body.add_row(results, speed)
    return Panel(
        Group(_progress_bar(state), _position_line(state, with_epoch=width >= TWO_COLUMN_WIDTH), "", body),
        title=_text(("vitrail", "bold"), (f" · {state.title}" if state.title else "", "")),
        subtitle=_text((state.subtitle, "dim")) if state.subtitle else None,
        title_align="left",
        subtitle_align="left",
        border_style="blue",
        width=width,
    )


def _text(*spans: Span) -> Text:
    return Text.assemble(*spans, no_wrap=True, overflow="ellipsis")


def _progress_bar(state: DisplayState) -> Table:
    total = max(state.total_steps, 1)
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(width=7, justify="right")
    percent = _text((f"{int(100 * min(state.step / total, 1.0))} %", "bold"))
    grid.add_row(ProgressBar(total, min(state.step, total), complete_style="blue", finished_style="blue"), percent)
    return grid


def _position_line(state: DisplayState, with_epoch: bool) -> Table:
    left = state.seconds_left
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1, justify="center")
    grid.add_column(justify="right")
    epoch = Text()
    if with_epoch and state.epoch is not None and state.total_epochs is not None:
        epoch = _text((f"epoch {state.epoch:.1f}", ""), (f" / {_format_count(state.total_epochs)}", "dim"))
    grid.add_row(
        _text((f"step {state.step:,}", ""), (f" / {state.total_steps:,}", "dim")),
        epoch,
        _text(
            (f"{format_time(state.elapsed_seconds)}  ", "dim"),
            (f"{format_time(left)} left" if left is not None else "", ""),
        ),
    )
    return grid


def _rows_table(rows: Iterable[Row]) -> Table:
    grid = Table.grid()
    grid.add_column(width=LABEL_WIDTH, no_wrap=True, style="dim")
    grid.add_column()
    for label, spans in rows:
        grid.add_row(label, _text(*spans))
    return grid


def _result_rows(state: DisplayState) -> list[Row]:
    values = state.values
    loss = f"{format_number(values.get('loss')):<10}"
    rows: list[Row] = [("loss", [(loss, "bold"), (sparkline(state.losses, 16), "blue")])]
    if values.get("accuracy") is not None:
        rows.append(("accuracy", [(f"{format_percent(values['accuracy']):<10}", ""), ("in training", "dim")]))
    if state.evaluation_progress is not None:
        rows.append(("evaluation", [(f"{100 * state.evaluation_progress:.0f} % done", "")]))
    if state.evaluation is not None:
        rows.append(("validation", _validation_spans(state.evaluation)))
        if state.best is not None:
            best = format_number(state.best[0]) if state.evaluation["name"] == "loss" else format_percent(state.best[0])
            rows.append(("best so far", [(f"{best:<10}", ""), (f"at step {state.best[1]:,}", "dim")]))
    return rows


def _validation_spans(scores: Mapping[str, Any]) -> list[Span]:
    value = scores.get(scores["name"])
    if scores["name"] == "loss":
        return [(f"{format_number(value):<10}", "bold green"), ("loss", "dim")]
    if scores["name"] == "map":
        return [(f"{format_percent(value):<10}", "bold green"), ("mAP", "dim")]
    interval = f"{100 * scores['low']:.2f} to {100 * scores['high']:.2f}" if scores.get("low") is not None else ""
    return [(f"{format_percent(value):<10}", "bold green"), (interval, "dim")]


def _speed_rows(state: DisplayState) -> list[Row]:
    values, rate = state.values, state.images_per_s
    rows: list[Row] = [
        ("images/s", [("–" if rate is None else f"{rate:,.0f}", "")]),
        ("learning rate", [(format_number(values.get("lr"), 3), "")]),
        ("gradient norm", [(format_number(values.get("grad_norm"), 3), "")]),
    ]
    if state.mfu is not None and state.peak_flops:
        used = [(f"{100 * state.mfu:.0f} %", ""), (f" of {format_flops(state.peak_flops)}", "dim")]
        rows.insert(1, ("MFU", used))
    memory = state.memory
    if memory is not None:
        rows.append(("memory", [(f"{memory[0]:.1f}", ""), (f" of {memory[1]:.0f} GB", "dim")]))
    return rows


def plain_step(state: DisplayState) -> str:
    """The line of a logged step."""
    values = state.values
    parts = [
        _format_position(state, state.step),
        f"loss {format_number(values.get('loss')):>8}",
        f"accuracy {format_percent(values['accuracy']):>7}" if values.get("accuracy") is not None else "",
        f"lr {format_number(values.get('lr'), 3):>8}",
        f"grad_norm {format_number(values.get('grad_norm'), 3):>7}" if values.get("grad_norm") is not None else "",
        *_speed_parts(state),
    ]
    return "  ".join(p for p in parts if p)


def plain_progress(state: DisplayState) -> str:
    """The line of a step that is not logged: position and speed."""
    return "  ".join(p for p in (_format_position(state, state.step), *_speed_parts(state)) if p)


def _speed_parts(state: DisplayState) -> tuple[str, ...]:
    return (
        f"images/s {state.images_per_s:>7,.0f}" if state.images_per_s else "",
        f"mfu {100 * state.mfu:>3.0f} %" if state.mfu is not None else "",
        f"eta {format_time(state.seconds_left)}" if state.seconds_left is not None else "",
    )


def plain_evaluation_progress(state: DisplayState) -> str:
    """The line of an evaluation in progress."""
    done = 100 * (state.evaluation_progress or 0)
    return f"{_format_position(state, state.step)}  evaluation {done:.0f} % done"


def plain_evaluation(state: DisplayState) -> str:
    """The line of a finished evaluation."""
    scores = state.evaluation
    assert scores is not None
    parts = [_format_position(state, scores["step"]), "evaluation (EMA)" if scores["ema"] else "evaluation"]
    if scores.get("map") is not None:
        parts.append(f"map {format_percent(scores['map'])}")
    if scores.get("top1") is not None:
        interval = (
            f" ({100 * scores['low']:.2f} to {100 * scores['high']:.2f})" if scores.get("low") is not None else ""
        )
        parts.append(f"top1 {format_percent(scores['top1'])}{interval}")
    if scores.get("top5") is not None and (state.num_classes is None or state.num_classes > 5):
        parts.append(f"top5 {format_percent(scores['top5'])}")
    parts.append(f"loss {format_number(scores.get('loss'))}")
    if state.best is not None and state.best[1] == scores["step"]:
        parts.append("best")
    return "  ".join(parts)


def _format_position(state: DisplayState, step: int) -> str:
    width = len(f"{state.total_steps:,}")
    position = f"step {step:>{width},}/{state.total_steps:,}"
    epoch = state.epoch_of(step)
    if epoch is not None and state.total_epochs:
        width = len(f"{state.total_epochs:.0f}") + 2
        position += f"  epoch {epoch:>{width}.1f}/{_format_count(state.total_epochs)}"
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
