"""Estimated duration of trials, from FLOPs and steps, corrected by the trials that are finished."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vitrail.config import TrainConfig
from vitrail.models.flops import training_flops
from vitrail.reproduction.experiment import Arm, Trial
from vitrail.reproduction.planning import Plan
from vitrail.reproduction.results import TrialResult


@dataclass(frozen=True)
class Speed:
    """Nominal speed of a kind of device for small networks; only a first guess."""

    flops: float
    """Per second and per run."""
    step_s: float
    """Seconds per step besides the FLOPs."""
    start_s: float
    """Seconds per run: data, first steps, final evaluation."""


SPEEDS: Mapping[str, Speed] = {
    "cpu": Speed(flops=20e9, step_s=0.004, start_s=2.0),
    "cuda": Speed(flops=60e12, step_s=0.012, start_s=5.0),
    "mps": Speed(flops=1e12, step_s=0.02, start_s=3.0),
}


class CostModel:
    """Seconds per trial on one kind of device, and of a plan with several jobs."""

    def __init__(self, device: str, num_images: int, jobs: int = 1) -> None:
        self.speed, self.num_images, self.jobs = SPEEDS.get(device, SPEEDS["cpu"]), num_images, jobs
        self.correction = 1.0
        """Median of measured over estimated seconds of finished trials."""

    def seconds(self, config: TrainConfig) -> float:
        """Duration of one run."""
        steps = self.num_steps(config)
        flops = 0 if config.model is None else training_flops(config.model) * steps * _batch_size(config)
        return self.correction * (self.speed.start_s + steps * self.speed.step_s + flops / self.speed.flops)

    def num_steps(self, config: TrainConfig) -> int:
        images = round(self.num_images * (1 - (config.data.held_out or 0.0)))
        return config.duration.to_steps(batch_size=_batch_size(config), images=max(images, 1))

    def of_arm(self, arm: Arm, plan: Plan) -> float:
        return plan.count_trials(arm) * self.seconds(arm.config)

    def of_plan(self, plan: Plan) -> float:
        """Duration of a plan, its trials divided evenly over the jobs."""
        return sum(self.of_arm(arm, plan) for arm in plan.arms) / self.jobs

    def calibrate(self, finished: Iterable[tuple[Trial, TrialResult]]) -> None:
        """Set the correction from measured durations."""
        self.correction = 1.0
        ratios = [result.seconds / self.seconds(trial.arm.config) for trial, result in finished if result.seconds]
        if ratios:
            self.correction = statistics.median(ratios)


def _batch_size(config: TrainConfig) -> int:
    return config.batch_size if isinstance(config.batch_size, int) else 256
