"""A run as it goes, for whoever watches: a panel in a terminal, plain aligned lines anywhere else.

The training thread only stores numbers, which takes microseconds; a thread of the panel's own draws
them four times a second. Lines are for logs: one for a logged step, at most one every few seconds, one
for a step that is not logged where nothing was printed for a while, and one for each evaluation, `name
value` all along, so that grep and awk find their way.
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

from vitrail.evaluate.scores import Scores
from vitrail.runtime import log
from vitrail.runtime.terminal import SafeConsole
from vitrail.train.panel import Drawn, plain_evaluation, plain_measuring, plain_progress, plain_step

REFRESHES = 4
"""Drawings a second."""
MEMORY = 5.0
"""Seconds after which a measured speed is forgotten by half."""
QUIET = 2.0
"""Seconds between two plain lines, at least."""
SILENCE = 5.0, 60.0
"""Seconds without a plain line after which progress is printed: in the first minutes, and from an hour on."""
HISTORY = 1024
"""Losses kept for the sparkline; beyond that every other one goes."""


@dataclass
class Watched:
    """Everything the panel shows. Written by the training thread, read by the drawing one."""

    step: int = 0
    values: dict[str, float | None] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    """Of the whole run, thinned out as it grows."""
    evaluation: Mapping[str, Any] | None = None
    best: tuple[float, int] | None = None
    """The best score and its step."""
    started: float = 0.0
    begun: int = 0
    """The step this sitting started from."""
    seconds: float | None = None
    """Of a step, smoothed."""
    aside: float = 0.0
    """Seconds spent on evaluations and the like."""
    measuring: float | None = None
    """The share of an evaluation that is done, while there is one."""


class Display:
    """`with Display(...) as display:`, then `update` each step, `evaluated` and `note` as the run goes on.

    `flops_per_image` is the arithmetic of one image in training, about three times that of a
    forward pass; with `peak_flops` (see `runtime.peak`) it tells how much of the device is used.
    With five `classes` or fewer, top5 is always all of them and not told.
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
        start: int = 0,
        device: torch.device | str = "cpu",
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total, self.images = total_steps, images_per_step
        self.epoch_images, self.classes = images_per_epoch, num_classes
        self.flops, self.peak = flops_per_image, peak_flops
        self.title, self.subtitle = title, subtitle
        self.device = torch.device(device)
        self.console = console or SafeConsole(stderr=True)
        self.clock = clock
        self.seen = Watched(step=start, begun=start)
        self.live: Live | None = None
        self._last = (start, 0.0)
        self._told, self._printed = -math.inf, 0.0  # when a logged step was printed last, when any line was
        self._logged, self._stride, self._paced = 0, 1, 0

    def __enter__(self) -> Self:
        now = self.clock()
        self.seen.started, self._last, self._printed = now, (self.seen.step, now), now
        if self.console.is_terminal and not self.console.quiet:
            self.live = Live(Drawn(self), console=self.console, refresh_per_second=REFRESHES, redirect_stdout=False)
            self.live.start()
            self._logger = log.handlers, log.propagate
            log.handlers, log.propagate = [_Notes(self)], False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None
            log.handlers, log.propagate = self._logger

    def update(self, step: int, values: Mapping[str, float | None] | None = None) -> None:
        """So many steps are done; what was logged of them (loss, accuracy, lr, grad_norm), where something was.

        To be called after each step. Without values a GPU is still computing the last one.
        """
        now = self.clock()
        self.seen.step = step
        self._pace(step - (values is None and self.device.type == "cuda"), now)
        if values is None:
            self._print_if_silent(plain_progress, now)
            return
        self.seen.values = dict(values)
        self._remember(values.get("loss"))
        if self.live is None and (now - self._told >= QUIET or step >= self.total):
            self._told = now
            self._print(plain_step(self), now)

    def pause(self) -> None:
        """All steps so far are done; what follows until `resumed` is no training, and its time does not count."""
        self._pace(self.seen.step, self.clock())

    def measuring(self, done: int, total: int) -> None:
        """So many of an evaluation's batches are done; called with 0 first."""
        if not done:
            self.pause()
        self.seen.measuring = done / max(total, 1)
        self._print_if_silent(plain_measuring, self.clock())

    def evaluated(
        self, step: int, scores: Scores | Mapping[str, Any], *, ema: bool = False, best: bool | None = None
    ) -> None:
        """What a measurement found; the time it took is no part of the training speed.

        best: whether none was better, if somebody knows: a run that goes on has had others before.
        """
        found = dict(scores.to_dict() if isinstance(scores, Scores) else scores) | {"step": step, "ema": ema}
        name, better = ("map", 1) if "map" in found else ("top1", 1)
        if found.get(name) is None:
            name, better = "loss", -1
        value = found.get(name)
        if best is None:
            best = value is not None and (self.seen.best is None or better * value > better * self.seen.best[0])
        if best and value is not None:
            self.seen.best = (value, step)
        self.seen.evaluation = found | {"name": name}
        self.resumed()
        if self.live is None:
            self._print(plain_evaluation(self), self.clock())

    def resumed(self) -> None:
        """Training goes on after something else (an evaluation, a checkpoint) that began with `pause`."""
        now = self.clock()
        self.seen.aside += now - self._last[1]
        self.seen.measuring = None
        self._last = (self._last[0], now)

    def note(self, text: str) -> None:
        """A line of its own, above the panel."""
        with suppress(OSError):
            self.console.print(Text(text, style="dim" if self.live else ""), soft_wrap=True)

    def _remember(self, loss: float | None) -> None:
        if loss is None or not math.isfinite(loss):
            return
        self._logged += 1
        if self._logged % self._stride == 0:
            self.seen.losses.append(loss)
        if len(self.seen.losses) >= HISTORY:
            self.seen.losses, self._stride = self.seen.losses[::2], 2 * self._stride

    def _pace(self, done: int, now: float) -> None:
        """So many steps are finished by now."""
        steps, elapsed = done - self._last[0], now - self._last[1]
        if steps > 0 and elapsed > 0:
            self._smooth(elapsed / steps, elapsed)
            self._last = (done, now)

    def _smooth(self, seconds: float, elapsed: float) -> None:
        self._paced += 1
        # What came first also warmed up and compiled: the second time replaces it.
        keep = 0.0 if self._paced <= 2 else 0.5 ** (elapsed / MEMORY)
        self.seen.seconds = keep * (self.seen.seconds or 0.0) + (1 - keep) * seconds

    def _print_if_silent(self, line: Callable[[Display], str], now: float) -> None:
        patience = min(max(SILENCE[0], (now - self.seen.started) / 60), SILENCE[1])
        if self.live is None and now - self._printed >= patience:
            self._print(line(self), now)

    def _print(self, line: str, now: float) -> None:
        self._printed = now
        with suppress(OSError):  # a log on a full disk, a reader that has gone: no reason to stop
            self.console.print(line, soft_wrap=True, markup=False, highlight=False)

    @property
    def rate(self) -> float | None:
        """Images a second."""
        return self.images / self.seen.seconds if self.seen.seconds else None

    @property
    def share(self) -> float | None:
        """Of the device's peak that training uses; None where it is not known, or the peak is shown to be wrong."""
        found = self.rate * self.flops / self.peak if self.rate and self.flops and self.peak else None
        return None if found is None or found > 1 else found

    @property
    def epoch(self) -> float | None:
        return self.seen.step * self.images / self.epoch_images if self.epoch_images else None

    @property
    def epochs(self) -> float | None:
        return self.total * self.images / self.epoch_images if self.epoch_images else None

    @property
    def memory(self) -> tuple[float, float] | None:
        """GB that are taken on the device and that it has; None where that cannot be told."""
        if self.device.type != "cuda" or not torch.cuda.is_available():
            return None
        whole = torch.cuda.get_device_properties(self.device).total_memory
        return torch.cuda.memory_reserved(self.device) / 1e9, whole / 1e9

    @property
    def left(self) -> float | None:
        """Seconds, if evaluations and the like keep taking the share of the time they have had."""
        seen, done = self.seen, self.seen.step - self.seen.begun
        if not seen.seconds or done < 1:
            return None
        trained = max(self._last[1] - seen.started - seen.aside, 1e-9)
        return (self.total - seen.step) * seen.seconds * (1 + seen.aside / trained)


class _Notes(logging.Handler):
    """What is said aloud meanwhile goes above the panel; written straight to the terminal it would tear it."""

    def __init__(self, display: Display) -> None:
        super().__init__()
        self.display = display

    def emit(self, record: logging.LogRecord) -> None:
        self.display.note(f"note: {getattr(record, 'note', record.getMessage())}")
