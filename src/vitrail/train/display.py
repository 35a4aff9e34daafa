"""A run as it goes, for whoever watches: a panel in a terminal, plain aligned lines anywhere else.

The training thread only stores numbers, which takes microseconds; a thread of the panel's own draws
them four times a second. Lines are for logs: one for a logged step, at most one every few seconds,
and one for each evaluation, `name value` all along, so that grep and awk find their way.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from types import TracebackType
from typing import Any, Self

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text

from vitrail.evaluate.scores import Scores
from vitrail.runtime import log
from vitrail.train.panel import Drawn, plain_evaluation, plain_step

REFRESHES = 4
"""Drawings a second."""
MEMORY = 5.0
"""Seconds after which a measured speed is forgotten by half."""
QUIET = 2.0
"""Seconds between two plain lines, at least."""
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


class Display:
    """`with Display(...) as display:`, then `update`, `evaluated` and `note` as the run goes on.

    `flops_per_image` is the arithmetic of one image in training, about three times that of a
    forward pass; with `peak_flops` (see `measured_peak`) it tells how much of the device is used.
    With five `classes` or fewer, top5 is always all of them and not told.
    """

    def __init__(
        self,
        total_steps: int,
        images_per_step: int,
        *,
        images_per_epoch: int | None = None,
        classes: int | None = None,
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
        self.epoch_images, self.classes = images_per_epoch, classes
        self.flops, self.peak = flops_per_image, peak_flops
        self.title, self.subtitle = title, subtitle
        self.device = torch.device(device)
        self.console = console or Console(stderr=True, highlight=False)
        self.clock = clock
        self.seen = Watched(step=start, begun=start)
        self.live: Live | None = None
        self._last = (start, 0.0)
        self._spoken = -math.inf
        self._logged, self._stride, self._paced = 0, 1, 0

    def __enter__(self) -> Self:
        now = self.clock()
        self.seen.started, self._last = now, (self.seen.step, now)
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
        """So many steps are done; what was logged of them (loss, accuracy, lr, grad_norm), where something was."""
        now = self.clock()
        done, elapsed = step - self._last[0], now - self._last[1]
        if done > 0 and elapsed > 0:
            self._smooth(elapsed / done, elapsed)
            self._last = (step, now)
        self.seen.step = step
        if values is None:
            return
        self.seen.values = dict(values)
        self._remember(values.get("loss"))
        if self.live is None and (now - self._spoken >= QUIET or step >= self.total):
            self._spoken = now
            self._say(plain_step(self))

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
            self._say(plain_evaluation(self))

    def resumed(self) -> None:
        """Training goes on after something else (an evaluation, a checkpoint): its time does not count."""
        now = self.clock()
        self.seen.aside += now - self._last[1]
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

    def _smooth(self, seconds: float, elapsed: float) -> None:
        self._paced += 1
        # What came first also warmed up and compiled: the second time replaces it.
        keep = 0.0 if self._paced <= 2 else 0.5 ** (elapsed / MEMORY)
        self.seen.seconds = keep * (self.seen.seconds or 0.0) + (1 - keep) * seconds

    def _say(self, line: str) -> None:
        with suppress(OSError):  # a log on a full disk, a reader that has gone: no reason to stop
            self.console.print(line, soft_wrap=True, markup=False, highlight=False)

    @property
    def rate(self) -> float | None:
        """Images a second."""
        return self.images / self.seen.seconds if self.seen.seconds else None

    @property
    def share(self) -> float | None:
        """Of the device's peak that training uses."""
        return self.rate * self.flops / self.peak if self.rate and self.flops and self.peak else None

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


@cache
def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product, the best of a blink (0.2 s): what the device gives, not its data sheet."""
    wait = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(device.type, lambda: None)
    on_cpu = 1024 if torch.get_num_threads() < 8 else 2048
    side = {"cuda": 8192 if dtype.itemsize == 2 else 4096, "mps": 2048}.get(device.type, on_cpu)
    # Numbers that differ, as a chip runs faster on equal ones; and no random ones, which would move a generator.
    a = torch.arange(side * side, device=device, dtype=torch.float32).sin_().view(side, side).to(dtype)
    torch.mm(a, a)  # loads what there is to load
    wait()
    end, best = time.perf_counter() + 0.2, 0.0
    while not best or time.perf_counter() < end:
        before = time.perf_counter()
        torch.mm(a, a)
        wait()
        best = max(best, 2 * side**3 / max(time.perf_counter() - before, 1e-9))
    del a
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return best
