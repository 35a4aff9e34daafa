"""How much of the highest learning rate each step has: a rise, a way down, a fall at the end."""

from __future__ import annotations

import math

from vitrail.config import ScheduleConfig
from vitrail.errors import ConfigError


class Schedule:
    """`schedule(step)` in [0, 1], for the steps 0 ... total - 1.

    The warm-up ends at the peak: step i of W has (i + 1) / W, so that the very first step moves.
    From there on it is big_vision's formula: step i of the way down stands at
    i / (total - W), the end itself (`schedule(total)`, where no step is taken) at the floor, so
    that the last step moves too. Cosine and linear end at the floor by themselves; rsqrt and
    constant do with a cool-down.
    """

    def __init__(self, config: ScheduleConfig, *, total: int, batch_size: int, images: int) -> None:
        self.kind, self.floor, self.total = config.kind, config.min_lr_ratio, total
        self.warmup = config.warmup.to_steps(batch_size=batch_size, images=images)
        self.cooldown = config.cooldown.to_steps(batch_size=batch_size, images=images)
        self.timescale = config.timescale.to_steps(batch_size=batch_size, images=images)
        if total < 1:
            raise ConfigError(f"a run of {total} steps has no schedule: one step or more.")
        if self.warmup + self.cooldown > total:
            both = f" and a cool-down of {config.cooldown}" if self.cooldown else ""
            raise ConfigError(
                f"a warm-up of {config.warmup}{both} is {self.warmup + self.cooldown} steps, and the whole run has "
                f"{total}; make it shorter, or the run longer."
            )
        if self.kind == "rsqrt" and self.timescale < 1:
            raise ConfigError(f"rsqrt needs a timescale longer than {config.timescale}.")

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        height = self._height(step - self.warmup)
        if self.cooldown:
            left = max(self.total - step, 0) / self.cooldown
            height = self.floor + (height - self.floor) * min(left, 1.0)
        return height

    def _height(self, past: int) -> float:
        """So many steps after the warm-up, before any cool-down."""
        progress = min(past / max(self.total - self.warmup, 1), 1.0)
        match self.kind:
            case "cosine":
                return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * progress)) / 2
            case "linear":
                return self.floor + (1 - self.floor) * (1 - progress)
            case "rsqrt":
                return max(self.floor, 1 / math.sqrt(1 + past / self.timescale))
            case "constant":
                return 1.0
