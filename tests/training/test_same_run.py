"""A run has the same losses on 1, 2 and 4 four_processes, and can be resumed on a different number."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from training.processes import Processes
from training.small_runs import digits_model

from vitrail.config import (
    AugmentConfig,
    MaskedPatchConfig,
    OptimConfig,
    PreprocessConfig,
    ScheduleConfig,
    TrainConfig,
    override,
    steps,
)
from vitrail.runs.metrics_log import read_metrics
from vitrail.runs.run_folder import RunFolder
from vitrail.training.loop import fit

STEPS = 30
RELATIVE_TOLERANCE = 1e-9
"""Relative tolerance in float64."""


def all_randomness_config(**changes: Any) -> TrainConfig:
    """Config with all that could depend on the number of processes: augmentation, mixing, dropout, EMA, clipping."""
    config = TrainConfig(
        name="same",
        model=digits_model(patch_size=2, drop_path=0.2),
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


def train_in_process(config: dict[str, Any], folder: str, resume: bool = False) -> int:
    """Train in one process of a group."""
    result = fit(TrainConfig.from_dict(config), RunFolder(Path(folder)), resume=resume)
    return result.progress.step


@pytest.fixture(scope="module")
def reference_run(four_processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on one process, with which the others are compared."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    assert four_processes.run(train_in_process, all_randomness_config().to_dict(), str(folder), world=1) == [STEPS]
    return folder


def losses(folder: Path) -> list[float]:
    loss_lines = [line for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in loss_lines] == list(range(1, STEPS + 1))
    return [line["loss"] for line in loss_lines]


def evaluations(folder: Path) -> list[dict[str, float]]:
    return [line["evaluation"] for line in read_metrics(folder / "metrics.jsonl") if "evaluation" in line]


@pytest.mark.parametrize(
    ("world", "changes"),
    [
        (2, []),
        (4, []),
        (2, ["grad_accum_steps=4", "gradient_checkpointing=true"]),
        (2, ["parallel=fsdp"]),
        (4, ["parallel=hsdp", "shard_size=2"]),
        pytest.param(4, ["parallel=hsdp", "shard_size=2", "optim.kind=muon"], marks=pytest.mark.slow),
    ],
    ids=["2", "4", "2 in parts", "2 sharded", "2 x 2 sharded", "2 x 2 sharded, muon"],
)
def test_losses_do_not_depend_on_the_number_of_processes(
    four_processes: Processes, reference_run: Path, tmp_path: Path, world: int, changes: list[str]
):
    config = override(all_randomness_config(), changes).to_dict()
    assert four_processes.run(train_in_process, config, str(tmp_path / "run"), world=world) == [STEPS] * world
    if "optim.kind=muon" in changes:
        reference_run = tmp_path / "reference"
        config = override(all_randomness_config(), ["optim.kind=muon"]).to_dict()
        four_processes.run(train_in_process, config, str(reference_run), world=1)
    assert losses(tmp_path / "run") == pytest.approx(losses(reference_run), rel=RELATIVE_TOLERANCE)
    for expected, got in zip(evaluations(reference_run), evaluations(tmp_path / "run"), strict=True):
        assert expected["count"] > 300
        assert got == pytest.approx(expected, rel=RELATIVE_TOLERANCE)


def test_run_learns_and_depends_on_the_seed(four_processes: Processes, reference_run: Path, tmp_path: Path):
    """Control for the comparisons: losses differ from that of chance, and another seed gives other losses."""
    assert max(abs(loss - math.log(10)) for loss in losses(reference_run)) > 0.05
    config = all_randomness_config(seed=1, duration="6 steps").to_dict()
    four_processes.run(train_in_process, config, str(tmp_path / "run"), world=1)
    last_line = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line][-1]
    assert last_line["loss"] != pytest.approx(losses(reference_run)[5], rel=1e-3)


@pytest.mark.parametrize(
    ("before", "after", "parallel"),
    [(2, 1, "ddp"), (1, 4, "ddp"), (2, 4, "fsdp"), (4, 2, "hsdp"), pytest.param(2, 4, "hsdp", marks=pytest.mark.slow)],
)
def test_run_resumes_on_a_different_number_of_processes(
    four_processes: Processes, reference_run: Path, tmp_path: Path, before: int, after: int, parallel: str
):
    """hsdp: in groups of two processes, so that the number of groups changes."""
    size = 2 if parallel == "hsdp" else None
    config, folder = all_randomness_config(parallel=parallel, shard_size=size).to_dict(), tmp_path / "run"
    assert four_processes.run(train_until_interrupted, config, str(folder), world=before) == [17] * before
    assert four_processes.run(train_in_process, config, str(folder), True, world=after) == [STEPS] * after
    assert losses(folder) == pytest.approx(losses(reference_run), rel=RELATIVE_TOLERANCE)


def train_until_interrupted(config: dict[str, Any], folder: str) -> int:
    """Train until SIGTERM stops the run in the middle."""
    import os
    import signal

    from vitrail.training.run_logger import RunLogger

    add_step = RunLogger.add_step

    def add_step_and_stop(self: RunLogger, *args: Any) -> None:
        add_step(self, *args)
        if self.progress.step == 17 and self.distributed.rank == self.distributed.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    RunLogger.add_step = add_step_and_stop  # type: ignore[method-assign]
    try:
        result = fit(TrainConfig.from_dict(config), RunFolder(Path(folder)))
    finally:
        RunLogger.add_step = add_step  # type: ignore[method-assign]
    assert result.stop_reason in ("SIGTERM", "another process")
    assert result.progress.step == 17
    return result.progress.step


@pytest.mark.parametrize("target", ["mean-color", "pixels"])
def test_masked_patch_losses_do_not_depend_on_the_number_of_processes(
    four_processes: Processes, tmp_path: Path, target: str
):
    config = all_randomness_config(
        objective="masked-patch", masked_patch=MaskedPatchConfig(target=target).to_dict(),
        augment=AugmentConfig(scale=(0.4, 1.0)).to_dict(), evaluate_every=None,
        optim=OptimConfig(lr=3e-3).to_dict(),  # at ten times this rate, rounding errors may exceed the tolerance
    )  # fmt: skip
    for world in (1, 2):
        four_processes.run(train_in_process, config.to_dict(), str(tmp_path / str(world)), world=world)
    single, pair = (losses(tmp_path / world) for world in "12")
    assert pair == pytest.approx(single, rel=RELATIVE_TOLERANCE)
    (single_scores,), (pair_scores,) = (evaluations(tmp_path / world) for world in "12")
    assert pair_scores == pytest.approx(single_scores, rel=RELATIVE_TOLERANCE)
