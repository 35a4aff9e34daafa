"""Checkpoints that each process writes its part of, and any number of processes reads back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from train.processes import Processes
from train.small_learner import ALONE, Run, State, close, plain, settings, trained

from vitrail.errors import CheckpointError, TrainError
from vitrail.train.distributed import DistributedContext
from vitrail.train.sharded_checkpoint import load_sharded, save_sharded

HALF, END = 3, 6


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes(4) as group:
        yield group


def save_half(folder: str, parallel: str) -> State:
    """The first half of a run, saved by another thread while this one goes on talking."""
    with DistributedContext.from_env("cpu") as distributed:
        run = trained(distributed, settings(parallel), range(HALF))
        kept = {name: t.detach().clone() for name, t in run.tensors().items()}
        thread = threading.Thread(target=save_sharded, args=(Path(folder), kept, distributed))
        thread.start()
        while distributed.any(thread.is_alive()):
            pass
        thread.join()
        return plain(run.tensors())


def second_half(folder: str, parallel: str) -> tuple[State, list[float], State]:
    with DistributedContext.from_env("cpu") as distributed:
        return resumed(folder, parallel, distributed)


def resumed(folder: str, parallel: str, distributed: DistributedContext) -> tuple[State, list[float], State]:
    loaded: State = {}

    def load(run: Run) -> None:
        load_sharded(Path(folder), run.tensors(), distributed)
        loaded.update(plain(run.tensors()))

    run = trained(distributed, settings(parallel), range(HALF, END), begin=load)
    return loaded, run.losses, plain(run.tensors())


@pytest.fixture(scope="module")
def saved(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    """What two processes with a shard each wrote, and what they had."""
    folder = tmp_path_factory.mktemp("half")
    return folder, processes.run(save_half, str(folder), "fsdp", world=2)[0]


@pytest.mark.parametrize(("parallel", "world"), [("fsdp", 4), ("ddp", 2), ("fsdp", 1)])
def test_a_sharded_checkpoint_is_continued_on_another_number_of_processes(
    processes: Processes, saved: tuple[Path, State], parallel: str, world: int
) -> None:
    folder, had = saved
    whole = trained(ALONE, settings(), range(END))
    for loaded, losses, end in processes.run(second_half, str(folder), parallel, world=world):
        assert all(torch.equal(loaded[name], value) for name, value in had.items()), "loading is exact"
        assert losses == pytest.approx(whole.losses[HALF:], rel=1e-9)
        close(end, whole.tensors(), 1e-9)


def test_one_process_without_a_group_continues_it_too(saved: tuple[Path, State]) -> None:
    folder, had = saved
    loaded, losses, _ = resumed(str(folder), "ddp", ALONE)
    assert all(torch.equal(loaded[name], value) for name, value in had.items())
    assert losses == pytest.approx(trained(ALONE, settings(), range(END)).losses[HALF:], rel=1e-9)


def test_what_one_process_wrote_is_continued_by_shards(processes: Processes, tmp_path: Path) -> None:
    half = trained(ALONE, settings(), range(HALF))
    save_sharded(tmp_path, half.tensors(), ALONE)
    loaded, losses, _ = processes.run(second_half, str(tmp_path), "fsdp", world=2)[1]
    assert all(torch.equal(loaded[name], value) for name, value in half.tensors().items())
    assert losses == pytest.approx(trained(ALONE, settings(), range(END)).losses[HALF:], rel=1e-9)


def test_each_process_writes_only_its_part_as_safetensors(saved: tuple[Path, State]) -> None:
    folder, had = saved
    files = sorted(p.name for p in folder.iterdir())
    assert [name.endswith(".safetensors") for name in files] == [True, True], "no pickles"
    name, numbers = "learner/net.blocks.0.mlp.up.weight", 0
    for file in files:
        with safe_open(folder / file, "pt") as tensors:
            part = tensors.get_tensor(name)
            assert 0 < part.numel() < had[name].numel()
            numbers += part.numel()
    assert numbers == had[name].numel()


def test_a_lost_or_damaged_part_is_never_taken_for_the_whole(saved: tuple[Path, State], tmp_path: Path) -> None:
    folder, had = saved
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    into = {name: torch.zeros_like(value) for name, value in had.items()}
    first, second = sorted(tmp_path.iterdir())
    for victim in (first, second):
        content = victim.read_bytes()
        victim.unlink()
        with pytest.raises(CheckpointError, match=r"lacks|a process's file may be missing"):
            load_sharded(tmp_path, into, ALONE)
        victim.write_bytes(content[: len(content) // 2])
        with pytest.raises(CheckpointError, match="cannot be read"):
            load_sharded(tmp_path, into, ALONE)
        victim.write_bytes(content)
    load_sharded(tmp_path, into, ALONE)
    assert all(torch.equal(into[name], value) for name, value in had.items())


def test_other_tensors_than_those_wanted_are_named(saved: tuple[Path, State]) -> None:
    folder, had = saved
    name = "learner/net.head.bias"
    with pytest.raises(CheckpointError, match=f"has the unexpected tensor '{name}'"):
        load_sharded(folder, {k: v for k, v in had.items() if k != name}, ALONE)
    with pytest.raises(CheckpointError, match="lacks 'more'"):
        load_sharded(folder, had | {"more": torch.zeros(1)}, ALONE)
    with pytest.raises(CheckpointError, match="expected 6 in"):
        load_sharded(folder, had | {name: torch.zeros(6)}, ALONE)


def whole_into_shards(state: State) -> tuple[State, bool, str]:
    with DistributedContext.from_env("cpu") as distributed:
        run = trained(distributed, settings("fsdp"), range(1))
        parts: dict[str, State] = {}
        for name, tensor in state.items():
            where, _, rest = name.partition("/")
            parts.setdefault(where, {})[rest] = tensor
        run.optimizer.load_state_tensors(parts["optim"])
        run.ema.load_state_tensors(parts["ema"])
        still = all(isinstance(t, DTensor) for t in run.ema.state_tensors().values())
        try:
            run.ema.load_state_tensors({k: v for k, v in parts["ema"].items() if k != "scale"})
        except TrainError as error:
            return plain(run.tensors()), still, str(error)
        raise AssertionError("something was missing")


def test_whole_tensors_are_loaded_into_shards_exactly(processes: Processes) -> None:
    state = trained(ALONE, settings(), range(HALF)).tensors()
    for got, still_sharded, said in processes.run(whole_into_shards, plain(state), world=4):
        assert still_sharded
        for name, value in state.items():
            assert name.startswith("learner/") or torch.equal(got[name], value), name
        assert "lack 'scale'" in said
