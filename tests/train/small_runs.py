"""Short runs on small data, ways to stop them, and what is left of them: what tests of training share."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from vitrail.config import AugmentConfig, DataConfig, OptimConfig, PreprocessConfig, TrainConfig, ViTConfig, steps
from vitrail.train.loop import FitResult, fit
from vitrail.train.metrics_log import read_metrics
from vitrail.train.run_folder import RunFolder
from vitrail.train.run_logger import RunLogger
from vitrail.weights import checkpoint

LENGTH = 20
SMALL = (
    "model.width=16", "model.depth=2", "model.num_heads=2", "model.mlp_dim=32", "batch_size=64", "compare=()",
    "data.workers=1",
    "data.resident=false", "schedule.warmup=0 steps", "log_every=3 steps", "evaluate_every=24 steps",
    "checkpoint_every=10 steps", "--no-report",
)  # fmt: skip
"""Settings that make the command `vitrail train digits` a matter of seconds."""


def digits(length: int = LENGTH, **changes: Any) -> TrainConfig:
    """Half a second of learning, with chance in the network and in the images."""
    config = TrainConfig(
        name="small",
        model=ViTConfig(
            image_size=8,
            patch_size=4,
            channels=1,
            num_classes=0,
            width=16,
            depth=2,
            num_heads=2,
            mlp_dim=32,
            dropout=0.1,
            drop_path=0.1,
        ),
        preprocess=PreprocessConfig(image_size=8, mean=(0.5,), std=(0.5,)),
        augment=AugmentConfig(crop="pad", pad=1, flip=0.0, erase=0.2),
        optim=OptimConfig(lr=1e-2, weight_decay=0.05),
        data=DataConfig(workers=0),
        duration=steps(length),
        batch_size=64,
        device="cpu",
        log_every=steps(3),
        evaluate_every=steps(5),
        checkpoint_every=steps(4),
    )
    return config.replace(**changes)


def photos(folder: Path, classes: dict[str, int], *, side: int = 32, seed: int = 0) -> Path:
    """A folder of JPEGs: each class is a color of its own, with noise."""
    drawn = np.random.default_rng(seed)
    for number, (name, count) in enumerate(classes.items()):
        (folder / name).mkdir(parents=True)
        color = np.roll([200, 60, 20], number) + 10 * (number // 3)
        for i in range(count):
            noise = drawn.integers(-40, 40, (side, side + 4 * (i % 3), 3))
            Image.fromarray((color + noise).clip(0, 255).astype(np.uint8)).save(folder / name / f"{i:03d}.jpg")
    return folder


def on_photos(folder: Path, length: int = 6, **changes: Any) -> TrainConfig:
    """A few steps on such a folder, read by whoever trains."""
    config = digits(length).replace(
        model=ViTConfig(image_size=16, patch_size=8, num_classes=0, width=16, depth=2, num_heads=2, mlp_dim=32),
        preprocess=PreprocessConfig(image_size=16),
        augment=AugmentConfig(scale=(0.5, 1.0)),
        data={"source": str(folder), "workers": 0},
        batch_size=8,
        evaluate_every=None,
    )
    return config.replace(**changes)


@contextmanager
def one_thread() -> Iterator[None]:
    """For what is made before a test begins and held against it: bits depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def trained(config: TrainConfig, folder: Path, *, resume: bool = False) -> FitResult:
    return fit(config, RunFolder(folder), resume=resume)


def resumed(folder: Path) -> FitResult:
    return trained(RunFolder(folder).read_config(), folder, resume=True)


@contextmanager
def at_step(number: int, action: Callable[[RunLogger], object]) -> Iterator[None]:
    """Do something in the middle of a run, right after this step."""
    count = RunLogger.add_step

    def counted(self: RunLogger, *args: Any) -> None:
        count(self, *args)
        if self.progress.step == number:
            action(self)

    RunLogger.add_step = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        RunLogger.add_step = count  # type: ignore[method-assign]


def stop(_: RunLogger) -> None:
    """What a scheduler does to a process."""
    os.kill(os.getpid(), signal.SIGTERM)


def interrupted(config: TrainConfig, folder: Path, step: int) -> FitResult:
    """A run that a signal stops after this step."""
    with at_step(step, stop):
        result = trained(config, folder)
    assert (result.stop_reason, result.progress.step) == ("SIGTERM", step)
    assert not result.run.finished
    return result


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Of the model in a run folder."""
    net, _ = checkpoint.read(folder / "model")
    return net.state_dict()


def same_bits(one: Path, other: Path) -> bool:
    left, right = weights(one), weights(other)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def contents(folder: Path) -> dict[Path, bytes]:
    """Of all files."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def lines(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl, without what it says of the clock."""
    return [
        {k: v for k, v in line.items() if k not in ("time", "images_per_s")}
        for line in read_metrics(folder / "metrics.jsonl")
    ]


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(p.name) for p in (folder / "checkpoint").iterdir() if p.name.isdecimal())
