"""Sharded checkpoints: each process writes its shard, and any number of processes can load them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from training.processes import Processes
from training.small_objective import (
    SINGLE_PROCESS,
    Run,
    State,
    assert_tensors_close,
    full_tensors,
    objective_config,
    train_steps,
)

from vitrail.errors import CheckpointError, TrainError
from vitrail.runtime.distributed import DistributedContext
from vitrail.training.sharded_checkpoint import load_sharded, save_sharded

HALF, END = 3, 6


def save_half(folder: str, parallel: str) -> State:
    """Run the first half and save it in a second thread while this one keeps communicating."""
    with DistributedContext.from_env("cpu") as distributed:
        run = train_steps(distributed, objective_config(parallel), range(HALF))
        tensors = {name: t.detach().clone() for name, t in run.tensors().items()}
        thread = threading.Thread(target=save_sharded, args=(Path(folder), tensors, distributed))
        thread.start()
        while distributed.any(thread.is_alive()):
            pass
        thread.join()
        return full_tensors(run.tensors())


def run_second_half(folder: str, parallel: str) -> tuple[State, list[float], State]:
    with DistributedContext.from_env("cpu") as distributed:
        return resume_from(folder, parallel, distributed)


def resume_from(folder: str, parallel: str, distributed: DistributedContext) -> tuple[State, list[float], State]:
    loaded: State = {}

    def load(run: Run) -> None:
        load_sharded(Path(folder), run.tensors(), distributed)
        loaded.update(full_tensors(run.tensors()))

    run = train_steps(distributed, objective_config(parallel), range(HALF, END), before_first_step=load)
    return loaded, run.losses, full_tensors(run.tensors())


@pytest.fixture(scope="module")
def half_checkpoint(four_processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    """A checkpoint written by two processes with a shard each, and its full tensors."""
    folder = tmp_path_factory.mktemp("half")
    return folder, four_processes.run(save_half, str(folder), "fsdp", world=2)[0]


@pytest.mark.parametrize(("parallel", "world"), [("fsdp", 4), ("ddp", 2), ("fsdp", 1), ("hsdp", 4)])
def test_sharded_checkpoint_resumes_on_another_number_of_processes(
    four_processes: Processes, half_checkpoint: tuple[Path, State], parallel: str, world: int
) -> None:
    folder, expected = half_checkpoint
    reference = train_steps(SINGLE_PROCESS, objective_config(), range(END))
    for loaded, losses, final in four_processes.run(run_second_half, str(folder), parallel, world=world):
        assert all(torch.equal(loaded[name], value) for name, value in expected.items()), "loading is exact"
        assert losses == pytest.approx(reference.losses[HALF:], rel=1e-9)
        assert_tensors_close(final, reference.tensors(), 1e-9)


def test_each_shard_of_replicated_groups_is_written_once(four_processes: Processes, tmp_path: Path) -> None:
    expected = four_processes.run(save_half, str(tmp_path), "hsdp", world=4)[0]
    count: dict[str, int] = {}
    for file in tmp_path.iterdir():
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                count[name] = count.get(name, 0) + tensors.get_tensor(name).numel()
    assert count == {name: tensor.numel() for name, tensor in expected.items()}
    loaded, losses, _ = four_processes.run(run_second_half, str(tmp_path), "fsdp", world=2)[1]
    assert all(torch.equal(loaded[name], value) for name, value in expected.items()), "loading is exact"
    assert losses == pytest.approx(train_steps(SINGLE_PROCESS, objective_config(), range(END)).losses[HALF:], rel=1e-9)


def test_sharded_checkpoint_resumes_in_a_single_process(half_checkpoint: tuple[Path, State]) -> None:
    folder, expected = half_checkpoint
    loaded, losses, _ = resume_from(str(folder), "ddp", SINGLE_PROCESS)
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    assert losses == pytest.approx(train_steps(SINGLE_PROCESS, objective_config(), range(END)).losses[HALF:], rel=1e-9)


def test_checkpoint_of_a_single_process_resumes_in_shards(four_processes: Processes, tmp_path: Path) -> None:
    half = train_steps(SINGLE_PROCESS, objective_config(), range(HALF))
    save_sharded(tmp_path, half.tensors(), SINGLE_PROCESS)
    loaded, losses, _ = four_processes.run(run_second_half, str(tmp_path), "fsdp", world=2)[1]
    assert all(torch.equal(loaded[name], value) for name, value in half.tensors().items())
    assert losses == pytest.approx(train_steps(SINGLE_PROCESS, objective_config(), range(END)).losses[HALF:], rel=1e-9)


def test_each_process_writes_only_its_shard_as_safetensors(half_checkpoint: tuple[Path, State]) -> None:
    folder, expected = half_checkpoint
    files = sorted(p.name for p in folder.iterdir())
    assert [name.endswith(".safetensors") for name in files] == [True, True], "no pickles"
    name, count = "learner/net.blocks.0.mlp.up.weight", 0
    for file in files:
        with safe_open(folder / file, "pt") as tensors:
            shard = tensors.get_tensor(name)
            assert 0 < shard.numel() < expected[name].numel()
            count += shard.numel()
    assert count == expected[name].numel()


def test_missing_or_damaged_shard_is_an_error(half_checkpoint: tuple[Path, State], tmp_path: Path) -> None:
    folder, expected = half_checkpoint
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    target = {name: torch.zeros_like(value) for name, value in expected.items()}
    first, second = sorted(tmp_path.iterdir())
    for shard in (first, second):
        content = shard.read_bytes()
        shard.unlink()
        with pytest.raises(CheckpointError, match=r"lacks|a process's file may be missing"):
            load_sharded(tmp_path, target, SINGLE_PROCESS)
        shard.write_bytes(content[: len(content) // 2])
        with pytest.raises(CheckpointError, match="cannot be read"):
            load_sharded(tmp_path, target, SINGLE_PROCESS)
        shard.write_bytes(content)
    load_sharded(tmp_path, target, SINGLE_PROCESS)
    assert all(torch.equal(target[name], value) for name, value in expected.items())


def test_mismatched_tensors_are_named(half_checkpoint: tuple[Path, State]) -> None:
    folder, tensors = half_checkpoint
    name = "learner/net.head.bias"
    with pytest.raises(CheckpointError, match=f"has the unexpected tensor '{name}'"):
        load_sharded(folder, {k: v for k, v in tensors.items() if k != name}, SINGLE_PROCESS)
    with pytest.raises(CheckpointError, match="lacks 'more'"):
        load_sharded(folder, tensors | {"more": torch.zeros(1)}, SINGLE_PROCESS)
    with pytest.raises(CheckpointError, match="expected 6 in"):
        load_sharded(folder, tensors | {name: torch.zeros(6)}, SINGLE_PROCESS)


def load_full_into_shards(state: State) -> tuple[State, bool, str]:
    with DistributedContext.from_env("cpu") as distributed:
        run = train_steps(distributed, objective_config("fsdp"), range(1))
        parts: dict[str, State] = {}
        for name, tensor in state.items():
            part, _, key = name.partition("/")
            parts.setdefault(part, {})[key] = tensor
        run.optimizer.load_state_tensors(parts["optim"])
        run.ema.load_state_tensors(parts["ema"])
        still_sharded = all(isinstance(t, DTensor) for t in run.ema.state_tensors().values())
        try:
            run.ema.load_state_tensors({k: v for k, v in parts["ema"].items() if k != "scale"})
        except TrainError as error:
            return full_tensors(run.tensors()), still_sharded, str(error)
        raise AssertionError("the missing tensor was not reported")


def test_full_tensors_are_loaded_into_shards_exactly(four_processes: Processes) -> None:
    state = train_steps(SINGLE_PROCESS, objective_config(), range(HALF)).tensors()
    for got, still_sharded, message in four_processes.run(load_full_into_shards, full_tensors(state), world=4):
        assert still_sharded
        for name, value in state.items():
            assert name.startswith("learner/") or torch.equal(got[name], value), name
        assert "lack 'scale'" in message
