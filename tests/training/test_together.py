"""Checkpoints of several processes: damage, different data, full disks, generators and best weights."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from training.processes import Processes
from training.small_runs import (
    at_step,
    digits_config,
    identical_weights,
    make_photos,
    photo_config,
    saved_steps,
    train_run,
)

from vitrail import runtime
from vitrail.config import TrainConfig
from vitrail.errors import VitrailError
from vitrail.runtime.distributed import DistributedContext
from vitrail.training.checkpointing import TENSORS, CheckpointManager, Progress, select_prefix
from vitrail.training.run_logger import RunLogger

LENGTH = 12


def short_config(**changes: Any) -> dict[str, Any]:
    """Config with checkpoints at steps 4, 8 and 12 that writes and logs nothing else."""
    return digits_config(LENGTH, log_every="1k steps", evaluate_every=None, keep="last", **changes).to_dict()


@contextmanager
def captured_messages() -> Iterator[list[str]]:
    """The messages that this process logs."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    runtime.notes._logged.clear()
    runtime.log.addHandler(handler)
    try:
        yield messages
    finally:
        runtime.log.removeHandler(handler)


def train_and_capture(config: dict[str, Any], folder: str, resume: bool = False) -> list[str]:
    """Train; returns the logged messages, except those about the data."""
    with captured_messages() as messages:
        train_run(TrainConfig.from_dict(config), Path(folder), resume=resume)
    return [message for message in messages if not message.startswith("digits: ")]


@pytest.fixture(scope="module")
def reference_run(two_processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of two processes with a shard each."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert two_processes.run(train_and_capture, short_config(parallel="fsdp"), str(folder)) == [[], []]
    assert saved_steps(folder) == [8, LENGTH]
    return folder


# Damage


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "generators"])
def test_previous_checkpoint_is_used_if_a_shard_is_damaged(
    two_processes: Processes, reference_run: Path, tmp_path: Path, damage: str
):
    folder = tmp_path / "run"
    shutil.copytree(reference_run, folder)
    shutil.rmtree(folder / "model")
    newest = folder / "checkpoint" / f"{LENGTH:08d}"
    file = newest / TENSORS if damage == "generators" else sorted((newest / "shards").iterdir())[1]
    content = bytearray(file.read_bytes())
    if damage == "truncated":
        file.write_bytes(content[:-3])
    elif damage == "missing":
        file.unlink()
    else:
        content[-1000:] = bytes(byte ^ 1 for byte in content[-1000:])
        file.write_bytes(content)
    first, other = two_processes.run(train_and_capture, short_config(parallel="fsdp"), str(folder), True)
    assert len(first) == 1
    assert f"{newest} is damaged" in first[0]
    assert "the previous one is used" in first[0]
    assert other == []
    assert identical_weights(folder, reference_run)


# Data


@pytest.fixture
def album(tmp_path: Path) -> Path:
    return make_photos(tmp_path / "album", {"apple": 8, "bed": 8, "camel": 8}, side=16)


def train_on_own_data(config: dict[str, Any], first: str, other: str) -> list[str]:
    """Train with one data folder per process, as on machines without a shared disk."""
    config["data"]["source"] = first if os.environ["RANK"] == "0" else other
    return train_or_capture_error(config, f"{first}-run")


def train_or_capture_error(config: dict[str, Any], folder: str, resume: bool = False) -> list[str]:
    try:
        return train_and_capture(config, folder, resume)
    except VitrailError as error:
        return [str(error)]


def test_processes_must_read_the_same_data(two_processes: Processes, album: Path, tmp_path: Path):
    shutil.copytree(album, tmp_path / "other")
    (tmp_path / "other" / "apple").rename(tmp_path / "other" / "zebra")
    message = "processes 0 and 1 read different data: the classes are apple, bed, camel and bed, camel, zebra."
    results = two_processes.run(train_on_own_data, photo_config(album).to_dict(), str(album), str(tmp_path / "other"))
    assert results == [[message], [message]]


def test_sharded_run_refuses_changed_classes(two_processes: Processes, album: Path, tmp_path: Path):
    config = photo_config(album, 4, parallel="fsdp", checkpoint_every="2 steps").to_dict()
    two_processes.run(train_and_capture, config, str(tmp_path / "run"))
    (album / "apple").rename(album / "zebra")
    for messages in two_processes.run(train_or_capture_error, config, str(tmp_path / "run"), True):
        assert messages[-1].startswith(f"the classes of {album} have changed since the start of the run")


# Full disks, simulated with the kernel's limit of file size


def train_on_full_disk(config: dict[str, Any], folder: str, rank: int) -> list[str]:
    """Train while one process cannot write files from step 5 to step 9."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def set_limit(size: int, logger: RunLogger) -> None:
        logger.checkpoints.wait()
        if logger.distributed.rank == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))

    try:
        with at_step(5, partial(set_limit, 100)), at_step(9, partial(set_limit, limits[0])):
            return train_and_capture(config, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("rank", [0, 1])
def test_full_disk_of_one_process_does_not_stop_training(
    two_processes: Processes, reference_run: Path, tmp_path: Path, rank: int
):
    folder = tmp_path / "run"
    first, other = two_processes.run(train_on_full_disk, short_config(parallel="fsdp"), str(folder), rank)
    assert len(first) == 1
    assert first[0].startswith("a checkpoint could not be written; training continues: could not write ")
    assert "checkpoint/00000008/shards: the disk or its quota is full" in first[0]
    assert other == []
    assert saved_steps(folder) == [4, LENGTH]
    assert not list((folder / "checkpoint").glob(".*tmp"))
    assert identical_weights(folder, reference_run)


def train_without_checkpoint_folder(config: dict[str, Any], folder: str) -> list[str]:
    """Train, and replace the checkpoint folder by a file after step 5."""

    def replace_folder(logger: RunLogger) -> None:
        if logger.distributed.is_main:
            logger.checkpoints.wait()
            shutil.rmtree(logger.run.checkpoints)
            logger.run.checkpoints.write_text("")

    with at_step(5, replace_folder):
        return train_and_capture(config, folder)


def test_failed_writes_of_the_main_process_do_not_stop_training(
    two_processes: Processes, reference_run: Path, tmp_path: Path
):
    first, other = two_processes.run(
        train_without_checkpoint_folder, short_config(parallel="fsdp"), str(tmp_path / "run")
    )
    assert len(first) == 3, "at two steps, and at the end"
    assert all("could not be written" in message for message in first)
    assert other == []
    assert identical_weights(tmp_path / "run", reference_run)


# Generators used by attention dropout


def train_and_draw(
    config: dict[str, Any], folder: str, resume: bool = False, stop_step: int = 0
) -> tuple[list[str], float]:
    """The logged messages, and this process's next random number after the first step, or the first one resumed."""
    draws: list[float] = []

    def record_draw(_: RunLogger) -> None:
        draws.append(float(torch.rand((), generator=torch.Generator().set_state(torch.get_rng_state()))))

    def send_sigterm(_: RunLogger) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with at_step(7 if resume else 1, record_draw), at_step(stop_step, send_sigterm):
        messages = train_and_capture(config, folder, resume)
    return messages, draws[0]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_each_process_has_its_own_generator_and_resumes_it(two_processes: Processes, tmp_path: Path, parallel: str):
    config = short_config(parallel=parallel, model={**digits_config().model.to_dict(), "attention_dropout": 0.3})
    (_, first), (_, second) = two_processes.run(train_and_draw, config, str(tmp_path / "uninterrupted"))
    assert first != second
    two_processes.run(train_and_draw, config, str(tmp_path / "interrupted"), False, 6)
    assert saved_steps(tmp_path / "interrupted") == [4, 6]
    (_, first), (_, second) = two_processes.run(train_and_draw, config, str(tmp_path / "interrupted"), True)
    assert first != second
    assert identical_weights(tmp_path / "interrupted", tmp_path / "uninterrupted")


@pytest.mark.parametrize(("before", "after", "parallel"), [(1, 2, "ddp"), (2, 1, "fsdp")])
def test_other_masks_on_another_number_of_processes_are_reported(
    two_processes: Processes, tmp_path: Path, before: int, after: int, parallel: str
):
    config = short_config(parallel=parallel, model={**digits_config().model.to_dict(), "attention_dropout": 0.3})
    two_processes.run(train_and_draw, config, str(tmp_path / "interrupted"), False, 6, world=before)
    copy = tmp_path / "again"
    shutil.copytree(tmp_path / "interrupted", copy)
    results = two_processes.run(train_and_draw, config, str(tmp_path / "interrupted"), True, world=after)
    assert [len(messages) for messages, _ in results] == [2, 0][:after]
    assert "resumed in another environment" in results[0][0][0]
    assert "with a different number of processes, attention_dropout draws different masks" in results[0][0][1]
    assert len({draw for _, draw in results}) == after
    two_processes.run(train_and_draw, config, str(copy), True, world=after)
    assert identical_weights(copy, tmp_path / "interrupted"), "the other masks are deterministic"


def test_masks_are_not_mentioned_without_attention_dropout(two_processes: Processes, tmp_path: Path):
    two_processes.run(train_and_draw, short_config(), str(tmp_path / "interrupted"), False, 6, world=2)
    [(messages, _)] = two_processes.run(train_and_draw, short_config(), str(tmp_path / "interrupted"), True, world=1)
    assert len(messages) == 1
    assert "resumed in another environment" in messages[0]


# The best weights


def read_best_weights(folder: str, rank_with_best: int) -> list[dict[str, torch.Tensor] | None]:
    """Read the best weights on separate disks while one process has them, in memory and then on its disk."""
    with DistributedContext.from_env("cpu") as distributed:
        checkpoints = CheckpointManager(Path(folder) / str(distributed.rank), distributed)
        weights = {"w": torch.arange(3.0), "n": torch.tensor(7), "none": torch.zeros(0), "half": torch.ones(2).half()}
        if distributed.rank == rank_with_best:
            checkpoints.unwritten_best = weights, {"step": 5}
        best_weights = [checkpoints.read_best(5, weights)]
        if distributed.rank == rank_with_best:
            checkpoints._write(weights, vars(Progress(step=5)), "best-")
        checkpoints.unwritten_best = None
        return [*best_weights, checkpoints.read_best(5, weights)]


def test_best_weights_are_read_from_the_main_process_only(two_processes: Processes, tmp_path: Path):
    for results in two_processes.run(read_best_weights, str(tmp_path / "first"), 0):
        for best_weights in results:
            assert best_weights is not None
            assert torch.equal(best_weights["w"], torch.arange(3.0))
            assert best_weights["n"] == 7
            assert best_weights["none"].shape == (0,)
            assert torch.equal(best_weights["half"], torch.ones(2).half())
    assert two_processes.run(read_best_weights, str(tmp_path / "other"), 1) == [[None, None], [None, None]]


def train_and_randomize_head(config: dict[str, Any], folder: str) -> tuple[int | None, float]:
    """Train with one run folder per process, as without a shared disk; the head is randomized after step 7."""

    def randomize_head(logger: RunLogger) -> None:
        with torch.no_grad():
            logger.trainer.objective.net.head.weight.normal_(generator=torch.Generator().manual_seed(0)).mul_(1e3)

    with at_step(7, randomize_head):
        result = train_run(TrainConfig.from_dict(config), Path(folder) / os.environ["RANK"])
    assert result.scores is not None
    return result.progress.best_step, result.scores.top1


def test_processes_without_a_shared_disk_keep_the_same_best_weights(two_processes: Processes, tmp_path: Path):
    config = digits_config(LENGTH, keep="best", evaluate_every="5 steps").to_dict()
    first, other = two_processes.run(train_and_randomize_head, config, str(tmp_path))
    assert first == other
    assert first[0] == 5
    assert (tmp_path / "0" / "model").exists()
    assert not (tmp_path / "1").exists()


def test_checkpoint_has_the_generators_of_each_process(reference_run: Path):
    tensors = load_file(reference_run / "checkpoint" / f"{LENGTH:08d}" / TENSORS)
    first, second = (select_prefix(f"generators/{rank}", tensors) for rank in (0, 1))
    assert first.keys() == second.keys()
    assert len(first) * 2 == len(tensors)
    assert not torch.equal(first["torch"], second["torch"])
