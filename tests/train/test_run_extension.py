"""A run can be made longer: from the step it goes on with, it is the longer run."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from train.small_runs import (
    at_step,
    contents,
    digits,
    interrupted,
    lines,
    on_photos,
    one_thread,
    photos,
    resumed,
    same_bits,
    stop,
    trained,
    weights,
)

from vitrail import runtime
from vitrail.api.resuming import resume_config as settings_of
from vitrail.api.resuming import scale_durations
from vitrail.config import TrainConfig, override, steps
from vitrail.errors import ConfigError, TrainError
from vitrail.train.checkpointing import TENSORS
from vitrail.train.run_folder import RunFolder
from vitrail.train.run_logger import RunLogger

pytestmark = pytest.mark.usefixtures("quick_disk")


@pytest.fixture(autouse=True)
def everything_is_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_logged", set())


def constant(length: int) -> TrainConfig:
    """A warm-up, and then always the same learning rate."""
    config = digits(length, ema=0.9, keep="last", evaluate_every=None, checkpoint_every="5 steps")
    return override(config, ["schedule.kind=constant", "schedule.warmup=3 steps"])


def same_state(one: Path, other: Path, step: int) -> bool:
    """Of the checkpoints: weights, their average, the optimizer's memory, generators."""
    left, right = (load_file(folder / "checkpoint" / f"{step:08d}" / TENSORS) for folder in (one, other))
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The longer run from the start."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with one_thread():
        trained(constant(20), folder)
    return folder


@pytest.mark.parametrize("finished", [True, False])
def test_at_a_constant_rate_an_extended_run_has_the_bits_of_the_longer_one(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, finished: bool
):
    if finished:
        trained(constant(10), tmp_path / "run")
    else:
        interrupted(constant(10), tmp_path / "run", 7)
    result = trained(constant(20), tmp_path / "run", resume=True)
    done = 10 if finished else 7
    assert result.progress.step == 20
    assert (
        f"the run is extended from 10 to 20 steps: from step {done + 1} on it has the learning rates of the longer "
        "run, 0.01 next after 0.01."
    ) in caplog.text
    assert same_bits(tmp_path / "run", whole)
    assert same_state(tmp_path / "run", whole, 20)


def test_a_falling_rate_is_that_of_the_longer_run_from_there_on(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    config = digits(20, log_every="1 step", evaluate_every=None)
    trained(config, tmp_path / "whole")
    trained(config.replace(duration=steps(10)), tmp_path / "run")
    short = [line["lr"] for line in lines(tmp_path / "run") if "lr" in line]
    trained(config, tmp_path / "run", resume=True)
    longer, extended = ([line["lr"] for line in lines(tmp_path / name) if "lr" in line] for name in ("whole", "run"))
    assert extended == short + longer[10:]
    assert extended[9] < 3e-4 < 4e-3 < extended[10]
    assert f"{longer[10]:.3g} next after {short[9]:.3g}" in caplog.text


def test_an_extended_run_goes_on_to_its_new_end_and_keeps_its_old_model_until_then(whole: Path, tmp_path: Path):
    trained(constant(10), tmp_path / "run")
    old = weights(tmp_path / "run")
    seen: list[bool] = []

    def look(logger: RunLogger) -> None:
        seen.append(all(tensor.equal(old[name]) for name, tensor in weights(tmp_path / "run").items()))
        stop(logger)

    with at_step(15, look):
        assert trained(constant(20), tmp_path / "run", resume=True).stop_reason == "SIGTERM"
    assert seen == [True]
    assert RunFolder(tmp_path / "run").read_config().duration == steps(20)
    resumed(tmp_path / "run")
    assert same_bits(tmp_path / "run", whole)


def test_a_run_whose_patience_is_used_up_is_not_said_to_be_extended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("vitrail.train.run_logger._is_better", lambda found, before: before[0] is None)
    stuck = digits(6, patience=2, evaluate_every="1 step")
    assert trained(stuck, tmp_path / "run").progress.step == 3
    assert trained(stuck.replace(duration=steps(8)), tmp_path / "run", resume=True).progress.step == 3
    assert "the run is not extended: patience=2 is used up at step 3, 2 evaluations after the best one" in caplog.text
    assert trained(stuck.replace(duration=steps(8), patience=None), tmp_path / "run", resume=True).progress.step == 8


def test_a_duration_in_epochs_that_is_another_number_of_steps_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    album = photos(tmp_path / "album", {"a": 16, "b": 16}, side=8)
    config = on_photos(album).replace(duration="3 epochs")
    total = interrupted(config, tmp_path / "run", 3).progress.total_steps
    for last in sorted(album.glob("*/*"))[::2]:
        last.unlink()
    resumed(tmp_path / "run")
    assert f"duration=3 epochs was {total} steps and is " in caplog.text


def test_a_finished_model_is_not_replaced_by_a_run_from_the_beginning(tmp_path: Path):
    """Its checkpoints were removed to save room: there is nothing to go on from."""
    trained(digits(2), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    before = contents(tmp_path / "run")
    for length in (2, 4):
        with pytest.raises(TrainError, match="has a finished model but no usable checkpoint"):
            trained(digits(length), tmp_path / "run", resume=True)
    assert {path: there for path, there in contents(tmp_path / "run").items() if path.name != ".lock"} == before


def test_a_run_cannot_be_made_shorter(tmp_path: Path):
    interrupted(constant(10), tmp_path / "run", 7)
    for shorter in ("9 steps", "5 steps", "0.2 epochs"):
        with pytest.raises(ConfigError, match=r"fewer than the 10 of the run \(10 steps\), of which 7 are done"):
            trained(constant(10).replace(duration=shorter), tmp_path / "run", resume=True)
    assert RunFolder(tmp_path / "run").read_config().duration == steps(10)


def test_a_result_is_gone_before_the_settings_are_those_of_a_longer_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Killed in between, the folder must not look like a longer run that is finished."""
    run = RunFolder(tmp_path / "run")
    run.create(constant(10))
    run.write_result({})
    monkeypatch.setattr(RunFolder, "write_config", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run.reopen(constant(20))
    assert run.status == "unfinished"
    assert run.read_result() is None


def test_the_same_length_in_another_unit_is_no_extension(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    interrupted(constant(10), tmp_path / "run", 7)
    trained(constant(10).replace(duration="640 images"), tmp_path / "run", resume=True)
    assert "extended" not in caplog.text


def test_the_end_keeps_its_share_of_a_longer_run_and_the_start_stays(tmp_path: Path):
    """Unless they are given: what comes at the end may change with the length, how it began may not."""
    config = override(
        digits(10),
        ["schedule.warmup=2 steps", "schedule.cooldown=4 steps", "augment.mixup=0.2", "augment.mix_off=1 step"],
    )
    run = RunFolder(tmp_path / "run")
    run.create(config)
    found = settings_of(run, ["duration=20 steps"], {})
    assert [str(found.schedule.warmup), str(found.schedule.cooldown)] == ["2 steps", "8 steps"]
    assert str(found.augment.mix_off) == "2 steps"
    assert str(settings_of(run, ["duration=20 steps", "schedule.cooldown=3 steps"], {}).schedule.cooldown) == "3 steps"
    for refused in (["schedule.cooldown=3 steps"], ["duration=20 steps", "schedule.warmup=3 steps"]):
        with pytest.raises(ConfigError, match=r"schedule\.\w+ is \d steps and cannot change when a run is resumed"):
            settings_of(run, refused, {})
    assert scale_durations(config, config, ("schedule.cooldown",), set()) == config
