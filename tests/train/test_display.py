"""The display: what it says, what it costs, and that it never gets in the way."""

from __future__ import annotations

import io
import math
import re
import time

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console

from vitrail.evaluate import Scores
from vitrail.runtime import log, warn_once
from vitrail.runtime.peak_flops import measure_peak_flops
from vitrail.train.display import MAX_LOSSES, Display
from vitrail.train.panel import (
    fit_width,
    format_flops,
    format_number,
    format_percent,
    format_time,
    panel_lines,
    sparkline,
)


class Time:
    """A clock that goes only when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def display(terminal: bool = False, **options: object) -> tuple[Display, Time, io.StringIO]:
    ticking, out = Time(), io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100, color_system=None, highlight=False)
    values = {"images_per_epoch": 640, "title": "digits", "console": console, "clock": ticking} | options
    return Display(1000, 64, **values), ticking, out


def trained(shown: Display, ticking: Time, steps: int = 100, every: float = 0.1) -> None:
    for step in range(1, steps + 1):
        ticking.now += every
        loss = 2.3 * math.exp(-step / 30)
        shown.update(step, {"loss": loss, "accuracy": 0.5, "lr": 1e-3, "grad_norm": 0.8} if step % 10 == 0 else None)


def text(shown: Display, width: int = 90) -> str:
    return "\n".join("".join(t for t, _ in line) for line in panel_lines(shown, width))


def test_images_a_second_are_those_of_the_clock():
    shown, ticking, _ = display()
    with shown:
        trained(shown, ticking)
    assert shown.images_per_s == pytest.approx(640)
    assert "images/s       640" in text(shown)


def test_the_speed_follows_a_change_within_seconds_and_not_at_once():
    shown, ticking, _ = display()
    with shown:
        trained(shown, ticking)
        ticking.now += 0.2
        shown.update(101)
        assert 600 < shown.images_per_s < 640
        for step in range(102, 302):
            ticking.now += 0.2
            shown.update(step)
    assert shown.images_per_s == pytest.approx(320, rel=0.02)


@pytest.mark.parametrize("every", [1, 10])
def test_the_first_step_which_compiles_is_forgotten(every: int):
    shown, ticking, _ = display()
    with shown:
        ticking.now += 60
        shown.update(every)
        ticking.now += 0.1 * every
        shown.update(2 * every)
        assert shown.images_per_s == pytest.approx(640)


def test_an_evaluation_takes_no_part_in_the_speed_but_in_the_time_left():
    shown, ticking, _ = display()
    with shown:
        trained(shown, ticking)
        before = shown.seconds_left
        shown.pause()
        ticking.now += 10  # as long as training so far
        shown.show_evaluation(100, {"top1": 0.9, "low": 0.8, "high": 0.95, "loss": 0.3, "count": 100})
        ticking.now += 0.1
        shown.update(101)
    assert shown.images_per_s == pytest.approx(640)
    assert before == pytest.approx(90)
    assert shown.seconds_left == pytest.approx(2 * 89.9, rel=0.02)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_interrupts_training_between_two_logged_steps_does_not_make_it_look_faster(device: str):
    """An evaluation each 9 steps and a log each 10, 0.1 s a step; a GPU is one step behind until it is waited for."""
    shown, ticking, _ = display(device=device)
    with shown:
        for step in range(1, 101):
            ticking.now += 0.1 if device == "cpu" or step % 9 != 1 or step == 1 else 0.0
            shown.update(step)
            if step % 10 == 0:
                shown.update(step, {"loss": 1.0})
            if step % 9 == 0:
                ticking.now += 0.1 if device == "cuda" and step % 10 else 0.0  # the last one is waited for
                shown.show_evaluation_progress(0, 4)
                ticking.now += 3
                shown.show_evaluation_progress(3, 4)
                shown.show_evaluation(step, {"top1": 0.9, "loss": 0.3})
            if step > 20:
                assert shown.images_per_s == pytest.approx(640, rel=0.15), step
    assert shown.state.paused_seconds == pytest.approx(33, rel=0.05)


def test_a_share_above_all_of_the_peak_is_not_shown():
    """It would say that the peak is wrong, and nothing about training."""
    shown, ticking, _ = display(flops_per_image=1e9, peak_flops=0.5e12)
    with shown:
        trained(shown, ticking)
    assert shown.images_per_s == pytest.approx(640)
    assert shown.mfu is None
    assert "FLOP/s" not in text(shown)


def test_the_share_of_the_peak_is_what_the_arithmetic_says():
    shown, ticking, _ = display(flops_per_image=1e9, peak_flops=1.28e12)
    with shown:
        trained(shown, ticking)
    assert shown.mfu == pytest.approx(640 * 1e9 / 1.28e12)
    assert "50 % of 1.28 TFLOP/s" in text(shown)


def test_the_panel_says_it_all():
    shown, ticking, _ = display(subtitle="ViT, 0.2 M parameters")
    with shown:
        trained(shown, ticking)
        shown.show_evaluation(100, Scores(top1=0.975, top5=1.0, loss=0.1, count=360, low=0.953, high=0.987))
        shown.show_evaluation(110, Scores(top1=0.97, top5=1.0, loss=0.1, count=360, low=0.95, high=0.98))
    said = text(shown)
    for part in ("digits", "10 %", "step 100 / 1,000", "epoch 10.0 / 100", "1:30 left", "ViT, 0.2 M parameters"):
        assert part in said, part
    assert re.search(r"loss +0\.08205 .*█.*▁", said)
    assert re.search(r"validation +97\.00 % +95\.00 to 98\.00", said)
    assert re.search(r"best so far +97\.50 % +at step 100", said)
    assert re.search(r"learning rate +0\.00100", said)
    assert re.search(r"gradient norm +0\.800", said)


@pytest.mark.parametrize("width", [30, 50, 66, 100, 200])
def test_every_line_is_as_wide_as_the_panel(width: int):
    shown, ticking, _ = display(title="照片 of a long name" * 4)
    with shown:
        trained(shown, ticking)
        shown.show_evaluation(100, {"top1": 0.9, "low": 0.8, "high": 0.95, "loss": 0.3})
    assert {sum(cell_len(t) for t, _ in line) for line in panel_lines(shown, width)} == {width}


def test_a_panel_before_the_first_step_is_whole():
    shown, _, _ = display()
    with shown:
        assert "step 0 / 1,000" in text(shown)


def test_without_accuracy_the_loss_is_what_is_best():
    shown, ticking, _ = display()
    with shown:
        trained(shown, ticking)
        shown.show_evaluation(50, {"top1": None, "loss": 0.5})
        shown.show_evaluation(60, {"top1": None, "loss": 0.4})
        shown.show_evaluation(70, {"top1": None, "loss": 0.6})
    assert shown.state.best == (0.4, 60)
    assert re.search(r"best so far +0\.4000 +at step 60", text(shown))


def test_of_several_labels_the_mean_average_precision_is_shown():
    shown, ticking, _ = display()
    with shown:
        trained(shown, ticking)
        shown.show_evaluation(50, {"top1": 0.9, "map": 0.6, "low": 0.8, "high": 1.0, "loss": 0.5})
    assert re.search(r"validation +60\.00 % +mAP", text(shown))


def test_on_a_terminal_notes_go_above_a_panel_that_stays():
    shown, ticking, out = display(terminal=True)
    with shown:
        trained(shown, ticking)
        shown.note("a checkpoint was written")
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).split()
    assert "written" in lines
    assert lines[-1].endswith("╯")


def test_elsewhere_there_are_plain_lines_a_few_seconds_apart():
    shown, ticking, out = display()
    with shown:
        trained(shown, ticking, steps=100, every=0.125)  # a logged step each 1.25 s
        shown.note("a note")
        shown.show_evaluation(100, {"top1": 0.9, "top5": 0.99, "low": 0.8, "high": 0.95, "loss": 0.3, "count": 100})
    lines = out.getvalue().splitlines()
    steps = [line for line in lines if " lr " in line]
    assert len(steps) == 5
    assert "\x1b" not in out.getvalue()
    assert re.fullmatch(
        r"step +10/1,000  epoch +1\.0/100  loss +1\.648  accuracy 50\.00 %  lr +0\.00100  grad_norm +0\.800  "
        r"images/s +512  eta 2:04",
        steps[0],
    )
    assert len({line.index(" lr ") for line in steps}) == 1  # aligned
    assert lines[-2] == "a note"
    assert lines[-1].endswith("evaluation  top1 90.00 % (80.00 to 95.00)  top5 99.00 %  loss 0.3000  best")


def test_progress_is_printed_every_few_seconds_however_rarely_something_is_logged():
    shown, ticking, out = display()
    with shown:
        for step in range(1, 101):
            ticking.now += 0.5
            shown.update(step)
    lines = out.getvalue().splitlines()
    assert len(lines) == 10  # in 50 s
    assert re.fullmatch(r"step +20/1,000  epoch +2\.0/100  images/s +128  eta 8:10", lines[1])


def test_a_logged_step_is_one_line_whatever_was_printed_just_before():
    shown, ticking, out = display()
    with shown:
        for step in range(991, 1001):
            ticking.now += 2
            shown.update(step)
            shown.show_evaluation(step, {"top1": 0.9, "loss": 0.3})
            if step % 5 == 0:
                shown.update(step, {"loss": 0.5, "lr": 0.1})
    lines = [line for line in out.getvalue().splitlines() if "evaluation" not in line]
    assert [line.partition("/")[0] for line in lines] == ["step   995", "step 1,000"]


def test_the_lines_of_a_long_run_are_a_minute_apart():
    shown, ticking, out = display()
    with shown:
        ticking.now += 7200
        shown.update(1)
        for step in range(2, 302):
            ticking.now += 1
            shown.update(step)
    assert len(out.getvalue().splitlines()) == 6


def test_an_evaluation_shows_how_far_it_is():
    shown, ticking, out = display()
    with shown:
        trained(shown, ticking, 20)
        for done in range(10):
            shown.show_evaluation_progress(done, 10)
            ticking.now += 3
        assert re.search(r"evaluation +90 % done", text(shown))
        shown.show_evaluation(20, {"top1": 0.9, "loss": 0.3})
        assert "% done" not in text(shown)
    lines = [line for line in out.getvalue().splitlines() if "% done" in line]
    assert lines[0] == "step    20/1,000  epoch   2.0/100  evaluation 20 % done"
    assert len(lines) == 4


@pytest.mark.parametrize(("classes", "told"), [(3, False), (5, False), (6, True), (None, True)])
def test_the_first_five_of_five_classes_are_not_told(classes: int | None, told: bool):
    shown, _, out = display(num_classes=classes)
    with shown:
        shown.show_evaluation(100, Scores(top1=0.9, top5=1.0, loss=0.1, count=360, low=0.8, high=0.95))
    assert ("top5 100.00 %" in out.getvalue()) == told
    assert "top5" not in text(shown)


def test_the_last_step_is_always_told():
    shown, ticking, out = display()
    with shown:
        ticking.now += 0.1
        shown.update(999, {"loss": 1.0, "lr": 0.1})
        ticking.now += 0.1
        shown.update(1000, {"loss": 0.5, "lr": 0.1})
    assert "step 1,000/1,000" in out.getvalue().splitlines()[-1]


def test_a_loss_that_is_no_number_is_shown_and_spoils_nothing():
    shown, ticking, _ = display()
    with shown:
        trained(shown, ticking)
        shown.update(101, {"loss": math.nan, "lr": 1e-3})
    assert re.search(r"loss +nan", text(shown))


def test_the_history_of_a_long_run_stays_short_and_whole():
    shown, ticking, _ = display()
    with shown:
        for step in range(1, 10_001):
            ticking.now += 0.01
            shown.update(step, {"loss": 1.0 - step / 10_000})
    assert len(shown.state.losses) < MAX_LOSSES
    assert shown.state.losses == sorted(shown.state.losses, reverse=True)
    assert sparkline(shown.state.losses, 8) == "█▇▆▅▄▃▂▁"


def test_the_training_thread_pays_microseconds():
    shown, _, _ = display(terminal=True, clock=time.monotonic)
    values = {"loss": 1.0, "accuracy": 0.5, "lr": 1e-3, "grad_norm": 0.8}
    with shown:
        best = math.inf
        for _ in range(5):
            start = time.perf_counter()
            for step in range(1000):
                shown.update(step, values)
            best = min(best, time.perf_counter() - start)
    assert best / 1000 < 50e-6


def test_a_drawing_takes_a_small_part_of_the_time_between_two():
    shown, ticking, _ = display()
    with shown:
        trained(shown, ticking)
    took = []
    for _ in range(5):
        start = time.perf_counter()
        panel_lines(shown, 96)
        took.append(time.perf_counter() - start)
    assert min(took) < 0.005


def test_an_error_inside_leaves_the_terminal_in_order():
    shown, _, _ = display(terminal=True)
    with pytest.raises(RuntimeError, match="inside"), shown:
        raise RuntimeError("inside")
    assert shown.live is None


@pytest.mark.parametrize(
    ("value", "said"),
    [(0.08203, "0.08203"), (1.0, "1.000"), (123.456, "123.5"), (0.0, "0.000"), (1e-7, "1.000e-07"), (None, "–")],
)
def test_numbers_have_four_digits(value: float | None, said: str):
    assert format_number(value) == said


def test_times_shares_and_speeds_are_spelled():
    assert [format_time(s) for s in (5, 65, 3725, None)] == ["0:05", "1:05", "1:02:05", "–"]
    assert [format_percent(s) for s in (0.5, 1.0, None)] == ["50.00 %", "100.00 %", "–"]
    assert [format_flops(f) for f in (9.6e10, 7.93e14, 2e15)] == ["96 GFLOP/s", "793 TFLOP/s", "2 PFLOP/s"]


def test_a_line_is_cut_or_filled():
    assert fit_width([("abc", ""), ("def", "bold")], 4) == [("abc", ""), ("d", "bold")]
    assert fit_width([("abc", "")], 5) == [("abc", ""), ("  ", "")]


def test_a_sparkline_needs_two_values_and_stands_flat_lines():
    assert sparkline([1.0], 5) == ""
    assert sparkline([2.0, 2.0], 5) == "▁▁"


def test_memory_is_told_of_gpus_only():
    assert display()[0].memory is None


def test_what_is_said_aloud_meanwhile_goes_above_the_panel():
    shown, _, out = display(terminal=True)
    before = log.handlers, log.propagate
    with shown:
        warn_once(["an image could not be read"], about="test_display")
    assert "note: an image could not be read." in out.getvalue()
    assert (log.handlers, log.propagate) == before


def test_a_process_that_must_be_quiet_draws_nothing():
    shown = Display(10, 1, console=Console(quiet=True, force_terminal=True))
    with shown:
        assert shown.live is None
        shown.update(1, {"loss": 1.0})


@pytest.mark.gpu
def test_a_gpus_peak_and_memory_are_told():
    start = time.perf_counter()
    peak = measure_peak_flops(torch.device("cuda"), torch.bfloat16)
    assert time.perf_counter() - start < 5  # the first product loads libraries
    assert 1e12 < peak < 1e16
    taken, there = Display(10, 1, device="cuda").memory
    assert 0 <= taken < there
