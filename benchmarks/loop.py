"""How much of a bare training step's speed is left in the whole loop: reading, augmentation, logging, checkpoints.

python benchmarks/loop.py [RECIPE] [KEY=VALUE ...] [--steps 200] [--rounds 3]

The bare step is forward, backward, clipping, optimizer and average on one batch that is there
already, nothing else. The loop is `vitrail.train` itself, at its own settings, into a temporary
folder. Both are measured in turns, and medians are compared.
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
from vitrail.runtime import log
from vitrail.train.distributed import DistributedContext
from vitrail.train.loop import fit
from vitrail.train.metrics_log import read_metrics
from vitrail.train.run_folder import RunFolder
from vitrail.train.setup import prepare_run
from vitrail.train.trainer import Trainer


def waited(device: torch.device) -> float:
    """The time, when the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def bare(config: TrainConfig, count: int) -> float:
    """Images a second of the step alone."""
    with DistributedContext.from_env(config.device) as distributed:
        trainer = Trainer(prepare_run(config, distributed), distributed)
        with trainer.training_loader(0) as batches:
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
        start = waited(distributed.device)
        for i in range(count):
            step(i)
        return count * trainer.batch_size / (waited(distributed.device) - start)


def whole(config: TrainConfig, count: int) -> float:
    """Images a second of the run, from its own log: evaluations and the start left out."""
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
    print(f"{'bare step':>12} {'loop':>12} {'share':>8}")
    for alone, all_of_it in rows:
        print(f"{alone:>10,.0f}/s {all_of_it:>10,.0f}/s {all_of_it / alone:>8.1%}")
    alone, all_of_it = (median(column) for column in zip(*rows, strict=True))
    print(f"medians: {alone:,.0f} and {all_of_it:,.0f} images/s: {all_of_it / alone:.1%}")


if __name__ == "__main__":
    main()
