"""Runs with sharded weights: checkpoints do not block training, and no process ever holds the whole model."""

from __future__ import annotations

import json
import os
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from training.processes import Processes
from training.small_runs import at_step, digits_config, digits_model, identical_weights, saved_steps, train_run

from vitrail.config import SwinConfig, TrainConfig
from vitrail.errors import ConfigError
from vitrail.runs.run_folder import RunFolder
from vitrail.runtime.distributed import DistributedContext
from vitrail.training import checkpointing, muon
from vitrail.training.checkpointing import CheckpointManager
from vitrail.training.parallel import _shard_size, full_tensor
from vitrail.training.run_logger import RunLogger
from vitrail.training.snapshots import SnapshotWriter

LENGTH = 12


def sharded_config(**changes: Any) -> dict[str, Any]:
    """Config with checkpoints at steps 4, 8 and 12."""
    quiet = {"log_every": "1k steps", "evaluate_every": None, "keep": "last", "parallel": "fsdp"}
    return digits_config(LENGTH, **quiet | changes).to_dict()


def train(config: dict[str, Any], folder: str, resume: bool = False) -> int:
    return train_run(TrainConfig.from_dict(config), Path(folder), resume=resume).progress.step


@pytest.fixture(scope="module")
def reference_run(two_processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert two_processes.run(train, sharded_config(), str(folder)) == [LENGTH, LENGTH]
    return folder


# Checkpoints in the background


def train_while_writing(config: dict[str, Any], folder: str) -> list[list[int]]:
    """Train while the checkpoint of step 4 is not written before step 7; returns what is complete at steps 6 and 10."""
    release, write, seen = threading.Event(), CheckpointManager._write_sharded, []

    def write_late(self: CheckpointManager, *args: Any) -> None:
        assert release.wait(30), "training waits for the checkpoint"
        write(self, *args)

    def look(logger: RunLogger) -> None:
        if release.is_set():
            logger.checkpoints.wait()
            logger.distributed.barrier()
        seen.append(logger.checkpoints.steps())

    CheckpointManager._write_sharded = write_late  # type: ignore[method-assign]
    try:
        with at_step(6, look), at_step(7, lambda _: release.set()), at_step(10, look):
            train(config, folder)
    finally:
        CheckpointManager._write_sharded = write  # type: ignore[method-assign]
    return seen


def test_training_goes_on_while_shards_are_written(
    two_processes: Processes, reference_run: Path, tmp_path: Path
) -> None:
    results = two_processes.run(train_while_writing, sharded_config(), str(tmp_path / "run"))
    assert results == [[[], [4, 8]]] * 2
    assert saved_steps(tmp_path / "run") == [8, LENGTH]
    assert identical_weights(tmp_path / "run", reference_run)


def die_while_writing(config: dict[str, Any], folder: str) -> None:
    """Train; at step 10 one process is killed while the shards of step 8 are there, but their state is not."""
    write_json = checkpointing.write_json

    def write_json_late(path: Path, value: Any, **options: Any) -> None:
        if "00000008" in str(path):
            time.sleep(60)
        write_json(path, value, **options)

    def die(logger: RunLogger) -> None:
        shards = logger.run.checkpoints / ".00000008.tmp" / "shards"
        while logger.distributed.is_main and len(list(shards.glob("*.safetensors"))) < 2:
            time.sleep(0.01)
        if logger.distributed.is_main:
            os.kill(os.getpid(), signal.SIGKILL)

    checkpointing.write_json = write_json_late
    with at_step(10, die):
        train(config, folder)


def test_checkpoint_that_was_being_written_at_a_kill_is_not_used(
    two_processes: Processes, reference_run: Path, tmp_path: Path
) -> None:
    killed, _ = two_processes.run(die_while_writing, sharded_config(), str(tmp_path / "run"), allow_failures=True)
    assert killed == -signal.SIGKILL
    assert (tmp_path / "run" / "checkpoint" / ".00000008.tmp" / "shards").is_dir()
    assert saved_steps(tmp_path / "run") == [4]
    assert two_processes.run(train, sharded_config(), str(tmp_path / "run"), True) == [LENGTH, LENGTH]
    assert identical_weights(tmp_path / "run", reference_run)
    assert not list((tmp_path / "run" / "checkpoint").glob(".*tmp"))


def train_with_full_disk(config: dict[str, Any], folder: str, full_on: int) -> list[list[int]]:
    """Train; one process has no space for the checkpoint of step 4. Returns what is complete at steps 6 and 10."""
    unlimited, seen = resource.getrlimit(resource.RLIMIT_FSIZE), []

    def fill(logger: RunLogger) -> None:
        if logger.distributed.rank == full_on:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, unlimited[1]))

    def look(logger: RunLogger) -> None:
        logger.checkpoints.wait()
        logger.distributed.barrier()
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        seen.append(logger.checkpoints.steps())

    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with at_step(3, fill), at_step(6, look), at_step(10, look):
            train(config, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        signal.signal(signal.SIGXFSZ, ignored)
    return seen


@pytest.mark.parametrize("full_on", [0, 1])
def test_full_disk_of_one_process_costs_a_checkpoint_and_no_step(
    two_processes: Processes, reference_run: Path, tmp_path: Path, full_on: int
) -> None:
    results = two_processes.run(train_with_full_disk, sharded_config(), str(tmp_path / "run"), full_on)
    assert results == [[[], [8]]] * 2
    assert saved_steps(tmp_path / "run") == [8, LENGTH]
    assert identical_weights(tmp_path / "run", reference_run)
    assert not list((tmp_path / "run" / "checkpoint").glob(".*tmp"))


# Memory


@contextmanager
def recorded_peak(peaks: list[int]) -> Iterator[None]:
    """Adds the largest number of bytes that this thread's tensors had inside the block, beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        torch.empty(1)
        yield
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    memory = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"])
    totals = [event["args"]["Total Allocated"] for event in memory]
    peaks.append(max(totals) - (totals[0] - memory[0]["args"]["Bytes"]))


def train_and_measure(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train; returns the bytes of the model and the peaks while weights are saved, evaluated, gathered and written."""
    peaks: dict[str, list[int]] = {}
    found: dict[str, Any] = {"peaks": peaks}
    originals = {(RunLogger, "finish"): "finish", (RunLogger, "save_checkpoint"): "checkpoint"}
    originals |= {(RunLogger, "log_evaluation"): "best", (SnapshotWriter, "take"): "snapshot"}
    kept = {(owner, name): getattr(owner, name) for owner, name in originals}

    def measured(key: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with recorded_peak(peaks.setdefault(key, [])):
                return function(*args)

        return call

    def gather_everything(logger: RunLogger) -> None:
        tensors = logger.trainer.network_tensors()
        found["model"] = sum(t.numel() * t.element_size() for t in tensors.values())
        with recorded_peak(peaks.setdefault("control", [])):
            list(map(full_tensor, tensors.values()))

    for (owner, name), key in originals.items():
        setattr(owner, name, measured(key, kept[owner, name]))
    try:
        with at_step(2, gather_everything):
            train(config, folder)
    finally:
        for (owner, name), function in kept.items():
            setattr(owner, name, function)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "ways"), [("fsdp", 4), ("hsdp", 2)])
def test_no_process_holds_the_whole_model(four_processes: Processes, tmp_path: Path, parallel: str, ways: int) -> None:
    """Beside its shards a process needs their copy for a checkpoint, or one block; the main process one tensor."""
    model = digits_model(width=96, depth=12, mlp_dim=192)
    changes = {"model": model.to_dict(), "parallel": parallel, "shard_size": 2 if parallel == "hsdp" else None}
    config = sharded_config(
        **changes, batch_size=32, ema=0.9, keep="best", evaluate_every="6 steps", snapshot_every="6 steps"
    )
    for found in four_processes.run(train_and_measure, config, str(tmp_path / "run")):
        peaks = {key: max(values) / found["model"] for key, values in found["peaks"].items()}
        assert peaks.pop("control") > 0.95, "a gathered model is seen"
        assert set(peaks) == {"finish", "checkpoint", "best", "snapshot"}
        assert peaks["checkpoint"] < 4 / ways + 0.1, "copies of the shards of weights, average and two moments"
        assert peaks["best"] < 1 / ways + 0.2, "a copy of the shards of the weights"
        assert max(peaks["finish"], peaks["snapshot"]) < 0.4, peaks
    assert RunFolder(tmp_path / "run").finished


def test_muon_gathers_few_matrices_at_a_time() -> None:
    assert muon.split_batches([0, 1, 2, 3, 4], muon.MAX_GATHERED // 2) == [[0, 1], [2, 3], [4]]
    assert muon.split_batches([0, 1], muon.MAX_GATHERED * 8) == [[0], [1]]
    assert muon.split_batches([5, 7], 16) == [[5, 7]]


# Groups of hybrid sharding


def group_of(shard_size: int | None, local_sizes: list[int]) -> int | str:
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_WORLD_SIZE"] = str(local_sizes[rank])
    try:
        with DistributedContext.from_env("cpu") as distributed:
            config = digits_config(parallel="hsdp", shard_size=shard_size)
            try:
                size = _shard_size(config, distributed)
            except ConfigError as error:
                return str(error)
            first = rank // size * size
            assert distributed.mesh(size).mesh.tolist()[rank // size] == list(range(first, first + size))
            return size
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]


@pytest.mark.parametrize(
    ("shard_size", "local_sizes", "expected"),
    [
        (None, [2, 2, 2, 2], 2),
        (4, [2, 2, 2, 2], 4),
        (1, [2, 2, 2, 2], 1),
        (3, [2, 2, 2, 2], "shard_size=3 does not divide the 4 processes; try shard_size=1."),
        (
            None,
            [1, 3, 3, 3],
            "the machines have 1 and 3 processes, and parallel=hsdp needs groups of one size; try shard_size=1.",
        ),
    ],
)
def test_groups_are_the_machines_unless_a_size_is_given(
    four_processes: Processes, shard_size: int | None, local_sizes: list[int], expected: int | str
) -> None:
    assert four_processes.run(group_of, shard_size, local_sizes) == [expected] * 4


@pytest.mark.parametrize("changes", [{"parallel": "fsdp", "shard_size": 2}, {"parallel": "hsdp", "shard_size": 0}])
def test_shard_size_is_for_hybrid_sharding(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected a number of processes, 1 or more, with parallel=hsdp"):
        digits_config(**changes)


# Swin Transformers


def swin_losses(config: dict[str, Any], folder: str) -> list[float]:
    train(config, folder)
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line] + [
        line["evaluation"]["loss"] for line in lines if "evaluation" in line
    ]


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
def test_blocks_of_swin_transformers_are_sharded_one_by_one(
    two_processes: Processes, tmp_path: Path, version: int
) -> None:
    size: dict[str, Any] = {"image_size": 8, "patch_size": 2, "channels": 1, "num_classes": 0, "window_size": 2}
    model = SwinConfig(**size, width=8, depths=(2, 2), num_heads=(1, 2), version=version)
    config = sharded_config(model=model, precision="float64", log_every="1 step", evaluate_every="3 steps", ema=0.9)
    single = two_processes.run(swin_losses, {**config, "parallel": "ddp"}, str(tmp_path / "single"), world=1)
    for losses in two_processes.run(swin_losses, config, str(tmp_path / "sharded")):
        assert len(losses) == LENGTH + 4
        assert losses == pytest.approx(single[0], rel=1e-9)
