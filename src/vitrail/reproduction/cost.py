"""Estimated duration of trials, from FLOPs and steps, corrected by the trials that are finished."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from vitrail.config import NetConfig, TrainConfig
from vitrail.errors import ConfigError
from vitrail.models.flops import training_flops
from vitrail.reproduction.arm import Arm, Trial
from vitrail.reproduction.planning import Plan
from vitrail.reproduction.results import Results, TrialResult


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
    "cpu": Speed(flops=70e9, step_s=0.004, start_s=2.0),
    "cuda": Speed(flops=40e12, step_s=0.012, start_s=5.0),
    "mps": Speed(flops=1e12, step_s=0.02, start_s=3.0),
}
LARGE_CUDA = Speed(flops=350e12, step_s=0.0, start_s=60.0)
"""A GPU with networks that fill it: 370 TFLOP/s were measured on an H200 with ViT-B/16 in bfloat16."""
LARGE_FLOPS = 2e9
"""FLOPs per image from which on a network fills a GPU."""


class CostModel:
    """Seconds per trial on one kind of device, and of a plan with several jobs."""

    def __init__(self, device: str, num_images: int, arms: Iterable[Arm], jobs: int = 1) -> None:
        """num_images: training images with those held out. arms: all arms of the experiment."""
        self.device, self.num_images, self.jobs = device, num_images, jobs
        self.arms = {arm.name: arm for arm in arms}
        self.correction = 1.0
        """Median of measured over estimated seconds of finished trials."""

    def seconds(self, arm: Arm) -> float:
        """Duration of one run."""
        steps = self.num_steps(arm.config)
        flops = training_flops(network_of(arm, self.arms))
        speed = SPEEDS.get(self.device, SPEEDS["cpu"])
        if self.device == "cuda" and flops > LARGE_FLOPS:
            speed = replace(LARGE_CUDA, flops=LARGE_CUDA.flops / self.jobs)
        work = steps * (speed.step_s + flops * _batch_size(arm.config) / speed.flops)
        return self.correction * (speed.start_s + work)

    def num_steps(self, config: TrainConfig) -> int:
        low, high = config.data.fraction_range
        images = round(self.num_images * (1 - (config.data.held_out or 0.0)) * (high - low))
        return config.duration.to_steps(batch_size=_batch_size(config), images=max(images, 1))

    def of_arm(self, arm: Arm, plan: Plan) -> float:
        return plan.count_trials(arm) * self.seconds(arm)

    def of_plan(self, plan: Plan) -> float:
        """Duration of a plan, its trials divided evenly over the jobs."""
        return sum(self.of_arm(arm, plan) for arm in plan.arms) / self.jobs

    def of_unfinished(self, plan: Plan, results: Results) -> float:
        """Duration of the trials of a plan that are not finished."""
        finished = [trial for trial in plan.trials(results) if trial.key in results.trials]
        return max(self.of_plan(plan) - sum(self.seconds(trial.arm) for trial in finished) / self.jobs, 0.0)

    def calibrate(self, finished: Iterable[tuple[Trial, TrialResult]]) -> None:
        """Set the correction from measured durations."""
        self.correction = 1.0
        ratios = [(r.seconds + r.measure_seconds) / self.seconds(trial.arm) for trial, r in finished if r.seconds]
        if ratios:
            self.correction = statistics.median(ratios)


def network_of(arm: Arm, arms: Mapping[str, Arm]) -> NetConfig:
    """The network that an arm trains: its own, or that of the arm that it starts from, at the arm's image size."""
    source = arm
    while source.config.model is None:
        if source.parent is None:
            raise ConfigError(f"the arm {arm.name} has neither a model nor a parent.")
        source = arms[source.parent]
    size = arm.config.image_size
    return source.config.model if size is None else source.config.model.replace(image_size=size)


def _batch_size(config: TrainConfig) -> int:
    return config.batch_size if isinstance(config.batch_size, int) else 256
