"""The learning rate schedule: warm-up, decay (cosine, linear, rsqrt or constant), optional cool-down."""

from __future__ import annotations

import math

from vitrail.config import ScheduleConfig
from vitrail.errors import ConfigError


class LRSchedule:
    """`schedule(step)`: the factor of the peak learning rate in [0, 1], for steps 0 ... total_steps - 1.

    The warm-up of W steps ends at the peak: step i has (i + 1) / W, so that the first step already updates the
    weights. The decay is big_vision's: step i after the warm-up is at i / (total_steps - W), and the floor is reached
    at `schedule(total_steps)`, after the last step. Cosine and linear end at the floor; rsqrt and constant reach it
    with a cool-down.
    """

    def __init__(self, config: ScheduleConfig, *, total_steps: int, batch_size: int, num_images: int) -> None:
        self.kind, self.floor, self.total_steps = config.kind, config.min_lr_ratio, total_steps
        self.warmup = config.warmup.to_steps(batch_size=batch_size, images=num_images)
        self.cooldown = config.cooldown.to_steps(batch_size=batch_size, images=num_images)
        self.timescale = config.timescale.to_steps(batch_size=batch_size, images=num_images)
        if total_steps < 1:
            raise ConfigError(f"a schedule needs at least one step, got {total_steps}.")
        if self.warmup + self.cooldown > total_steps:
            both = f" and a cool-down of {config.cooldown}" if self.cooldown else ""
            raise ConfigError(
                f"a warm-up of {config.warmup}{both} is {self.warmup + self.cooldown} steps, but the whole run has "
                f"{total_steps}; try a shorter warm-up or a longer run."
            )
        if self.kind == "rsqrt" and self.timescale < 1:
            raise ConfigError(f"schedule.timescale={config.timescale}: rsqrt needs at least one step.")

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        factor = self._factor(step - self.warmup)
        if self.cooldown:
            left = max(self.total_steps - step, 0) / self.cooldown
            factor = self.floor + (factor - self.floor) * min(left, 1.0)
        return factor

    def _factor(self, past: int) -> float:
        """The factor `past` steps after the warm-up, without the cool-down."""
        progress = min(past / max(self.total_steps - self.warmup, 1), 1.0)
        match self.kind:
            case "cosine":
                return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * progress)) / 2
            case "linear":
                return self.floor + (1 - self.floor) * (1 - progress)
            case "rsqrt":
                return max(self.floor, 1 / math.sqrt(1 + past / self.timescale))
            case "constant":
                return 1.0
