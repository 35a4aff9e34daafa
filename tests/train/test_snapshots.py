"""Snapshots: which are taken, what is in them, and that neither a kill nor a full disk makes a difference."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from train.processes import Processes
from train.small_runs import (
    at_step,
    digits,
    interrupted,
    on_photos,
    one_thread,
    photos,
    resumed,
    same_bits,
    trained,
    weights,
)

import vitrail
from vitrail.config import TrainConfig, steps
from vitrail.errors import CheckpointError, ConfigError, DataError
from vitrail.models import build
from vitrail.recipes import RECIPES
from vitrail.train.checkpointing import read_tensors, select_prefix
from vitrail.train.loop import fit
from vitrail.train.run_folder import RunFolder
from vitrail.train.snapshots import find_snapshots
from vitrail.train.trainer import Trainer
from vitrail.weights import checkpoint

pytestmark = pytest.mark.usefixtures("quick_disk")


def followed(**changes: Any) -> TrainConfig:
    """Twenty steps, four of them and the first and last ones kept."""
    return digits(snapshot_every=steps(6), keep="last").replace(**changes)


def taken(folder: Path) -> list[int]:
    return list(find_snapshots(folder / "snapshots"))


def kept(folder: Path, step: int) -> dict[str, torch.Tensor]:
    net, _ = checkpoint.read(folder / "snapshots" / f"{step:08d}")
    return net.state_dict()


def files(folder: Path) -> dict[str, bytes]:
    """All that lies there, leftovers too."""
    inside = folder / "snapshots"
    return {str(path.relative_to(inside)): path.read_bytes() for path in inside.rglob("*") if path.is_file()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the runs below are held against."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with one_thread():
        trained(followed(), folder)
    return folder


def test_the_first_each_interval_and_the_last_are_kept(whole: Path):
    assert taken(whole) == [0, 6, 12, 18, 20]
    assert sorted(p.name for p in (whole / "snapshots" / "00000006").iterdir()) == ["config.json", "model.safetensors"]


def test_the_first_is_the_network_before_it_has_learned_and_the_last_is_the_model(whole: Path):
    config = RunFolder(whole).read_config()
    assert config.model is not None
    assert equal(kept(whole, 0), build(config.model, config.seed).state_dict())
    assert equal(kept(whole, 20), weights(whole))
    assert not equal(kept(whole, 18), weights(whole))


def test_a_snapshot_is_a_model_that_knows_its_classes(whole: Path):
    vit = vitrail.load(whole / "snapshots" / "00000012")
    assert vit.labels == tuple("0123456789")
    assert vit.info.to_dict() == vitrail.load(whole).info.to_dict()


def test_nothing_is_kept_unless_asked_for(tmp_path: Path):
    trained(followed(snapshot_every=None, duration="3 steps"), tmp_path / "run")
    assert not (tmp_path / "run" / "snapshots").exists()


def test_keeping_them_changes_nothing_else(whole: Path, tmp_path: Path):
    trained(followed(snapshot_every=None), tmp_path / "run")
    assert same_bits(tmp_path / "run", whole)


def test_averaged_weights_are_what_is_kept(tmp_path: Path):
    trained(followed(ema=0.9, checkpoint_every="6 steps"), tmp_path / "run")
    saved = read_tensors(tmp_path / "run" / "checkpoint" / "00000018")
    average = {name.removeprefix("net."): t for name, t in select_prefix("average", saved).items()}
    raw = {name.removeprefix("net."): t for name, t in select_prefix("learner", saved).items()}
    assert equal(kept(tmp_path / "run", 18), average)
    assert not torch.equal(raw["head.weight"], average["head.weight"])


@pytest.mark.parametrize("step", [5, 6, 11, 18, 19])
def test_an_interrupted_run_ends_with_the_same_snapshots(whole: Path, tmp_path: Path, step: int):
    interrupted(followed(), tmp_path / "run", step)
    resumed(tmp_path / "run")
    assert files(tmp_path / "run") == files(whole)


@pytest.mark.parametrize("step", [3, 7, 13, 19])
def test_a_killed_run_ends_with_the_same_snapshots(whole: Path, tmp_path: Path, step: int):
    """With snapshots newer than its last checkpoint, and a half-written one."""

    def die(_: object) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt), at_step(step, die):
        trained(followed(checkpoint_every="8 steps"), folder)
    later = folder / "snapshots" / "00000017"
    shutil.copytree(folder / "snapshots" / "00000000", later)
    shutil.copytree(later, later.with_name(".00000018.0a1b2c3d.tmp"))
    resumed(folder)
    assert files(folder) == files(whole)


def test_a_run_that_begins_again_takes_its_first_anew(tmp_path: Path):
    """Killed before its first checkpoint; its classes may have other names by then."""
    folder, album = tmp_path / "run", photos(tmp_path / "album", {"apple": 8, "bed": 8}, side=16)
    config = on_photos(album, 1, snapshot_every="1 step")
    trained(config, folder)
    for later in ("checkpoint", "model"):
        shutil.rmtree(folder / later)
    (album / "apple").rename(album / "zebra")
    resumed(folder)
    assert vitrail.load(folder / "snapshots" / "00000000").labels == ("bed", "zebra")


def test_a_disk_that_is_full_costs_a_snapshot_and_not_the_run(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    write = checkpoint.write

    def full(net: Any, info: Any, path: Path, **options: Any) -> Any:
        if path.name == "00000012":
            raise CheckpointError(f"could not write {path}: the disk or its quota is full.")
        return write(net, info, path, **options)

    monkeypatch.setattr(checkpoint, "write", full)
    result = trained(followed(), tmp_path / "run")
    assert result.run.finished
    assert taken(tmp_path / "run") == [0, 6, 18, 20]
    assert "a snapshot could not be written; training continues: could not write" in caplog.text
    assert same_bits(tmp_path / "run", whole)


def test_a_run_that_patience_ends_keeps_its_last_step(tmp_path: Path):
    def forget(logger: Any) -> None:
        with torch.no_grad():
            logger.trainer.learner.net.head.weight.mul_(-1e3)

    with at_step(12, forget):
        result = trained(followed(duration="60 steps", patience=1, evaluate_every="5 steps"), tmp_path / "run")
    assert (result.stop_reason, result.progress.step) == ("patience", 15)
    assert taken(tmp_path / "run") == [0, 6, 12, 15]


def test_a_measurement_that_fails_costs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The step it fails at is saved, and the run goes on after it."""
    folder, evaluate, asked = tmp_path / "run", Trainer.evaluate, itertools.count(1)

    def fail(self: Trainer) -> Any:
        if next(asked) == 2:
            raise DataError("an image is gone")
        return evaluate(self)

    monkeypatch.setattr(Trainer, "evaluate", fail)
    with pytest.raises(DataError, match="resume from step 10"):
        trained(followed(snapshot_every=steps(5)), folder)
    resumed(folder)
    assert taken(folder) == [0, 5, 10, 15, 20]


def test_they_can_be_asked_for_when_a_run_goes_on(tmp_path: Path):
    folder = tmp_path / "run"
    interrupted(followed(snapshot_every=None), folder, 8)
    vitrail.train(out=folder, resume=True, overrides=["snapshot_every=5 steps"], report=False)
    assert taken(folder) == [10, 15, 20]


def test_no_time_between_them_is_refused():
    with pytest.raises(ConfigError, match="snapshot_every must be more than 0, got 0 steps"):
        digits(snapshot_every=steps(0))


@pytest.mark.parametrize("name", ["digits", "mnist", "fashion-mnist"])
def test_small_recipes_leave_something_to_watch(name: str):
    config = RECIPES[name]()
    assert config.snapshot_every is not None
    assert config.snapshot_every.unit == config.duration.unit
    assert 10 <= config.duration.count / config.snapshot_every.count <= 30


def train_here(config: dict[str, Any], folder: str) -> int:
    """In one of several processes."""
    return fit(TrainConfig.from_dict(config), RunFolder(Path(folder))).progress.step


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes(2) as started:
        yield started


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_of_several_processes_the_first_writes_them_whole(processes: Processes, tmp_path: Path, parallel: str):
    config = followed(duration="8 steps", ema=0.9, precision="float64")
    spread = config.replace(parallel=parallel).to_dict()
    assert processes.run(train_here, spread, str(tmp_path / "run")) == [8, 8]
    trained(config, tmp_path / "alone")
    assert taken(tmp_path / "run") == [0, 6, 8]
    for step in taken(tmp_path / "run"):
        alone = kept(tmp_path / "alone", step)
        for name, tensor in kept(tmp_path / "run", step).items():
            torch.testing.assert_close(tensor, alone[name], rtol=1e-6, atol=1e-7)
    assert equal(kept(tmp_path / "run", 8), weights(tmp_path / "run"))
