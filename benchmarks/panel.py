"""Cost of the terminal panel: time per redraw, and the training steps lost to it.

    python benchmarks/panel.py [--rounds 15] [--seconds 2]

A step is pure Python, which waits for the interpreter lock whenever the panel is drawn: the worst case for a training
thread. Runs with and without the panel alternate; the loss is the median of the rounds.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time
from contextlib import nullcontext

from rich.console import Console

from vitrail.training.display import REFRESHES_PER_S, Display


def make_display() -> Display:
    """The display of a run with all rows, on a terminal that is a string."""
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system="truecolor")
    display = Display(10**9, 64, images_per_epoch=640, flops_per_image=1e9, peak_flops=1e15, console=console)
    for step in range(1, 100):
        display.update(step, {"loss": 100 / step, "accuracy": 0.5, "lr": 1e-3, "grad_norm": 0.8})
    display.show_evaluation(99, {"top1": 0.9, "low": 0.8, "high": 0.95, "loss": 0.3})
    return display


def steps_per_second(display: Display | None, seconds: float) -> float:
    start, step = time.perf_counter(), 100
    with display or nullcontext():
        while (elapsed := time.perf_counter() - start) < seconds:
            sum(range(20_000))
            step += 1
            if display is not None:
                display.update(step)
    return step / elapsed


def redraw_seconds(count: int = 200) -> float:
    """Median processor time of a redraw."""
    times = []
    with make_display() as display:
        for _ in range(count):
            start = time.thread_time()
            display.live.refresh()
            times.append(time.thread_time() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=2.0)
    chosen = parser.parse_args()
    redraw = redraw_seconds()
    print(
        f"redraw {1e3 * redraw:.2f} ms; {REFRESHES_PER_S} per second: {100 * REFRESHES_PER_S * redraw:.2f} % of a core"
    )
    ratios = []
    for _ in range(chosen.rounds):
        plain = steps_per_second(None, chosen.seconds)
        ratios.append(steps_per_second(make_display(), chosen.seconds) / plain)
    low, _, high = statistics.quantiles(ratios, n=4)
    print(f"steps with the panel / without: median {statistics.median(ratios):.4f}, quartiles {low:.4f} to {high:.4f}")


if __name__ == "__main__":
    main()
