"""Snapshots: the steps they are taken at, their contents, and runs that are interrupted or meet a full disk."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from training.processes import Processes
from training.small_runs import (
    at_step,
    digits_config,
    identical_weights,
    interrupt_run,
    make_photos,
    model_weights,
    one_thread,
    photo_config,
    resume_run,
    train_run,
)

import vitrail
from vitrail.config import TrainConfig, steps
from vitrail.errors import CheckpointError, ConfigError, DataError
from vitrail.models import build
from vitrail.recipes import RECIPES
from vitrail.runs.run_folder import RunFolder
from vitrail.training.checkpointing import read_tensors, select_prefix
from vitrail.training.loop import fit
from vitrail.training.snapshots import find_snapshots
from vitrail.training.trainer import Trainer
from vitrail.weights import checkpoint

pytestmark = pytest.mark.usefixtures("quick_disk")


def snapshot_config(**changes: Any) -> TrainConfig:
    """Config of 20 steps with a snapshot every 6 steps."""
    return digits_config(snapshot_every=steps(6), keep="last").replace(**changes)


def snapshot_steps(folder: Path) -> list[int]:
    return list(find_snapshots(folder / "snapshots"))


def snapshot_weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    net, _ = checkpoint.read(folder / "snapshots" / f"{step:08d}")
    return net.state_dict()


def snapshot_files(folder: Path) -> dict[str, bytes]:
    """Contents of all files in the snapshots folder, including leftovers."""
    snapshots = folder / "snapshots"
    return {str(path.relative_to(snapshots)): path.read_bytes() for path in snapshots.rglob("*") if path.is_file()}


def equal_tensors(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def reference_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run that the runs below are compared with."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    with one_thread():
        train_run(snapshot_config(), folder)
    return folder


def test_snapshots_are_taken_at_the_start_each_interval_and_the_end(reference_run: Path):
    assert snapshot_steps(reference_run) == [0, 6, 12, 18, 20]
    assert sorted(p.name for p in (reference_run / "snapshots" / "00000006").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_first_snapshot_is_untrained_and_the_last_is_the_model(reference_run: Path):
    config = RunFolder(reference_run).read_config()
    assert config.model is not None
    assert equal_tensors(snapshot_weights(reference_run, 0), build(config.model, config.seed).state_dict())
    assert equal_tensors(snapshot_weights(reference_run, 20), model_weights(reference_run))
    assert not equal_tensors(snapshot_weights(reference_run, 18), model_weights(reference_run))


def test_snapshot_loads_as_a_model_with_labels(reference_run: Path):
    vit = vitrail.load(reference_run / "snapshots" / "00000012")
    assert vit.labels == tuple("0123456789")
    assert vit.info.to_dict() == vitrail.load(reference_run).info.to_dict()


def test_snapshots_are_off_if_snapshot_every_is_none(tmp_path: Path):
    train_run(snapshot_config(snapshot_every=None, duration="3 steps"), tmp_path / "run")
    assert not (tmp_path / "run" / "snapshots").exists()


def test_snapshots_do_not_change_the_result(reference_run: Path, tmp_path: Path):
    train_run(snapshot_config(snapshot_every=None), tmp_path / "run")
    assert identical_weights(tmp_path / "run", reference_run)


def test_snapshots_have_the_averaged_weights(tmp_path: Path):
    train_run(snapshot_config(ema=0.9, checkpoint_every="6 steps"), tmp_path / "run")
    saved = read_tensors(tmp_path / "run" / "checkpoint" / "00000018")
    average = {name.removeprefix("net."): t for name, t in select_prefix("average", saved).items()}
    current = {name.removeprefix("net."): t for name, t in select_prefix("learner", saved).items()}
    assert equal_tensors(snapshot_weights(tmp_path / "run", 18), average)
    assert not torch.equal(current["head.weight"], average["head.weight"])


@pytest.mark.parametrize("step", [5, 6, 11, 18, 19])
def test_interrupted_run_has_the_same_snapshots(reference_run: Path, tmp_path: Path, step: int):
    interrupt_run(snapshot_config(), tmp_path / "run", step)
    resume_run(tmp_path / "run")
    assert snapshot_files(tmp_path / "run") == snapshot_files(reference_run)


@pytest.mark.parametrize("step", [3, 7, 13, 19])
def test_killed_run_has_the_same_snapshots(reference_run: Path, tmp_path: Path, step: int):
    """The folder has snapshots newer than its last checkpoint, and a partial one."""

    def raise_interrupt(_: object) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt), at_step(step, raise_interrupt):
        train_run(snapshot_config(checkpoint_every="8 steps"), folder)
    later = folder / "snapshots" / "00000017"
    shutil.copytree(folder / "snapshots" / "00000000", later)
    shutil.copytree(later, later.with_name(".00000018.0a1b2c3d.tmp"))
    resume_run(folder)
    assert snapshot_files(folder) == snapshot_files(reference_run)


def test_restarted_run_takes_its_first_snapshot_again(tmp_path: Path):
    """The run was killed before its first checkpoint, and a class was renamed since."""
    folder, album = tmp_path / "run", make_photos(tmp_path / "album", {"apple": 8, "bed": 8}, side=16)
    config = photo_config(album, 1, snapshot_every="1 step")
    train_run(config, folder)
    for name in ("checkpoint", "model"):
        shutil.rmtree(folder / name)
    (album / "apple").rename(album / "zebra")
    resume_run(folder)
    assert vitrail.load(folder / "snapshots" / "00000000").labels == ("bed", "zebra")


def test_full_disk_loses_a_snapshot_but_not_the_run(
    reference_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    write = checkpoint.write

    def write_or_fail(net: Any, info: Any, path: Path, **options: Any) -> Any:
        if path.name == "00000012":
            raise CheckpointError(f"could not write {path}: the disk or its quota is full.")
        return write(net, info, path, **options)

    monkeypatch.setattr(checkpoint, "write", write_or_fail)
    result = train_run(snapshot_config(), tmp_path / "run")
    assert result.run.finished
    assert snapshot_steps(tmp_path / "run") == [0, 6, 18, 20]
    assert "a snapshot could not be written; training continues: could not write" in caplog.text
    assert identical_weights(tmp_path / "run", reference_run)


def test_run_stopped_by_patience_has_a_snapshot_of_its_last_step(tmp_path: Path):
    def negate_head(logger: Any) -> None:
        with torch.no_grad():
            logger.trainer.objective.net.head.weight.mul_(-1e3)

    with at_step(12, negate_head):
        result = train_run(snapshot_config(duration="60 steps", patience=1, evaluate_every="5 steps"), tmp_path / "run")
    assert (result.stop_reason, result.progress.step) == ("patience", 15)
    assert snapshot_steps(tmp_path / "run") == [0, 6, 12, 15]


def test_failed_evaluation_loses_no_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The step of the failed evaluation is saved, and the run resumes after it."""
    folder, evaluate, calls = tmp_path / "run", Trainer.evaluate, itertools.count(1)

    def fail_second_time(self: Trainer) -> Any:
        if next(calls) == 2:
            raise DataError("an image is gone")
        return evaluate(self)

    monkeypatch.setattr(Trainer, "evaluate", fail_second_time)
    with pytest.raises(DataError, match="resume from step 10"):
        train_run(snapshot_config(snapshot_every=steps(5)), folder)
    resume_run(folder)
    assert snapshot_steps(folder) == [0, 5, 10, 15, 20]


def test_snapshots_can_be_enabled_on_resume(tmp_path: Path):
    folder = tmp_path / "run"
    interrupt_run(snapshot_config(snapshot_every=None), folder, 8)
    vitrail.train(out=folder, resume=True, overrides=["snapshot_every=5 steps"], report=False)
    assert snapshot_steps(folder) == [10, 15, 20]


def test_snapshot_interval_of_zero_is_refused():
    with pytest.raises(ConfigError, match="snapshot_every must be more than 0, got 0 steps"):
        digits_config(snapshot_every=steps(0))


@pytest.mark.parametrize("name", ["digits", "mnist", "fashion-mnist"])
def test_small_recipes_take_10_to_30_snapshots(name: str):
    config = RECIPES[name]()
    assert config.snapshot_every is not None
    assert config.snapshot_every.unit == config.duration.unit
    assert 10 <= config.duration.count / config.snapshot_every.count <= 30


def train_in_process(config: dict[str, Any], folder: str) -> int:
    """Train in one process of a group."""
    return fit(TrainConfig.from_dict(config), RunFolder(Path(folder))).progress.step


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes(2) as pool:
        yield pool


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_main_process_writes_full_snapshots(processes: Processes, tmp_path: Path, parallel: str):
    config = snapshot_config(duration="8 steps", ema=0.9, precision="float64")
    parallel_config = config.replace(parallel=parallel).to_dict()
    assert processes.run(train_in_process, parallel_config, str(tmp_path / "run")) == [8, 8]
    train_run(config, tmp_path / "single")
    assert snapshot_steps(tmp_path / "run") == [0, 6, 8]
    for step in snapshot_steps(tmp_path / "run"):
        expected = snapshot_weights(tmp_path / "single", step)
        for name, tensor in snapshot_weights(tmp_path / "run", step).items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-7)
    assert equal_tensors(snapshot_weights(tmp_path / "run", 8), model_weights(tmp_path / "run"))
