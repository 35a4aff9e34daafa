"""The progress display: its texts, its cost, and its behavior beside other output."""

from __future__ import annotations

import io
import math
import re
import time

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console

from vitrail.evaluation import Scores
from vitrail.runtime import log, warn_once
from vitrail.runtime.peak_flops import measure_peak_flops
from vitrail.training.display import Display
from vitrail.training.display_state import MAX_LOSSES
from vitrail.training.panel import (
    format_flops,
    format_number,
    format_percent,
    format_time,
    render_panel,
    sparkline,
)


class FakeClock:
    """A clock that advances only when a test sets it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_display(terminal: bool = False, **options: object) -> tuple[Display, FakeClock, io.StringIO]:
    clock, output = FakeClock(), io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=100, color_system=None, highlight=False)
    values = {"images_per_epoch": 640, "title": "digits", "console": console, "clock": clock} | options
    return Display(1000, 64, **values), clock, output


def run_steps(display: Display, clock: FakeClock, steps: int = 100, seconds_per_step: float = 0.1) -> None:
    for step in range(1, steps + 1):
        clock.now += seconds_per_step
        loss = 2.3 * math.exp(-step / 30)
        display.update(step, {"loss": loss, "accuracy": 0.5, "lr": 1e-3, "grad_norm": 0.8} if step % 10 == 0 else None)


def panel_text(display: Display, width: int = 90) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(render_panel(display.state, width))
    return console.file.getvalue()


def test_images_per_second_follow_the_clock():
    display, clock, _ = make_display()
    with display:
        run_steps(display, clock)
    assert display.state.images_per_s == pytest.approx(640)
    assert "images/s       640" in panel_text(display)


def test_speed_is_smoothed_over_a_few_seconds():
    display, clock, _ = make_display()
    with display:
        run_steps(display, clock)
        clock.now += 0.2
        display.update(101)
        assert 600 < display.state.images_per_s < 640
        for step in range(102, 302):
            clock.now += 0.2
            display.update(step)
    assert display.state.images_per_s == pytest.approx(320, rel=0.02)


@pytest.mark.parametrize("interval", [1, 10])
def test_first_step_is_excluded_from_the_speed(interval: int):
    display, clock, _ = make_display()
    with display:
        clock.now += 60
        display.update(interval)
        clock.now += 0.1 * interval
        display.update(2 * interval)
        assert display.state.images_per_s == pytest.approx(640)


def test_evaluation_time_counts_for_time_left_but_not_for_speed():
    display, clock, _ = make_display()
    with display:
        run_steps(display, clock)
        before = display.state.seconds_left
        display.pause()
        clock.now += 10  # as long as training so far
        display.show_evaluation(100, {"top1": 0.9, "low": 0.8, "high": 0.95, "loss": 0.3, "count": 100})
        clock.now += 0.1
        display.update(101)
    assert display.state.images_per_s == pytest.approx(640)
    assert before == pytest.approx(90)
    assert display.state.seconds_left == pytest.approx(2 * 89.9, rel=0.02)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_evaluation_between_logged_steps_does_not_raise_the_speed(device: str):
    """Evaluation every 9 steps, logging every 10, 0.1 s per step; a GPU lags by one step until it is synchronized."""
    display, clock, _ = make_display(device=device)
    with display:
        for step in range(1, 101):
            clock.now += 0.1 if device == "cpu" or step % 9 != 1 or step == 1 else 0.0
            display.update(step)
            if step % 10 == 0:
                display.update(step, {"loss": 1.0})
            if step % 9 == 0:
                clock.now += 0.1 if device == "cuda" and step % 10 else 0.0  # the last step is synchronized
                display.show_evaluation_progress(0, 4)
                clock.now += 3
                display.show_evaluation_progress(3, 4)
                display.show_evaluation(step, {"top1": 0.9, "loss": 0.3})
            if step > 20:
                assert display.state.images_per_s == pytest.approx(640, rel=0.15), step
    assert display.state.paused_seconds == pytest.approx(33, rel=0.05)


def test_flops_above_the_peak_are_not_shown():
    """Such a value only shows that the measured peak is wrong."""
    display, clock, _ = make_display(flops_per_image=1e9, peak_flops=0.5e12)
    with display:
        run_steps(display, clock)
    assert display.state.images_per_s == pytest.approx(640)
    assert display.state.mfu is None
    assert "FLOP/s" not in panel_text(display)


def test_mfu_is_flops_per_second_over_peak():
    display, clock, _ = make_display(flops_per_image=1e9, peak_flops=1.28e12)
    with display:
        run_steps(display, clock)
    assert display.state.mfu == pytest.approx(640 * 1e9 / 1.28e12)
    assert "50 % of 1.28 TFLOP/s" in panel_text(display)


def test_panel_shows_all_values():
    display, clock, _ = make_display(subtitle="ViT, 0.2 M parameters")
    with display:
        run_steps(display, clock)
        display.show_evaluation(100, Scores(top1=0.975, top5=1.0, loss=0.1, count=360, low=0.953, high=0.987))
        display.show_evaluation(110, Scores(top1=0.97, top5=1.0, loss=0.1, count=360, low=0.95, high=0.98))
    text = panel_text(display)
    for part in ("digits", "10 %", "step 100 / 1,000", "epoch 10.0 / 100", "1:30 left", "ViT, 0.2 M parameters"):
        assert part in text, part
    assert re.search(r"loss +0\.08205 .*█.*▁", text)
    assert re.search(r"validation +97\.00 % +95\.00 to 98\.00", text)
    assert re.search(r"best so far +97\.50 % +at step 100", text)
    assert re.search(r"learning rate +0\.00100", text)
    assert re.search(r"gradient norm +0\.800", text)


@pytest.mark.parametrize("width", [30, 50, 66, 100, 200])
def test_every_line_has_the_panel_width(width: int):
    display, clock, _ = make_display(title="照片 of a long name" * 4)
    with display:
        run_steps(display, clock)
        display.show_evaluation(100, {"top1": 0.9, "low": 0.8, "high": 0.95, "loss": 0.3})
    text = panel_text(display, width)
    assert {cell_len(line) for line in text.splitlines()} == {width}
    assert len(text.splitlines()) == (9 if width >= 66 else 12)  # no line is wrapped


def test_panel_can_be_drawn_before_the_first_step():
    display, _, _ = make_display()
    with display:
        assert "step 0 / 1,000" in panel_text(display)


def test_best_is_the_lowest_loss_without_accuracy():
    display, clock, _ = make_display()
    with display:
        run_steps(display, clock)
        display.show_evaluation(50, {"top1": None, "loss": 0.5})
        display.show_evaluation(60, {"top1": None, "loss": 0.4})
        display.show_evaluation(70, {"top1": None, "loss": 0.6})
    assert display.state.best == (0.4, 60)
    assert re.search(r"best so far +0\.4000 +at step 60", panel_text(display))


def test_multi_label_evaluation_shows_mean_average_precision():
    display, clock, _ = make_display()
    with display:
        run_steps(display, clock)
        display.show_evaluation(50, {"top1": 0.9, "map": 0.6, "low": 0.8, "high": 1.0, "loss": 0.5})
    assert re.search(r"validation +60\.00 % +mAP", panel_text(display))


def test_notes_are_printed_above_the_panel_on_a_terminal():
    display, clock, output = make_display(terminal=True)
    with display:
        run_steps(display, clock)
        display.note("a checkpoint was written")
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.getvalue()).split()
    assert "written" in lines
    assert lines[-1].endswith("╯")


def test_plain_lines_are_printed_without_a_terminal():
    display, clock, output = make_display()
    with display:
        run_steps(display, clock, steps=100, seconds_per_step=0.125)  # one logged step every 1.25 s
        display.note("a note")
        display.show_evaluation(100, {"top1": 0.9, "top5": 0.99, "low": 0.8, "high": 0.95, "loss": 0.3, "count": 100})
    lines = output.getvalue().splitlines()
    steps = [line for line in lines if " lr " in line]
    assert len(steps) == 5
    assert "\x1b" not in output.getvalue()
    assert re.fullmatch(
        r"step +10/1,000  epoch +1\.0/100  loss +1\.648  accuracy 50\.00 %  lr +0\.00100  grad_norm +0\.800  "
        r"images/s +512  eta 2:04",
        steps[0],
    )
    assert len({line.index(" lr ") for line in steps}) == 1  # aligned
    assert lines[-2] == "a note"
    assert lines[-1].endswith("evaluation  top1 90.00 % (80.00 to 95.00)  top5 99.00 %  loss 0.3000  best")


def test_progress_is_printed_regularly_even_if_logging_is_rare():
    display, clock, output = make_display()
    with display:
        for step in range(1, 101):
            clock.now += 0.5
            display.update(step)
    lines = output.getvalue().splitlines()
    assert len(lines) == 10  # in 50 s
    assert re.fullmatch(r"step +20/1,000  epoch +2\.0/100  images/s +128  eta 8:10", lines[1])


def test_logged_step_is_printed_exactly_once():
    display, clock, output = make_display()
    with display:
        for step in range(991, 1001):
            clock.now += 2
            display.update(step)
            display.show_evaluation(step, {"top1": 0.9, "loss": 0.3})
            if step % 5 == 0:
                display.update(step, {"loss": 0.5, "lr": 0.1})
    lines = [line for line in output.getvalue().splitlines() if "evaluation" not in line]
    assert [line.partition("/")[0] for line in lines] == ["step   995", "step 1,000"]


def test_lines_of_a_long_run_are_a_minute_apart():
    display, clock, output = make_display()
    with display:
        clock.now += 7200
        display.update(1)
        for step in range(2, 302):
            clock.now += 1
            display.update(step)
    assert len(output.getvalue().splitlines()) == 6


def test_evaluation_progress_is_shown():
    display, clock, output = make_display()
    with display:
        run_steps(display, clock, 20)
        for done in range(10):
            display.show_evaluation_progress(done, 10)
            clock.now += 3
        assert re.search(r"evaluation +90 % done", panel_text(display))
        display.show_evaluation(20, {"top1": 0.9, "loss": 0.3})
        assert "% done" not in panel_text(display)
    lines = [line for line in output.getvalue().splitlines() if "% done" in line]
    assert lines[0] == "step    20/1,000  epoch   2.0/100  evaluation 20 % done"
    assert len(lines) == 4


@pytest.mark.parametrize(("num_classes", "top5_shown"), [(3, False), (5, False), (6, True), (None, True)])
def test_top5_is_shown_only_with_more_than_five_classes(num_classes: int | None, top5_shown: bool):
    display, _, output = make_display(num_classes=num_classes)
    with display:
        display.show_evaluation(100, Scores(top1=0.9, top5=1.0, loss=0.1, count=360, low=0.8, high=0.95))
    assert ("top5 100.00 %" in output.getvalue()) == top5_shown
    assert "top5" not in panel_text(display)


def test_last_step_is_always_printed():
    display, clock, output = make_display()
    with display:
        clock.now += 0.1
        display.update(999, {"loss": 1.0, "lr": 0.1})
        clock.now += 0.1
        display.update(1000, {"loss": 0.5, "lr": 0.1})
    assert "step 1,000/1,000" in output.getvalue().splitlines()[-1]


def test_nan_loss_is_shown():
    display, clock, _ = make_display()
    with display:
        run_steps(display, clock)
        display.update(101, {"loss": math.nan, "lr": 1e-3})
    assert re.search(r"loss +nan", panel_text(display))


def test_loss_history_is_thinned_over_the_whole_run():
    display, clock, _ = make_display()
    with display:
        for step in range(1, 10_001):
            clock.now += 0.01
            display.update(step, {"loss": 1.0 - step / 10_000})
    assert len(display.state.losses) < MAX_LOSSES
    assert display.state.losses == sorted(display.state.losses, reverse=True)
    assert sparkline(display.state.losses, 8) == "█▇▆▅▄▃▂▁"


def test_update_takes_under_50_microseconds():
    display, _, _ = make_display(terminal=True, clock=time.monotonic)
    values = {"loss": 1.0, "accuracy": 0.5, "lr": 1e-3, "grad_norm": 0.8}
    with display:
        best = math.inf
        for _ in range(5):
            start = time.perf_counter()
            for step in range(1000):
                display.update(step, values)
            best = min(best, time.perf_counter() - start)
    assert best / 1000 < 50e-6


def test_drawing_the_panel_takes_under_5_milliseconds():
    display, clock, _ = make_display()
    with display:
        run_steps(display, clock)
    durations = []
    for _ in range(5):
        start = time.perf_counter()
        panel_text(display, 96)
        durations.append(time.perf_counter() - start)
    assert min(durations) < 0.005


def test_error_stops_the_live_display():
    display, _, _ = make_display(terminal=True)
    with pytest.raises(RuntimeError, match="inside"), display:
        raise RuntimeError("inside")
    assert display.live is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.08203, "0.08203"), (1.0, "1.000"), (123.456, "123.5"), (0.0, "0.000"), (1e-7, "1.000e-07"), (None, "–")],
)
def test_numbers_have_four_digits(value: float | None, expected: str):
    assert format_number(value) == expected


def test_times_percentages_and_flops_are_formatted():
    assert [format_time(s) for s in (5, 65, 3725, None)] == ["0:05", "1:05", "1:02:05", "–"]
    assert [format_percent(s) for s in (0.5, 1.0, None)] == ["50.00 %", "100.00 %", "–"]
    assert [format_flops(f) for f in (9.6e10, 7.93e14, 2e15)] == ["96 GFLOP/s", "793 TFLOP/s", "2 PFLOP/s"]


def test_a_cut_text_ends_in_an_ellipsis():
    display, clock, _ = make_display(flops_per_image=1e9, peak_flops=1.28e12)
    with display:
        run_steps(display, clock)
    assert "MFU            50 % of 1.…" in panel_text(display, 30)


def test_labels_keep_their_width_in_a_narrow_panel():
    display, clock, _ = make_display()
    with display:
        run_steps(display, clock)
    lines = [line for line in panel_text(display, 30).splitlines() if "learning rate" in line]
    assert lines == ["│ learning rate  0.00100     │"]


@pytest.mark.parametrize(("step", "length"), [(0, 0), (500, 0.5), (1000, 1), (2000, 1)])
def test_progress_bar_shows_its_length_without_colors(step: int, length: float):
    display, _, _ = make_display()
    with display:
        display.update(step)
    line = panel_text(display, 100).splitlines()[1]
    assert line.count("━") + line.count("╸") == pytest.approx(length * (100 - 4 - 7), abs=1)
    assert f"{100 * length:.0f} %" in line


def test_markup_in_a_title_is_plain_text():
    display, _, _ = make_display(title="[bold]x[/bold]", subtitle="runs/[1]")
    with display:
        text = panel_text(display)
    assert "[bold]x[/bold]" in text
    assert "runs/[1]" in text


def test_sparkline_needs_two_values_and_draws_flat_series():
    assert sparkline([1.0], 5) == ""
    assert sparkline([2.0, 2.0], 5) == "▁▁"


def test_memory_is_reported_only_for_gpus():
    assert make_display()[0].state.memory is None


def test_log_messages_are_printed_above_the_panel():
    display, _, output = make_display(terminal=True)
    before = log.handlers, log.propagate
    with display:
        warn_once(["an image could not be read"], about="test_display")
    assert "note: an image could not be read." in output.getvalue()
    assert (log.handlers, log.propagate) == before


def test_quiet_console_draws_nothing():
    display = Display(10, 1, console=Console(quiet=True, force_terminal=True))
    with display:
        assert display.live is None
        display.update(1, {"loss": 1.0})


@pytest.mark.gpu
def test_gpu_peak_flops_and_memory_are_measured():
    start = time.perf_counter()
    peak = measure_peak_flops(torch.device("cuda"), torch.bfloat16)
    assert time.perf_counter() - start < 5  # includes loading libraries for the first product
    assert 1e12 < peak < 1e16
    used, total = Display(10, 1, device="cuda").state.memory
    assert 0 <= used < total
