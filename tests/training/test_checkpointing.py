"""Checkpoints are written completely or not at all, the newest valid one is found, and generators are restored."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from vitrail.errors import CheckpointError
from vitrail.runtime.distributed import DistributedContext
from vitrail.training.checkpointing import (
    BEST,
    TENSORS,
    CheckpointManager,
    Progress,
    current_environment,
    describe_environment_changes,
    read_progress,
    read_tensors,
    rng_states,
    seed_rngs,
    set_rng_states,
)

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("quick_disk")


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointManager:
    return CheckpointManager(tmp_path / "checkpoint", DistributedContext(CPU))


def save_checkpoint(checkpoints: CheckpointManager, step: int, value: float) -> None:
    checkpoints.save({"learner/w": torch.full((3,), value)}, Progress(step=step, metric_sums={"loss": 0.1 + value}))
    checkpoints.wait()


def test_checkpoint_round_trip_is_exact(checkpoints: CheckpointManager):
    progress = Progress(
        step=7,
        best_score=0.9,
        best_step=5,
        evaluations_since_best=1,
        elapsed_seconds=1.5,
        metric_sums={"loss": 1 / 3},
        environment={"a": 1},
    )
    tensors = {"a": torch.randn(3, 4), "b": torch.arange(5), "c": torch.randn(2, dtype=torch.float64)}
    checkpoints.save(tensors, progress)
    checkpoints.wait()
    path, loaded_progress = checkpoints.latest() or (None, None)
    assert loaded_progress == progress
    loaded = read_tensors(path)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[k], v) and loaded[k].dtype == v.dtype for k, v in tensors.items())


def test_later_weight_changes_do_not_reach_the_checkpoint(
    checkpoints: CheckpointManager, monkeypatch: pytest.MonkeyPatch
):
    release, write = threading.Event(), CheckpointManager._write
    monkeypatch.setattr(CheckpointManager, "_write", lambda *a: (release.wait(5), write(*a)))
    weights = torch.zeros(3)
    checkpoints.save({"w": weights}, Progress(step=1))
    weights += 1  # training continues before anything is written
    release.set()
    checkpoints.wait()
    assert torch.equal(read_tensors(checkpoints.path_of(1))["w"], torch.zeros(3))


def test_last_two_checkpoints_are_kept(checkpoints: CheckpointManager):
    for step in (10, 20, 30, 40):
        save_checkpoint(checkpoints, step, step)
    assert checkpoints.steps() == [30, 40]
    assert {p.name for p in checkpoints.folder.iterdir()} == {"00000030", "00000040"}


def test_best_weights_are_not_listed_as_a_checkpoint(checkpoints: CheckpointManager):
    save_checkpoint(checkpoints, 10, 1)
    checkpoints.save_best({"w": torch.ones(2)}, Progress(step=20))
    checkpoints.wait()
    assert checkpoints.steps() == [10]
    assert checkpoints.steps(BEST) == [20]
    assert torch.equal((checkpoints.read_best(20, {"w": torch.zeros(2)}) or {})["w"], torch.ones(2))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "no state"])
def test_previous_checkpoint_is_used_if_the_last_is_damaged(
    checkpoints: CheckpointManager, damage: str, caplog: pytest.LogCaptureFixture
):
    save_checkpoint(checkpoints, 10, 1)
    save_checkpoint(checkpoints, 20, 2)
    file = checkpoints.path_of(20) / TENSORS
    content = bytearray(file.read_bytes())
    if damage == "truncated":
        file.write_bytes(content[:-3])
    elif damage == "flipped":
        content[-1] ^= 1
        file.write_bytes(content)
    elif damage == "missing":
        file.unlink()
    else:
        (checkpoints.path_of(20) / "state.json").write_text("{")
    path, progress = checkpoints.latest() or (None, Progress())
    assert progress.step == 10
    assert "00000020 is damaged" in caplog.text
    assert torch.equal(read_tensors(path)["learner/w"], torch.ones(3))


def test_latest_is_none_without_checkpoints(checkpoints: CheckpointManager):
    assert checkpoints.latest() is None


def test_failed_write_is_reported_and_training_continues(
    checkpoints: CheckpointManager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    save_checkpoint(checkpoints, 10, 1)

    def raise_disk_full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("vitrail.training.checkpointing.write_safetensors", raise_disk_full)
        save_checkpoint(checkpoints, 20, 2)
    assert "the disk or its quota is full" in caplog.text
    assert checkpoints.error is not None
    assert checkpoints.steps() == [10]
    save_checkpoint(checkpoints, 30, 3)  # the disk has space again
    assert checkpoints.error is None
    assert checkpoints.steps() == [10, 30]


def test_partial_files_of_a_killed_writer_are_removed(checkpoints: CheckpointManager):
    save_checkpoint(checkpoints, 10, 1)
    partial = checkpoints.folder / ".00000020.abcd.tmp"
    partial.mkdir()
    (partial / TENSORS).write_bytes(b"half")
    assert checkpoints.steps() == [10]
    save_checkpoint(checkpoints, 20, 2)
    assert not partial.exists()


def test_unknown_state_field_counts_as_damage(checkpoints: CheckpointManager):
    save_checkpoint(checkpoints, 10, 1)
    (checkpoints.path_of(10) / "state.json").write_text('{"step": 10, "color": "red"}')
    with pytest.raises(CheckpointError, match="damaged"):
        read_progress(checkpoints.path_of(10))


def test_generators_continue_from_their_saved_state():
    random.gauss(0, 1)
    np.random.normal()
    states = rng_states(CPU, DistributedContext(CPU))
    expected = random.gauss(0, 1), np.random.normal(), np.random.rand(3).tolist(), torch.rand(3).tolist()
    set_rng_states(states, CPU, 0)
    assert expected == (random.gauss(0, 1), np.random.normal(), np.random.rand(3).tolist(), torch.rand(3).tolist())


def test_every_process_and_step_has_its_own_seed():
    draws = set()
    for key in ((0, 0), (0, 1), (1, 0), (0, 0, 5), (0, 1, 5), (0, 0, 6)):
        seed_rngs(*key)
        draws.add((random.random(), np.random.rand(), float(torch.rand(()))))
    assert len(draws) == 6
    seed_rngs(0, 0)
    assert (random.random(), np.random.rand(), float(torch.rand(()))) in draws


def test_environment_changes_are_described():
    current = current_environment(CPU, 1)
    assert describe_environment_changes(current, current) == []
    assert describe_environment_changes(current | {"threads": 96}, current) == [
        f"threads was 96 and is {current['threads']}"
    ]
