"""Shows the progress of a run: a panel in a terminal, plain aligned lines elsewhere.

The training thread only stores numbers, which takes microseconds; the panel is drawn by its own thread four times a
second. Plain lines consist of `name value` pairs, for grep and awk: one per logged step, but at most one every few
seconds; one per evaluation; and one for the position if nothing was printed for a while.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text

from vitrail.evaluation.scores import Scores
from vitrail.runtime import log
from vitrail.runtime.terminal import SafeConsole
from vitrail.training.panel import (
    PanelRenderable,
    plain_evaluation,
    plain_evaluation_progress,
    plain_progress,
    plain_step,
)

REFRESHES_PER_S = 4
"""Redraws of the panel per second."""
SPEED_HALF_LIFE_S = 5.0
"""Half-life of the moving average of the speed, in seconds."""
MIN_LINE_INTERVAL_S = 2.0
"""Minimum seconds between the lines of two logged steps."""
MAX_SILENCE_S = 5.0, 60.0
"""Seconds without a line after which the position is printed: at the start, and after an hour."""
MAX_LOSSES = 1024
"""Maximum number of losses for the sparkline; beyond that every other one is dropped."""


@dataclass
class DisplayState:
    """What the panel shows. Written by the training thread, read by the drawing thread."""

    step: int = 0
    values: dict[str, float | None] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    """Losses of the whole run, subsampled as it grows."""
    evaluation: Mapping[str, Any] | None = None
    best: tuple[float, int] | None = None
    """The best score and its step."""
    started_at: float = 0.0
    start_step: int = 0
    """The step that this process started or resumed from."""
    step_seconds: float | None = None
    """Moving average of the time per step."""
    paused_seconds: float = 0.0
    """Time spent on evaluations and checkpoints."""
    evaluation_progress: float | None = None
    """The fraction of the current evaluation that is done; None if there is none."""


class Display:
    """`with Display(...) as display:`, then `update` after each step, `show_evaluation` and `note` when needed.

    `flops_per_image`: FLOPs of training on one image, about three times those of a forward pass; with `peak_flops` (see
    `runtime.peak_flops`) it gives the MFU. With five classes or fewer, top-5 accuracy is always 1 and is not shown.
    """

    def __init__(
        self,
        total_steps: int,
        images_per_step: int,
        *,
        images_per_epoch: int | None = None,
        num_classes: int | None = None,
        flops_per_image: float = 0.0,
        peak_flops: float | None = None,
        title: str = "",
        subtitle: str = "",
        start_step: int = 0,
        device: torch.device | str = "cpu",
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps, self.images_per_step = total_steps, images_per_step
        self.images_per_epoch, self.num_classes = images_per_epoch, num_classes
        self.flops_per_image, self.peak_flops = flops_per_image, peak_flops
        self.title, self.subtitle = title, subtitle
        self.device = torch.device(device)
        self.console = console or SafeConsole(stderr=True)
        self.clock = clock
        self.state = DisplayState(step=start_step, start_step=start_step)
        self.live: Live | None = None
        self._last_timing = (start_step, 0.0)
        self._step_printed_at, self._printed_at = -math.inf, 0.0  # of the last logged step, and of any line
        self._losses_seen, self._stride, self._speed_updates = 0, 1, 0

    def __enter__(self) -> Self:
        now = self.clock()
        self.state.started_at, self._last_timing, self._printed_at = now, (self.state.step, now), now
        if self.console.is_terminal and not self.console.quiet:
            self.live = Live(
                PanelRenderable(self), console=self.console, refresh_per_second=REFRESHES_PER_S, redirect_stdout=False
            )
            self.live.start()
            self._logger = log.handlers, log.propagate
            log.handlers, log.propagate = [_NoteHandler(self)], False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None
            log.handlers, log.propagate = self._logger

    def update(self, step: int, values: Mapping[str, float | None] | None = None) -> None:
        """To be called after each step; for a logged step, again with its values (loss, accuracy, lr, grad_norm).

        Without values, a GPU is assumed to be still computing the last step.
        """
        now = self.clock()
        self.state.step = step
        self._update_speed(step - (values is None and self.device.type == "cuda"), now)
        if values is None:
            self._print_if_silent(plain_progress, now)
            return
        self.state.values = dict(values)
        self._add_loss(values.get("loss"))
        if self.live is None and (now - self._step_printed_at >= MIN_LINE_INTERVAL_S or step >= self.total_steps):
            self._step_printed_at = now
            self._print(plain_step(self), now)

    def pause(self) -> None:
        """Exclude the time until `resume` from the training speed. All steps so far must be done."""
        self._update_speed(self.state.step, self.clock())

    def show_evaluation_progress(self, done: int, total: int) -> None:
        """Show how many batches of an evaluation are done; first called with 0."""
        if not done:
            self.pause()
        self.state.evaluation_progress = done / max(total, 1)
        self._print_if_silent(plain_evaluation_progress, self.clock())

    def show_evaluation(
        self, step: int, scores: Scores | Mapping[str, Any], *, ema: bool = False, best: bool | None = None
    ) -> None:
        """Show the scores of an evaluation; its time is excluded from the training speed.

        `best`: whether they are the best of the run; None compares with those shown before.
        """
        found = dict(scores.to_dict() if isinstance(scores, Scores) else scores) | {"step": step, "ema": ema}
        name, better = ("map", 1) if "map" in found else ("top1", 1)
        if found.get(name) is None:
            name, better = "loss", -1
        value = found.get(name)
        if best is None:
            best = value is not None and (self.state.best is None or better * value > better * self.state.best[0])
        if best and value is not None:
            self.state.best = (value, step)
        self.state.evaluation = found | {"name": name}
        self.resume()
        if self.live is None:
            self._print(plain_evaluation(self), self.clock())

    def resume(self) -> None:
        """End a `pause` for an evaluation or a checkpoint."""
        now = self.clock()
        self.state.paused_seconds += now - self._last_timing[1]
        self.state.evaluation_progress = None
        self._last_timing = (self._last_timing[0], now)

    def note(self, text: str) -> None:
        """Print a line, in a terminal above the panel."""
        with suppress(OSError):
            self.console.print(Text(text, style="dim" if self.live else ""), soft_wrap=True)

    def _add_loss(self, loss: float | None) -> None:
        if loss is None or not math.isfinite(loss):
            return
        self._losses_seen += 1
        if self._losses_seen % self._stride == 0:
            self.state.losses.append(loss)
        if len(self.state.losses) >= MAX_LOSSES:
            self.state.losses, self._stride = self.state.losses[::2], 2 * self._stride

    def _update_speed(self, done: int, now: float) -> None:
        """Update the speed: `done` steps are finished at time `now`."""
        steps, elapsed = done - self._last_timing[0], now - self._last_timing[1]
        if steps > 0 and elapsed > 0:
            self._smooth(elapsed / steps, elapsed)
            self._last_timing = (done, now)

    def _smooth(self, seconds: float, elapsed: float) -> None:
        self._speed_updates += 1
        # The first measurement includes warm-up and compilation, so the second replaces it.
        keep = 0.0 if self._speed_updates <= 2 else 0.5 ** (elapsed / SPEED_HALF_LIFE_S)
        self.state.step_seconds = keep * (self.state.step_seconds or 0.0) + (1 - keep) * seconds

    def _print_if_silent(self, line: Callable[[Display], str], now: float) -> None:
        patience = min(max(MAX_SILENCE_S[0], (now - self.state.started_at) / 60), MAX_SILENCE_S[1])
        if self.live is None and now - self._printed_at >= patience:
            self._print(line(self), now)

    def _print(self, line: str, now: float) -> None:
        self._printed_at = now
        with suppress(OSError):  # a full disk or a closed pipe must not stop the run
            self.console.print(line, soft_wrap=True, markup=False, highlight=False)

    @property
    def images_per_s(self) -> float | None:
        """Training speed, in images per second."""
        return self.images_per_step / self.state.step_seconds if self.state.step_seconds else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: the fraction of the peak FLOP/s in use; None if unknown or implausible (above 1)."""
        if not (self.images_per_s and self.flops_per_image and self.peak_flops):
            return None
        fraction = self.images_per_s * self.flops_per_image / self.peak_flops
        return None if fraction > 1 else fraction

    @property
    def epoch(self) -> float | None:
        return self.state.step * self.images_per_step / self.images_per_epoch if self.images_per_epoch else None

    @property
    def total_epochs(self) -> float | None:
        return self.total_steps * self.images_per_step / self.images_per_epoch if self.images_per_epoch else None

    @property
    def memory(self) -> tuple[float, float] | None:
        """Reserved and total memory of the GPU, in GB; None on other devices."""
        if self.device.type != "cuda" or not torch.cuda.is_available():
            return None
        total = torch.cuda.get_device_properties(self.device).total_memory
        return torch.cuda.memory_reserved(self.device) / 1e9, total / 1e9

    @property
    def seconds_left(self) -> float | None:
        """Estimated remaining time in seconds, if evaluations keep taking the same fraction of the time."""
        state, done = self.state, self.state.step - self.state.start_step
        if not state.step_seconds or done < 1:
            return None
        trained = max(self._last_timing[1] - state.started_at - state.paused_seconds, 1e-9)
        return (self.total_steps - state.step) * state.step_seconds * (1 + state.paused_seconds / trained)


class _NoteHandler(logging.Handler):
    """Prints log records above the panel, which direct output to the terminal would corrupt."""

    def __init__(self, display: Display) -> None:
        super().__init__()
        self.display = display

    def emit(self, record: logging.LogRecord) -> None:
        self.display.note(f"note: {getattr(record, 'note', record.getMessage())}")
