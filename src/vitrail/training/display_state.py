"""The numbers of a run that its display shows: those stored after each step, and the values derived from them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

SPEED_HALF_LIFE_S = 5.0
"""Half-life of the moving average of the speed, in seconds."""
MAX_LOSSES = 1024
"""Maximum number of losses for the sparkline; beyond that every other one is dropped."""


@dataclass
class DisplayState:
    """What the display shows. Written by the training thread, read by the drawing thread."""

    total_steps: int
    images_per_step: int
    images_per_epoch: int | None = None
    num_classes: int | None = None
    """With five classes or fewer, top-5 accuracy is always 1 and is not shown."""
    flops_per_image: float = 0.0
    """FLOPs of training on one image, about three times those of a forward pass."""
    peak_flops: float | None = None
    """See `runtime.peak_flops`; with `flops_per_image` it gives the MFU."""
    title: str = ""
    subtitle: str = ""
    start_step: int = 0
    """The step that this process started or resumed from."""
    device: torch.device | str = "cpu"
    clock: Callable[[], float] = time.monotonic

    step: int = field(init=False)
    values: dict[str, float | None] = field(default_factory=dict, init=False)
    """The metrics of the last logged step."""
    losses: list[float] = field(default_factory=list, init=False)
    """Losses of the whole run, subsampled as it grows."""
    evaluation: Mapping[str, Any] | None = field(default=None, init=False)
    best: tuple[float, int] | None = field(default=None, init=False)
    """The best score and its step."""
    started_at: float = field(default=0.0, init=False)
    step_seconds: float | None = field(default=None, init=False)
    """Moving average of the time per step."""
    paused_seconds: float = field(default=0.0, init=False)
    """Time spent on evaluations and checkpoints."""
    evaluation_progress: float | None = field(default=None, init=False)
    """The fraction of the current evaluation that is done; None if there is none."""

    def __post_init__(self) -> None:
        self.step = self.start_step
        self._last_timing = (self.start_step, 0.0)
        self._losses_seen, self._stride, self._speed_updates = 0, 1, 0

    def start(self) -> None:
        """Start the clock of the run."""
        self.started_at = self.clock()
        self._last_timing = (self.step, self.started_at)

    def add_loss(self, loss: float | None) -> None:
        if loss is None or not math.isfinite(loss):
            return
        self._losses_seen += 1
        if self._losses_seen % self._stride == 0:
            self.losses.append(loss)
        if len(self.losses) >= MAX_LOSSES:
            self.losses, self._stride = self.losses[::2], 2 * self._stride

    def update_speed(self, done: int, now: float) -> None:
        """Update the speed: `done` steps are finished at time `now`."""
        steps, elapsed = done - self._last_timing[0], now - self._last_timing[1]
        if steps <= 0 or elapsed <= 0:
            return
        self._speed_updates += 1
        # The first measurement includes warm-up and compilation, so the second replaces it.
        keep = 0.0 if self._speed_updates <= 2 else 0.5 ** (elapsed / SPEED_HALF_LIFE_S)
        self.step_seconds = keep * (self.step_seconds or 0.0) + (1 - keep) * elapsed / steps
        self._last_timing = (done, now)

    def skip_pause(self, now: float) -> None:
        """Exclude the time since the last update of the speed, spent on an evaluation or a checkpoint."""
        self.paused_seconds += now - self._last_timing[1]
        self._last_timing = (self._last_timing[0], now)

    @property
    def on_gpu(self) -> bool:
        return torch.device(self.device).type == "cuda"

    @property
    def elapsed_seconds(self) -> float:
        return self.clock() - self.started_at

    @property
    def images_per_s(self) -> float | None:
        """Training speed, in images per second."""
        return self.images_per_step / self.step_seconds if self.step_seconds else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: the fraction of the peak FLOP/s in use; None if unknown or implausible (above 1)."""
        if not (self.images_per_s and self.flops_per_image and self.peak_flops):
            return None
        fraction = self.images_per_s * self.flops_per_image / self.peak_flops
        return None if fraction > 1 else fraction

    def epoch_of(self, step: int) -> float | None:
        return step * self.images_per_step / self.images_per_epoch if self.images_per_epoch else None

    @property
    def epoch(self) -> float | None:
        return self.epoch_of(self.step)

    @property
    def total_epochs(self) -> float | None:
        return self.epoch_of(self.total_steps)

    @property
    def memory(self) -> tuple[float, float] | None:
        """Reserved and total memory of the GPU, in GB; None on other devices."""
        if not self.on_gpu or not torch.cuda.is_available():
            return None
        total = torch.cuda.get_device_properties(self.device).total_memory
        return torch.cuda.memory_reserved(self.device) / 1e9, total / 1e9

    @property
    def seconds_left(self) -> float | None:
        """Estimated remaining time in seconds, if evaluations keep taking the same fraction of the time."""
        if not self.step_seconds or self.step <= self.start_step:
            return None
        trained = max(self._last_timing[1] - self.started_at - self.paused_seconds, 1e-9)
        return (self.total_steps - self.step) * self.step_seconds * (1 + self.paused_seconds / trained)
