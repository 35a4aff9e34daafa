"""Checkpoints are whole or not there; the newest whole one is found; nothing is lost of a generator."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from vitrail.errors import CheckpointError
from vitrail.train.checkpointing import (
    BEST,
    TENSORS,
    CheckpointManager,
    Progress,
    current_environment,
    describe_changes,
    read_progress,
    read_tensors,
    rng_states,
    seed_rngs,
    set_rng_states,
)
from vitrail.train.distributed import DistributedContext

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("quick_disk")


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointManager:
    return CheckpointManager(tmp_path / "checkpoint", DistributedContext(CPU))


def saved(checkpoints: CheckpointManager, step: int, value: float) -> None:
    checkpoints.save({"learner/w": torch.full((3,), value)}, Progress(step=step, metric_sums={"loss": 0.1 + value}))
    checkpoints.wait()


def test_a_checkpoint_comes_back_as_it_was_saved(checkpoints: CheckpointManager):
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
    path, read = checkpoints.latest() or (None, None)
    assert read == progress
    found = read_tensors(path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[k], v) and found[k].dtype == v.dtype for k, v in tensors.items())


def test_what_is_saved_is_what_was_there_when_asked(checkpoints: CheckpointManager, monkeypatch: pytest.MonkeyPatch):
    go_on, write = threading.Event(), CheckpointManager._write
    monkeypatch.setattr(CheckpointManager, "_write", lambda *a: (go_on.wait(5), write(*a)))
    weights = torch.zeros(3)
    checkpoints.save({"w": weights}, Progress(step=1))
    weights += 1  # training goes on before anything is written
    go_on.set()
    checkpoints.wait()
    assert torch.equal(read_tensors(checkpoints.path_of(1))["w"], torch.zeros(3))


def test_the_last_two_are_kept(checkpoints: CheckpointManager):
    for step in (10, 20, 30, 40):
        saved(checkpoints, step, step)
    assert checkpoints.steps() == [30, 40]
    assert {p.name for p in checkpoints.folder.iterdir()} == {"00000030", "00000040"}


def test_best_weights_are_no_checkpoint_to_go_on_from(checkpoints: CheckpointManager):
    saved(checkpoints, 10, 1)
    checkpoints.save_best({"w": torch.ones(2)}, Progress(step=20))
    checkpoints.wait()
    assert checkpoints.steps() == [10]
    assert checkpoints.steps(BEST) == [20]
    assert torch.equal((checkpoints.read_best(20) or {})["w"], torch.ones(2))


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "no state"])
def test_a_damaged_last_checkpoint_gives_way_to_the_one_before(
    checkpoints: CheckpointManager, damage: str, caplog: pytest.LogCaptureFixture
):
    saved(checkpoints, 10, 1)
    saved(checkpoints, 20, 2)
    file = checkpoints.path_of(20) / TENSORS
    content = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(content[:-3])
    elif damage == "flipped":
        content[-1] ^= 1
        file.write_bytes(content)
    elif damage == "gone":
        file.unlink()
    else:
        (checkpoints.path_of(20) / "state.json").write_text("{")
    path, progress = checkpoints.latest() or (None, Progress())
    assert progress.step == 10
    assert "00000020 is damaged" in caplog.text
    assert torch.equal(read_tensors(path)["learner/w"], torch.ones(3))


def test_no_checkpoint_is_no_error(checkpoints: CheckpointManager):
    assert checkpoints.latest() is None


def test_a_failed_write_is_said_and_training_goes_on(
    checkpoints: CheckpointManager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    saved(checkpoints, 10, 1)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("vitrail.train.checkpointing.write_safetensors", full)
        saved(checkpoints, 20, 2)
    assert "the disk or its quota is full" in caplog.text
    assert checkpoints.error is not None
    assert checkpoints.steps() == [10]
    saved(checkpoints, 30, 3)  # there is room again
    assert checkpoints.error is None
    assert checkpoints.steps() == [10, 30]


def test_what_a_killed_writer_left_is_swept_away(checkpoints: CheckpointManager):
    saved(checkpoints, 10, 1)
    left = checkpoints.folder / ".00000020.abcd.tmp"
    left.mkdir()
    (left / TENSORS).write_bytes(b"half")
    assert checkpoints.steps() == [10]
    saved(checkpoints, 20, 2)
    assert not left.exists()


def test_an_unknown_field_is_damage_not_a_crash(checkpoints: CheckpointManager):
    saved(checkpoints, 10, 1)
    (checkpoints.path_of(10) / "state.json").write_text('{"step": 10, "color": "red"}')
    with pytest.raises(CheckpointError, match="damaged"):
        read_progress(checkpoints.path_of(10))


def test_generators_go_on_where_they_were():
    random.gauss(0, 1)
    np.random.normal()
    states = rng_states(CPU, DistributedContext(CPU))
    expected = random.gauss(0, 1), np.random.normal(), np.random.rand(3).tolist(), torch.rand(3).tolist()
    set_rng_states(states, CPU, 0)
    assert expected == (random.gauss(0, 1), np.random.normal(), np.random.rand(3).tolist(), torch.rand(3).tolist())


def test_each_process_and_each_step_seeds_generators_otherwise():
    found = set()
    for key in ((0, 0), (0, 1), (1, 0), (0, 0, 5), (0, 1, 5), (0, 0, 6)):
        seed_rngs(*key)
        found.add((random.random(), np.random.rand(), float(torch.rand(()))))
    assert len(found) == 6
    seed_rngs(0, 0)
    assert (random.random(), np.random.rand(), float(torch.rand(()))) in found


def test_what_a_run_depends_on_is_compared():
    now = current_environment(CPU, 1)
    assert describe_changes(now, now) == []
    assert describe_changes(now | {"threads": 96}, now) == [f"threads was 96 and is {now['threads']}"]
