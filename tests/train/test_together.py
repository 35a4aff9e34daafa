"""What can happen to the checkpoints of several processes, and what each of them goes on with."""

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
from train.processes import Processes
from train.small_runs import at_step, digits, on_photos, photos, same_bits, saved_steps, trained

from vitrail import runtime
from vitrail.config import TrainConfig
from vitrail.errors import VitrailError
from vitrail.train.checkpointing import TENSORS, CheckpointManager, Progress, select_prefix
from vitrail.train.distributed import DistributedContext
from vitrail.train.run_logger import RunLogger

LENGTH = 12


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes(2) as started:
        yield started


def short(**changes: Any) -> dict[str, Any]:
    """Checkpoints at steps 4, 8 and 12; nothing but those to write and to say."""
    return digits(LENGTH, log_every="1k steps", evaluate_every=None, keep="last", **changes).to_dict()


@contextmanager
def sigint_times() -> Iterator[list[str]]:
    """What this process says aloud."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    runtime._logged.clear()
    runtime.log.addHandler(handler)
    try:
        yield said
    finally:
        runtime.log.removeHandler(handler)


def run_here(config: dict[str, Any], folder: str, resume: bool = False) -> list[str]:
    """What was said, other than of the data."""
    with sigint_times() as said:
        trained(TrainConfig.from_dict(config), Path(folder), resume=resume)
    return [words for words in said if not words.startswith("digits: ")]


@pytest.fixture(scope="module")
def whole(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two processes with a shard each, from beginning to end."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert processes.run(run_here, short(parallel="fsdp"), str(folder)) == [[], []]
    assert saved_steps(folder) == [8, LENGTH]
    return folder


# Damage


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "generators"])
def test_a_damaged_shard_gives_way_to_the_checkpoint_before(
    processes: Processes, whole: Path, tmp_path: Path, damage: str
):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "model")
    newest = folder / "checkpoint" / f"{LENGTH:08d}"
    file = newest / TENSORS if damage == "generators" else sorted((newest / "shards").iterdir())[1]
    content = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(content[:-3])
    elif damage == "gone":
        file.unlink()
    else:
        content[-1000:] = bytes(byte ^ 1 for byte in content[-1000:])
        file.write_bytes(content)
    first, other = processes.run(run_here, short(parallel="fsdp"), str(folder), True)
    assert len(first) == 1
    assert f"{newest} is damaged" in first[0]
    assert "the one before it is used" in first[0]
    assert other == []
    assert same_bits(folder, whole)


# Data


@pytest.fixture
def album(tmp_path: Path) -> Path:
    return photos(tmp_path / "album", {"apple": 8, "bed": 8, "camel": 8}, side=16)


def own_data(config: dict[str, Any], first: str, other: str) -> list[str]:
    """Each process reads a folder of its own, as machines may that share no disk."""
    config["data"]["source"] = first if os.environ["RANK"] == "0" else other
    return run_or_fail(config, f"{first}-run")


def run_or_fail(config: dict[str, Any], folder: str, resume: bool = False) -> list[str]:
    try:
        return run_here(config, folder, resume)
    except VitrailError as error:
        return [str(error)]


def test_processes_must_read_the_same_data(processes: Processes, album: Path, tmp_path: Path):
    shutil.copytree(album, tmp_path / "other")
    (tmp_path / "other" / "apple").rename(tmp_path / "other" / "zebra")
    words = "processes 0 and 1 read different data: the classes are apple, bed, camel and bed, camel, zebra."
    found = processes.run(own_data, on_photos(album).to_dict(), str(album), str(tmp_path / "other"))
    assert found == [[words], [words]]


def test_a_sharded_run_refuses_other_classes(processes: Processes, album: Path, tmp_path: Path):
    config = on_photos(album, 4, parallel="fsdp", checkpoint_every="2 steps").to_dict()
    processes.run(run_here, config, str(tmp_path / "run"))
    (album / "apple").rename(album / "zebra")
    for said in processes.run(run_or_fail, config, str(tmp_path / "run"), True):
        assert said[-1].startswith(f"{album} has other classes than at the start of the run")


# A full disk: the kernel itself refuses


def run_without_room(config: dict[str, Any], folder: str, rank: int) -> list[str]:
    """One process may write nothing from step 5 to step 9."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def room(size: int, logger: RunLogger) -> None:
        if logger.distributed.rank == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    try:
        with at_step(5, partial(room, 100)), at_step(9, partial(room, before[0])):
            return run_here(config, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_process_without_room_stops_none(processes: Processes, whole: Path, tmp_path: Path, rank: int):
    folder = tmp_path / "run"
    first, other = processes.run(run_without_room, short(parallel="fsdp"), str(folder), rank)
    assert len(first) == 1
    assert first[0].startswith("a checkpoint could not be written; training continues: could not write ")
    assert "checkpoint/00000008/shards: the disk or its quota is full" in first[0]
    assert other == []
    assert saved_steps(folder) == [4, LENGTH]
    assert not list((folder / "checkpoint").glob(".*tmp"))
    assert same_bits(folder, whole)


def run_without_folder(config: dict[str, Any], folder: str) -> list[str]:
    """After step 5 there is a file where the checkpoints were."""

    def replace(logger: RunLogger) -> None:
        if logger.distributed.is_main:
            shutil.rmtree(logger.run.checkpoints)
            logger.run.checkpoints.write_text("")

    with at_step(5, replace):
        return run_here(config, folder)


def test_what_only_the_first_process_cannot_do_stops_none(processes: Processes, whole: Path, tmp_path: Path):
    first, other = processes.run(run_without_folder, short(parallel="fsdp"), str(tmp_path / "run"))
    assert len(first) == 3, "at two steps, and at the end"
    assert all("could not be written" in words for words in first)
    assert other == []
    assert same_bits(tmp_path / "run", whole)


# Generators, from which attention's dropout draws


def random_here(config: dict[str, Any], folder: str, resume: bool = False, stop: int = 0) -> tuple[list[str], float]:
    """What is said; and what this process would have drawn after the first step, or the first one resumed."""
    drawn: list[float] = []

    def draw(_: RunLogger) -> None:
        drawn.append(float(torch.rand((), generator=torch.Generator().set_state(torch.get_rng_state()))))

    def end(_: RunLogger) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with at_step(7 if resume else 1, draw), at_step(stop, end):
        said = run_here(config, folder, resume)
    return said, drawn[0]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_each_process_draws_its_own_masks_and_goes_on_with_them(processes: Processes, tmp_path: Path, parallel: str):
    config = short(parallel=parallel, model={**digits().model.to_dict(), "attention_dropout": 0.3})
    (_, one), (_, other) = processes.run(random_here, config, str(tmp_path / "whole"))
    assert one != other
    processes.run(random_here, config, str(tmp_path / "cut"), False, 6)
    assert saved_steps(tmp_path / "cut") == [4, 6]
    (_, one), (_, other) = processes.run(random_here, config, str(tmp_path / "cut"), True)
    assert one != other
    assert same_bits(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.parametrize(("before", "after", "parallel"), [(1, 2, "ddp"), (2, 1, "fsdp")])
def test_on_another_number_of_processes_the_masks_are_others_and_that_is_said(
    processes: Processes, tmp_path: Path, before: int, after: int, parallel: str
):
    config = short(parallel=parallel, model={**digits().model.to_dict(), "attention_dropout": 0.3})
    processes.run(random_here, config, str(tmp_path / "cut"), False, 6, world=before)
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "cut", again)
    found = processes.run(random_here, config, str(tmp_path / "cut"), True, world=after)
    assert [len(said) for said, _ in found] == [2, 0][:after]
    assert "resumed in another environment" in found[0][0][0]
    assert "on another number of processes attention_dropout draws other masks" in found[0][0][1]
    assert len({drawn for _, drawn in found}) == after
    processes.run(random_here, config, str(again), True, world=after)
    assert same_bits(again, tmp_path / "cut"), "the same others each time"


def test_without_attention_dropout_there_is_nothing_to_say_of_masks(processes: Processes, tmp_path: Path):
    processes.run(random_here, short(), str(tmp_path / "cut"), False, 6, world=2)
    [(said, _)] = processes.run(random_here, short(), str(tmp_path / "cut"), True, world=1)
    assert len(said) == 1
    assert "resumed in another environment" in said[0]


# The best weights


def best_here(folder: str, has: int) -> list[dict[str, torch.Tensor] | None]:
    """Each process has a disk of its own; one of them has the best weights, in memory and then on its disk."""
    with DistributedContext.from_env("cpu") as distributed:
        checkpoints = CheckpointManager(Path(folder) / str(distributed.rank), distributed)
        weights = {"w": torch.arange(3.0), "n": torch.tensor(7), "none": torch.zeros(0), "half": torch.ones(2).half()}
        if distributed.rank == has:
            checkpoints.unwritten_best = weights, {"step": 5}
        found = [checkpoints.read_best(5)]
        if distributed.rank == has:
            checkpoints._write(weights, vars(Progress(step=5)), "best-")
        checkpoints.unwritten_best = None
        return [*found, checkpoints.read_best(5)]


def test_the_first_process_has_the_best_weights_or_nobody_has(processes: Processes, tmp_path: Path):
    for answers in processes.run(best_here, str(tmp_path / "first"), 0):
        for found in answers:
            assert found is not None
            assert torch.equal(found["w"], torch.arange(3.0))
            assert found["n"] == 7
            assert found["none"].shape == (0,)
            assert torch.equal(found["half"], torch.ones(2).half())
    assert processes.run(best_here, str(tmp_path / "other"), 1) == [[None, None], [None, None]]


def forgetful(config: dict[str, Any], folder: str) -> tuple[int | None, float]:
    """A folder for each process, as on machines that share none; after step 7 the head forgets everything."""

    def forget(logger: RunLogger) -> None:
        with torch.no_grad():
            logger.trainer.learner.net.head.weight.normal_(generator=torch.Generator().manual_seed(0)).mul_(1e3)

    with at_step(7, forget):
        result = trained(TrainConfig.from_dict(config), Path(folder) / os.environ["RANK"])
    assert result.scores is not None
    return result.progress.best_step, result.scores.top1


def test_processes_that_share_no_disk_keep_the_same_best_weights(processes: Processes, tmp_path: Path):
    config = digits(LENGTH, keep="best", evaluate_every="5 steps").to_dict()
    first, other = processes.run(forgetful, config, str(tmp_path))
    assert first == other
    assert first[0] == 5
    assert (tmp_path / "0" / "model").exists()
    assert not (tmp_path / "1").exists()


def test_each_process_has_its_generators_in_a_checkpoint(whole: Path):
    tensors = load_file(whole / "checkpoint" / f"{LENGTH:08d}" / TENSORS)
    one, other = (select_prefix(f"generators/{rank}", tensors) for rank in (0, 1))
    assert one.keys() == other.keys()
    assert len(one) * 2 == len(tensors)
    assert not torch.equal(one["torch"], other["torch"])
