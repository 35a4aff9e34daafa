"""Speed of the whole training loop (data, augmentation, logging, checkpoints) relative to the bare training step.

    python benchmarks/loop.py [RECIPE] [KEY=VALUE ...] [--steps 200] [--rounds 3]

The bare step is forward, backward, gradient clipping, optimizer and EMA on one batch that is already on the
device. The loop is `vitrail.train` with its own settings in a temporary folder. Rounds are interleaved, and medians
are compared.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from vitrail.config import TrainConfig, override, steps
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="digits", choices=list(RECIPES))
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    log.setLevel("ERROR")
    config = override(RECIPES[chosen.recipe](), [*chosen.settings, "schedule.warmup=0 steps"])
    rows = [(bare(config, chosen.steps), whole(config, chosen.steps)) for _ in range(chosen.rounds)]
    print(f"{'bare step':>12} {'loop':>12} {'ratio':>8}")
    for bare_speed, loop_speed in rows:
        print(f"{bare_speed:>10,.0f}/s {loop_speed:>10,.0f}/s {loop_speed / bare_speed:>8.1%}")
    bare_speed, loop_speed = (median(column) for column in zip(*rows, strict=True))
    print(f"medians: {bare_speed:,.0f} and {loop_speed:,.0f} images/s: {loop_speed / bare_speed:.1%}")


if __name__ == "__main__":
    main()
