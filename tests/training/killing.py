"""Kill a training run with SIGKILL at random moments, resume it each time, and compare it with an uninterrupted run.

python tests/training/killing.py [--kills 50] [--seed 0]

Both runs must have identical weights, weight averages and optimizer moments, and metrics.jsonl must
contain each step once. The test suite does the same with fewer kills. Runs are forked from one process
that has imported all modules without computing anything, so that no kill costs a new import.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import numpy as np
import sklearn.datasets  # noqa: F401 - imported once for all runs
import torch._dynamo  # noqa: F401 - likewise

from vitrail.config import AugmentConfig, OptimConfig, PreprocessConfig, TrainConfig, ViTConfig, steps
from vitrail.runs.metrics_log import read_metrics
from vitrail.runs.run_folder import RunFolder
from vitrail.runtime import peak_flops
from vitrail.training.checkpointing import TENSORS
from vitrail.training.loop import fit

START_S, CHECKPOINT_S = 0.5, 0.15
"""Approximate seconds in which a run starts, and in which it writes two checkpoints."""
TIMING_KEYS = ("time", "images_per_s")
"""Entries of a metrics line that depend on the clock."""


def small_config(length: int) -> TrainConfig:
    """Config of a run of a few seconds that uses every source of randomness."""
    return TrainConfig(
        name="killed",
        model=ViTConfig(
            image_size=8, patch_size=2, channels=1, num_classes=0, width=32, depth=2, num_heads=2, mlp_dim=64,
            dropout=0.1,
            attention_dropout=0.1, drop_path=0.1,
        ),
        preprocess=PreprocessConfig(image_size=8, mean=(0.5,), std=(0.5,)),
        augment=AugmentConfig(scale=(0.5, 1.0), color_jitter=(0.2, 0.2, 0.0, 0.0), erase=0.2, mixup=0.5, cutmix=1.0),
        optim=OptimConfig(lr=1e-3, weight_decay=0.05),
        duration=steps(length),
        batch_size=64,
        ema=0.9,
        log_every=steps(3),
        evaluate_every=steps(10),
        checkpoint_every=steps(4),
        keep="best",
    )  # fmt: skip


def start(folder: Path, length: int, *, resume: bool) -> int:
    """Start the run in a forked process; returns its pid."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        log = os.open(folder.parent / "log.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        run = RunFolder(folder)
        fit(run.read_config() if resume else small_config(length), run, resume=resume)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def wait_for_exit(child: int, timeout: float) -> int | None:
    """Exit status of the process, or None if it does not end in time."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return None


def run_uninterrupted(folder: Path, length: int) -> None:
    """Run without any kill."""
    status = wait_for_exit(start(folder, length, resume=False), timeout=600)
    if status != 0:
        raise RuntimeError(f"the uninterrupted run failed:\n{(folder.parent / 'log.txt').read_text()}")


def run_with_kills(folder: Path, length: int, kills: int, rng: random.Random) -> list[int]:
    """The same run, killed `kills` times; returns the last saved step before each kill."""
    steps_at_kills: list[int] = []
    while True:
        child = start(folder, length, resume=RunFolder(folder).started)
        status = (
            wait_for_exit(child, 600.0) if len(steps_at_kills) >= kills else wait_for_random_moment(child, folder, rng)
        )
        if status is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            steps_at_kills.append((_steps(folder) or [0])[-1])
        elif status != 0:
            raise RuntimeError(f"a resumed run failed:\n{(folder.parent / 'log.txt').read_text()[-3000:]}")
        elif len(steps_at_kills) >= kills:
            return steps_at_kills
        else:
            shutil.rmtree(folder)  # finished before all kills were done: start again


def wait_for_random_moment(child: int, folder: Path, rng: random.Random) -> int | None:
    """Wait until a random moment of the start-up or after a checkpoint; exit status if the run has ended by then."""
    if rng.random() < 0.2:
        return wait_for_exit(child, rng.uniform(0, START_S))
    steps_before, deadline = _steps(folder), time.monotonic() + 60
    while _steps(folder) == steps_before and time.monotonic() < deadline:
        status = wait_for_exit(child, 0.01)
        if status is not None:
            return status
    return wait_for_exit(child, rng.uniform(0, CHECKPOINT_S))


def differences(first: Path, second: Path, length: int) -> list[str]:
    """Describe the differences between two finished runs."""
    from safetensors.numpy import load_file

    messages = []
    checkpoints = [folder / "checkpoint" / f"{length:08d}" / TENSORS for folder in (first, second)]
    for files in ([f / "model" / "model.safetensors" for f in (first, second)], checkpoints):
        left, right = (load_file(file) for file in files)
        messages += [f"{files[0].name} has different tensor names"] if left.keys() != right.keys() else []
        messages += [
            f"{name} differs" for name in left if not np.array_equal(left[name], right.get(name), equal_nan=True)
        ]
    metrics = [
        [{k: v for k, v in line.items() if k not in TIMING_KEYS} for line in read_metrics(folder / "metrics.jsonl")]
        for folder in (first, second)
    ]
    if metrics[0] != metrics[1]:
        messages.append("metrics.jsonl differs")
    logged_steps = [line["step"] for line in metrics[1] if "loss" in line]
    if logged_steps != sorted(set(logged_steps)):
        messages.append("metrics.jsonl has a step twice")
    return messages


def compare_with_kills(folder: Path, kills: int, seed: int = 0) -> tuple[list[int], list[str]]:
    """The last saved step before each kill, and the differences from an uninterrupted run."""
    uninterrupted, killed = folder / "uninterrupted" / "run", folder / "killed" / "run"
    for path in (uninterrupted, killed):
        path.parent.mkdir(parents=True)
    length = max(40, 5 * kills)
    run_uninterrupted(uninterrupted, length)
    steps_at_kills = run_with_kills(killed, length, kills, random.Random(seed))
    return steps_at_kills, differences(uninterrupted, killed, length)


def _steps(folder: Path) -> list[int]:
    names = [p.parent.name for p in (folder / "checkpoint").glob("*/state.json")]
    return sorted(int(name) for name in names if name.isdecimal())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    peak_flops.MEASUREMENT_S = 0.0  # only the display uses it
    with tempfile.TemporaryDirectory() as folder:
        steps_at_kills, messages = compare_with_kills(Path(folder), args.kills, args.seed)
    print(f"{len(steps_at_kills)} kills, the last saved step before each: {' '.join(map(str, steps_at_kills))}")
    print("\n".join(messages) or "all weights, averages and moments are identical; metrics.jsonl has each step once")
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
