"""The same run on 1, 2 and 4 processes computes the same thing, and goes on on another number of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from train.processes import Processes

from vitrail.config import (
    AugmentConfig,
    MaskedPatchConfig,
    OptimConfig,
    PreprocessConfig,
    ScheduleConfig,
    TrainConfig,
    ViTConfig,
    override,
    steps,
)
from vitrail.train.loop import fit
from vitrail.train.metrics_log import read_metrics
from vitrail.train.run_folder import RunFolder

STEPS = 30
EXACT = 1e-9
"""Relative, in float64."""


def everything_on(**changes: Any) -> TrainConfig:
    """All that could depend on who computes it: augmentation, mixing, dropout, stochastic depth, average, clipping."""
    config = TrainConfig(
        name="same",
        model=ViTConfig(
            image_size=8,
            patch_size=2,
            channels=1,
            num_classes=0,
            width=16,
            depth=2,
            num_heads=2,
            mlp_dim=32,
            dropout=0.1,
            drop_path=0.2,
        ),
        preprocess=PreprocessConfig(image_size=8, mean=(0.5,), std=(0.5,)),
        augment=AugmentConfig(
            scale=(0.4, 1.0),
            policy="rand",
            num_ops=1,
            color_jitter=(0.3, 0.3, 0.0, 0.0),
            erase=0.3,
            mixup=0.5,
            cutmix=1.0,
            mix_prob=0.5,
            mix_group=4,
        ),
        optim=OptimConfig(lr=2e-2, weight_decay=0.1, layer_decay=0.8),
        schedule=ScheduleConfig(warmup=steps(5)),
        duration=steps(STEPS),
        batch_size=16,
        ema=0.9,
        precision="float64",
        device="cpu",
        log_every=steps(1),
        evaluate_every=steps(15),
        checkpoint_every=steps(12),
    )
    return config.replace(**changes)


def train_here(config: dict[str, Any], folder: str, resume: bool = False) -> int:
    """In one of several processes."""
    result = fit(TrainConfig.from_dict(config), RunFolder(Path(folder)), resume=resume)
    return result.progress.step


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes(4) as started:
        yield started


@pytest.fixture(scope="module")
def alone(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on one process, which all others are held against."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert processes.run(train_here, everything_on().to_dict(), str(folder), world=1) == [STEPS]
    return folder


def losses(folder: Path) -> list[float]:
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return [line["loss"] for line in lines]


def evaluations(folder: Path) -> list[dict[str, float]]:
    return [line["evaluation"] for line in read_metrics(folder / "metrics.jsonl") if "evaluation" in line]


@pytest.mark.parametrize(
    ("world", "changes"),
    [(2, []), (4, []), (2, ["grad_accum_steps=4", "gradient_checkpointing=true"]), (2, ["parallel=fsdp"])],
    ids=["2", "4", "2 in parts", "2 sharded"],
)
def test_the_run_is_the_same(processes: Processes, alone: Path, tmp_path: Path, world: int, changes: list[str]):
    config = override(everything_on(), changes).to_dict()
    assert processes.run(train_here, config, str(tmp_path / "run"), world=world) == [STEPS] * world
    assert losses(tmp_path / "run") == pytest.approx(losses(alone), rel=EXACT)
    for mine, theirs in zip(evaluations(alone), evaluations(tmp_path / "run"), strict=True):
        assert mine["count"] > 300
        assert theirs == pytest.approx(mine, rel=EXACT)


def test_it_learned_and_drew_meanwhile(processes: Processes, alone: Path, tmp_path: Path):
    """Agreement is no accident: losses move away from that of a guess, and another seed gives others."""
    assert max(abs(loss - math.log(10)) for loss in losses(alone)) > 0.05
    config = everything_on(seed=1, duration="6 steps").to_dict()
    processes.run(train_here, config, str(tmp_path / "run"), world=1)
    last = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line][-1]
    assert last["loss"] != pytest.approx(losses(alone)[5], rel=1e-3)


@pytest.mark.parametrize(("before", "after", "parallel"), [(2, 1, "ddp"), (1, 4, "ddp"), (2, 4, "fsdp")])
def test_a_run_goes_on_on_another_number_of_processes(
    processes: Processes, alone: Path, tmp_path: Path, before: int, after: int, parallel: str
):
    config, folder = everything_on(parallel=parallel).to_dict(), tmp_path / "run"
    assert processes.run(train_half, config, str(folder), world=before) == [17] * before
    assert processes.run(train_here, config, str(folder), True, world=after) == [STEPS] * after
    assert losses(folder) == pytest.approx(losses(alone), rel=EXACT)


def train_half(config: dict[str, Any], folder: str) -> int:
    """Until a signal stops it, in the middle."""
    import os
    import signal

    from vitrail.train.run_logger import RunLogger

    count = RunLogger.add_step

    def interrupted(self: RunLogger, *args: Any) -> None:
        count(self, *args)
        if self.progress.step == 17 and self.distributed.rank == self.distributed.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    RunLogger.add_step = interrupted  # type: ignore[method-assign]
    try:
        result = fit(TrainConfig.from_dict(config), RunFolder(Path(folder)))
    finally:
        RunLogger.add_step = count  # type: ignore[method-assign]
    assert result.stop_reason in ("SIGTERM", "another process")
    assert result.progress.step == 17
    return result.progress.step


@pytest.mark.parametrize("target", ["mean-color", "pixels"])
def test_masked_patches_agree_too(processes: Processes, tmp_path: Path, target: str):
    config = everything_on(
        objective="masked-patch", masked_patch=MaskedPatchConfig(target=target).to_dict(),
        augment=AugmentConfig(scale=(0.4, 1.0)).to_dict(), evaluate_every=None,
        optim=OptimConfig(lr=3e-3).to_dict(),  # at ten times that, rounding alone may grow past the bound
    )  # fmt: skip
    for world in (1, 2):
        processes.run(train_here, config.to_dict(), str(tmp_path / str(world)), world=world)
    one, two = (losses(tmp_path / world) for world in "12")
    assert two == pytest.approx(one, rel=EXACT)
    (held,), (held_by_two,) = (evaluations(tmp_path / world) for world in "12")
    assert held_by_two == pytest.approx(held, rel=EXACT)
