"""Kill a training run with SIGKILL at random moments, resume it each time, and compare with one left alone.

python tests/train/killing.py [--kills 50] [--seed 0]

Both runs end with the same bits in every weight, average and moment, and metrics.jsonl has each
step once. The test suite does the same with fewer kills. Runs are forked from one process that has
imported everything and computed nothing, so that a kill costs no new import.
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
import sklearn.datasets  # noqa: F401 - a run needs it
import torch._dynamo  # noqa: F401 - and this

from vitrail.config import AugmentConfig, OptimConfig, PreprocessConfig, TrainConfig, ViTConfig, steps
from vitrail.runtime import peak_flops
from vitrail.train.checkpointing import TENSORS
from vitrail.train.loop import fit
from vitrail.train.metrics_log import read_metrics
from vitrail.train.run_folder import RunFolder

START, SAVED = 0.5, 0.15
"""Seconds about in which a run starts, and in which it gets from one saved step to the next but one."""
TIMES = ("time", "images_per_s")
"""What a line of metrics says of the clock, not of the run."""


def small_run(length: int) -> TrainConfig:
    """A few seconds with everything on that could go differently a second time."""
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
    """The run in a process of its own; its number."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        sink = os.open(folder.parent / "log.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        run = RunFolder(folder)
        fit(run.read_config() if resume else small_run(length), run, resume=resume)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def ended(child: int, within: float) -> int | None:
    """The status of a process that ends in time, else None."""
    limit = time.monotonic() + within
    while time.monotonic() < limit:
        number, status = os.waitpid(child, os.WNOHANG)
        if number:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return None


def left_alone(folder: Path, length: int) -> None:
    """A run without interruption."""
    status = ended(start(folder, length, resume=False), within=600)
    if status != 0:
        raise RuntimeError(f"the run failed by itself:\n{(folder.parent / 'log.txt').read_text()}")


def killed(folder: Path, length: int, kills: int, rng: random.Random) -> list[int]:
    """The same run, killed so many times; the last steps that were saved before each kill."""
    seen: list[int] = []
    while True:
        child = start(folder, length, resume=RunFolder(folder).started)
        status = ended(child, 600.0) if len(seen) >= kills else waited(child, folder, rng)
        if status is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            seen.append((_steps(folder) or [0])[-1])
        elif status != 0:
            raise RuntimeError(f"a resumed run failed:\n{(folder.parent / 'log.txt').read_text()[-3000:]}")
        elif len(seen) >= kills:
            return seen
        else:
            shutil.rmtree(folder)  # done before its kills were: again from the start


def waited(child: int, folder: Path, rng: random.Random) -> int | None:
    """A random moment: while it starts, or from a saved step on; its status if it has ended by then."""
    if rng.random() < 0.2:
        return ended(child, rng.uniform(0, START))
    before, limit = _steps(folder), time.monotonic() + 60
    while _steps(folder) == before and time.monotonic() < limit:
        status = ended(child, 0.01)
        if status is not None:
            return status
    return ended(child, rng.uniform(0, SAVED))


def differences(one: Path, other: Path, length: int) -> list[str]:
    """What two finished runs do not share."""
    from safetensors.numpy import load_file

    found = []
    last = [folder / "checkpoint" / f"{length:08d}" / TENSORS for folder in (one, other)]
    for files in ([f / "model" / "model.safetensors" for f in (one, other)], last):
        left, right = (load_file(file) for file in files)
        found += [f"{files[0].name} holds other tensors"] if left.keys() != right.keys() else []
        found += [f"{name} differs" for name in left if not np.array_equal(left[name], right.get(name), equal_nan=True)]
    lines = [
        [{k: v for k, v in line.items() if k not in TIMES} for line in read_metrics(folder / "metrics.jsonl")]
        for folder in (one, other)
    ]
    if lines[0] != lines[1]:
        found.append("metrics.jsonl differs")
    logged = [line["step"] for line in lines[1] if "loss" in line]
    if logged != sorted(set(logged)):
        found.append("metrics.jsonl has a step twice")
    return found


def survive(folder: Path, kills: int, seed: int = 0) -> tuple[list[int], list[str]]:
    """Where it was killed, and what differs in the end."""
    whole, cut = folder / "whole" / "run", folder / "cut" / "run"
    for path in (whole, cut):
        path.parent.mkdir(parents=True)
    length = max(40, 5 * kills)
    left_alone(whole, length)
    seen = killed(cut, length, kills, random.Random(seed))
    return seen, differences(whole, cut, length)


def _steps(folder: Path) -> list[int]:
    names = [p.parent.name for p in (folder / "checkpoint").glob("*/state.json")]
    return sorted(int(name) for name in names if name.isdecimal())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    peak_flops.MEASUREMENT_S = 0.0  # what is measured for the display
    with tempfile.TemporaryDirectory() as folder:
        seen, differ = survive(Path(folder), chosen.kills, chosen.seed)
    print(f"{len(seen)} kills, the last saved step before each: {' '.join(map(str, seen))}")
    print("\n".join(differ) or "every weight, average and moment has the same bits; metrics.jsonl has each step once")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
