"""Helpers of the training tests: short runs on small data, ways to interrupt them, and readers of their results."""

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
from vitrail.runs.metrics_log import read_metrics
from vitrail.runs.run_folder import RunFolder
from vitrail.training.loop import FitResult, fit
from vitrail.training.run_logger import RunLogger
from vitrail.weights import checkpoint

LENGTH = 20
TINY = {"width": 16, "depth": 2, "num_heads": 2, "mlp_dim": 32}
TINY_OVERRIDES = tuple(f"model.{name}={value}" for name, value in TINY.items())
SMALL = (
    *TINY_OVERRIDES, "batch_size=64", "compare=()",
    "data.workers=1",
    "data.resident=false", "schedule.warmup=0 steps", "log_every=3 steps", "evaluate_every=24 steps",
    "checkpoint_every=10 steps", "--no-report",
)  # fmt: skip
"""Settings with which `vitrail train digits` takes a few seconds."""


def digits_model(**changes: Any) -> ViTConfig:
    """A tiny network for the 8 x 8 digits, with dropout and stochastic depth."""
    size = {"image_size": 8, "patch_size": 4, "channels": 1, "num_classes": 0}
    return ViTConfig(**size | {**TINY, "dropout": 0.1, "drop_path": 0.1} | changes)


def digits_config(length: int = LENGTH, **changes: Any) -> TrainConfig:
    """Config of a half-second run with dropout and random augmentation."""
    config = TrainConfig(
        name="small",
        model=digits_model(),
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


def make_photos(folder: Path, classes: dict[str, int], *, side: int = 32, seed: int = 0) -> Path:
    """Write a folder of noisy JPEGs in which each class has its own color."""
    rng = np.random.default_rng(seed)
    for number, (name, count) in enumerate(classes.items()):
        (folder / name).mkdir(parents=True)
        color = np.roll([200, 60, 20], number) + 10 * (number // 3)
        for i in range(count):
            noise = rng.integers(-40, 40, (side, side + 4 * (i % 3), 3))
            Image.fromarray((color + noise).clip(0, 255).astype(np.uint8)).save(folder / name / f"{i:03d}.jpg")
    return folder


def photo_config(folder: Path, length: int = 6, **changes: Any) -> TrainConfig:
    """Config of a few steps on such a folder, read in the training process."""
    config = digits_config(length).replace(
        model=ViTConfig(image_size=16, patch_size=8, num_classes=0, **TINY),
        preprocess=PreprocessConfig(image_size=16),
        augment=AugmentConfig(scale=(0.5, 1.0)),
        data={"source": str(folder), "workers": 0},
        batch_size=8,
        evaluate_every=None,
    )
    return config.replace(**changes)


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread, as tests do, for results they are compared with: the bits depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def train_run(config: TrainConfig, folder: Path, *, resume: bool = False) -> FitResult:
    return fit(config, RunFolder(folder), resume=resume)


def resume_run(folder: Path) -> FitResult:
    return train_run(RunFolder(folder).read_config(), folder, resume=True)


@contextmanager
def at_step(step: int, action: Callable[[RunLogger], object]) -> Iterator[None]:
    """Call `action` right after this step of a run."""
    add_step = RunLogger.add_step

    def add_step_and_act(self: RunLogger, *args: Any) -> None:
        add_step(self, *args)
        if self.progress.step == step:
            action(self)

    RunLogger.add_step = add_step_and_act  # type: ignore[method-assign]
    try:
        yield
    finally:
        RunLogger.add_step = add_step  # type: ignore[method-assign]


def send_sigterm(_: RunLogger) -> None:
    """Send SIGTERM to this process, as a scheduler does."""
    os.kill(os.getpid(), signal.SIGTERM)


def interrupt_run(config: TrainConfig, folder: Path, step: int) -> FitResult:
    """Train until SIGTERM stops the run after this step."""
    with at_step(step, send_sigterm):
        result = train_run(config, folder)
    assert (result.stop_reason, result.progress.step) == ("SIGTERM", step)
    assert not result.run.finished
    return result


def model_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Weights of the model in a run folder."""
    net, _ = checkpoint.read(folder / "model")
    return net.state_dict()


def identical_weights(first: Path, second: Path) -> bool:
    left, right = model_weights(first), model_weights(second)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def file_contents(folder: Path) -> dict[Path, bytes]:
    """Contents of every file in the folder."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def logged_metrics(folder: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl, without the entries that depend on the clock."""
    return [
        {k: v for k, v in line.items() if k not in ("time", "images_per_s")}
        for line in read_metrics(folder / "metrics.jsonl")
    ]


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(p.name) for p in (folder / "checkpoint").iterdir() if p.name.isdecimal())
