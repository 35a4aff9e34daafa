"""Shows the progress of a run: a panel in a terminal, plain aligned lines elsewhere.

The training thread only stores numbers, which takes microseconds; the panel is drawn by its own thread four times a
second. Plain lines consist of `name value` pairs, for grep and awk: one per logged step, but at most one every few
seconds; one per evaluation; and one for the position if nothing was printed for a while.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from vitrail.evaluation.scores import Scores
from vitrail.runtime import log
from vitrail.runtime.terminal import SafeConsole
from vitrail.training.display_state import DisplayState
from vitrail.training.panel import (
    MAX_WIDTH,
    plain_evaluation,
    plain_evaluation_progress,
    plain_progress,
    plain_step,
    render_panel,
)

REFRESHES_PER_S = 4
"""Redraws of the panel per second."""
MIN_LINE_INTERVAL_S = 2.0
"""Minimum seconds between the lines of two logged steps."""
MAX_SILENCE_S = 5.0, 60.0
"""Seconds without a line after which the position is printed: at the start, and after an hour."""


class Display:
    """`with Display(...) as display:`, then `update` after each step, `show_evaluation` and `note` when needed.

    The keyword arguments besides `console` are those of `DisplayState`.
    """

    def __init__(
        self, total_steps: int, images_per_step: int, *, console: Console | None = None, **settings: Any
    ) -> None:
        self.state = DisplayState(total_steps, images_per_step, **settings)
        self.console = console or SafeConsole(stderr=True)
        self.live: Live | None = None
        self._step_printed_at, self._printed_at = -math.inf, 0.0  # of the last logged step, and of any line

    def __enter__(self) -> Self:
        self.state.start()
        self._printed_at = self.state.started_at
        if self.console.is_terminal and not self.console.quiet:
            self.live = Live(
                get_renderable=lambda: render_panel(self.state, min(self.console.width, MAX_WIDTH)),
                console=self.console,
                refresh_per_second=REFRESHES_PER_S,
                redirect_stdout=False,
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
        now = self.state.clock()
        self.state.step = step
        self.state.update_speed(step - (values is None and self.state.on_gpu), now)
        if values is None:
            self._print_if_silent(plain_progress, now)
            return
        self.state.values = dict(values)
        self.state.add_loss(values.get("loss"))
        if self.live is None and (now - self._step_printed_at >= MIN_LINE_INTERVAL_S or step >= self.state.total_steps):
            self._step_printed_at = now
            self._print(plain_step(self.state), now)

    def pause(self) -> None:
        """Exclude the time until `resume` from the training speed. All steps so far must be done."""
        self.state.update_speed(self.state.step, self.state.clock())

    def show_evaluation_progress(self, done: int, total: int) -> None:
        """Show how many batches of an evaluation are done; first called with 0."""
        if not done:
            self.pause()
        self.state.evaluation_progress = done / max(total, 1)
        self._print_if_silent(plain_evaluation_progress, self.state.clock())

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
            self._print(plain_evaluation(self.state), self.state.clock())

    def resume(self) -> None:
        """End a `pause` for an evaluation or a checkpoint."""
        self.state.skip_pause(self.state.clock())
        self.state.evaluation_progress = None

    def note(self, text: str) -> None:
        """Print a line, in a terminal above the panel."""
        with suppress(OSError):
            self.console.print(Text(text, style="dim" if self.live else ""), soft_wrap=True)

    def _print_if_silent(self, line: Callable[[DisplayState], str], now: float) -> None:
        patience = min(max(MAX_SILENCE_S[0], (now - self.state.started_at) / 60), MAX_SILENCE_S[1])
        if self.live is None and now - self._printed_at >= patience:
            self._print(line(self.state), now)

    def _print(self, line: str, now: float) -> None:
        self._printed_at = now
        with suppress(OSError):  # a full disk or a closed pipe must not stop the run
            self.console.print(line, soft_wrap=True, markup=False, highlight=False)


class _NoteHandler(logging.Handler):
    """Prints log records above the panel, which direct output to the terminal would corrupt."""

    def __init__(self, display: Display) -> None:
        super().__init__()
        self.display = display

    def emit(self, record: logging.LogRecord) -> None:
        self.display.note(f"note: {getattr(record, 'note', record.getMessage())}")
