"""Speed of the whole training loop (data, augmentation, logging, checkpoints) relative to the bare training step.

The bare step is forward, backward, gradient clipping, optimizer and EMA on one batch that is already on the
device. The loop is `vitrail.train` with its own settings in a temporary folder. Rounds are interleaved.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from vitrail.config import TrainConfig, override, steps
from vitrail.errors import ConfigError, did_you_mean
from vitrail.recipes import RECIPES
from vitrail.runs.metrics_log import read_metrics
from vitrail.runs.run_folder import RunFolder
from vitrail.runtime import log
from vitrail.runtime.distributed import DistributedContext
from vitrail.training.checkpointing import Progress
from vitrail.training.loop import fit
from vitrail.training.setup import prepare_run
from vitrail.training.trainer import Trainer


def synchronized_time(device: torch.device) -> float:
    """The time after all work on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def bare(config: TrainConfig, count: int) -> float:
    """Images per second of the step alone."""
    with DistributedContext.from_env(config.device) as distributed:
        trainer = Trainer(prepare_run(config, distributed), distributed)
        with trainer.training_loader(Progress()) as batches:
            batch = next(batches)
            images, targets = trainer.augmentation(batches.cropped)(batch)
        images, targets = images.clone(), targets.clone()
        keys, total = trainer.sample_seeds(batch), batch.weights.sum()

        def step(number: int) -> None:
            trainer.backward(images, targets, batch.weights, keys, total)
            trainer.optimizer.clip_grad_norm(trainer.config.optim.grad_clip)
            trainer.optimizer.step(1e-3)
            if trainer.ema is not None:
                trainer.ema.update(number)

        for i in range(10):
            step(i)
        start = synchronized_time(distributed.device)
        for i in range(count):
            step(i)
        return count * trainer.batch_size / (synchronized_time(distributed.device) - start)


def whole(config: TrainConfig, count: int) -> float:
    """Images per second of the run, from its own log, without evaluations and the start."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder) / "run")
        fit(config.replace(duration=str(steps(count + 40)), evaluate_every=None, log_every="20 steps"), run)
        lines = [line for line in read_metrics(run.metrics) if "images_per_s" in line]
        return median(line["images_per_s"] for line in lines[2:])


@dataclass(frozen=True, kw_only=True)
class LoopSpeed:
    """Images per second of each round."""

    recipe: str
    bare: tuple[float, ...]
    loop: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Of the medians."""
        return median(self.loop) / median(self.bare)

    def to_dict(self) -> dict[str, Any]:
        medians = {"bare_images_per_s": median(self.bare), "loop_images_per_s": median(self.loop)}
        return {**asdict(self), **medians, "ratio": self.ratio}


def measure_loop(
    recipe: str = "digits",
    overrides: Sequence[str] = (),
    *,
    steps_per_round: int = 200,
    rounds: int = 3,
    progress: Callable[[str], None] = lambda what: None,
) -> LoopSpeed:
    """Measure the bare step and the loop of a recipe in turns."""
    if recipe not in RECIPES:
        raise ConfigError(f"unknown recipe {recipe!r}{did_you_mean(recipe, RECIPES)}")
    config = override(RECIPES[recipe](), [*overrides, "schedule.warmup=0 steps"])
    rows = []
    level = log.level
    log.setLevel("ERROR")
    try:
        for number in range(rounds):
            progress(f"{recipe}: round {number + 1} of {rounds}")
            rows.append((bare(config, steps_per_round), whole(config, steps_per_round)))
    finally:
        log.setLevel(level)
    bare_speeds, loop_speeds = zip(*rows, strict=True)
    return LoopSpeed(recipe=recipe, bare=bare_speeds, loop=loop_speeds)
