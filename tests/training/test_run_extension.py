"""Extending a run: from the step at which it resumes, it equals the longer run."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from training.small_runs import (
    at_step,
    digits_config,
    file_contents,
    identical_weights,
    interrupt_run,
    logged_metrics,
    make_photos,
    model_weights,
    one_thread,
    photo_config,
    resume_run,
    send_sigterm,
    train_run,
)

from vitrail import runtime
from vitrail.config import TrainConfig, override, steps
from vitrail.errors import ConfigError, TrainError
from vitrail.runs.run_folder import RunFolder
from vitrail.training.checkpointing import TENSORS
from vitrail.training.resuming import resume_config, scale_durations
from vitrail.training.run_logger import RunLogger

pytestmark = pytest.mark.usefixtures("quick_disk")


@pytest.fixture(autouse=True)
def reset_logged_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.notes, "_logged", set())


def constant_lr_config(length: int) -> TrainConfig:
    """Config with a warm-up and then a constant learning rate."""
    config = digits_config(length, ema=0.9, keep="last", evaluate_every=None, checkpoint_every="5 steps")
    return override(config, ["schedule.kind=constant", "schedule.warmup=3 steps"])


def identical_checkpoints(first: Path, second: Path, step: int) -> bool:
    """Whether two checkpoints have identical weights, weight averages, optimizer states and generators."""
    left, right = (load_file(folder / "checkpoint" / f"{step:08d}" / TENSORS) for folder in (first, second))
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


@pytest.fixture(scope="module")
def longer_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run of the longer duration."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    with one_thread():
        train_run(constant_lr_config(20), folder)
    return folder


@pytest.mark.parametrize("finished", [True, False])
def test_extended_run_at_a_constant_rate_equals_the_longer_run(
    longer_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, finished: bool
):
    if finished:
        train_run(constant_lr_config(10), tmp_path / "run")
    else:
        interrupt_run(constant_lr_config(10), tmp_path / "run", 7)
    result = train_run(constant_lr_config(20), tmp_path / "run", resume=True)
    done = 10 if finished else 7
    assert result.progress.step == 20
    assert (
        f"the run is extended from 10 to 20 steps: from step {done + 1} on it has the learning rates of the longer "
        "run, 0.01 next after 0.01."
    ) in caplog.text
    assert identical_weights(tmp_path / "run", longer_run)
    assert identical_checkpoints(tmp_path / "run", longer_run, 20)


def test_extended_run_uses_the_longer_schedule_from_there_on(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    config = digits_config(20, log_every="1 step", evaluate_every=None)
    train_run(config, tmp_path / "uninterrupted")
    train_run(config.replace(duration=steps(10)), tmp_path / "run")
    short_rates = [line["lr"] for line in logged_metrics(tmp_path / "run") if "lr" in line]
    train_run(config, tmp_path / "run", resume=True)
    longer_rates, extended_rates = (
        [line["lr"] for line in logged_metrics(tmp_path / name) if "lr" in line] for name in ("uninterrupted", "run")
    )
    assert extended_rates == short_rates + longer_rates[10:]
    assert extended_rates[9] < 3e-4 < 4e-3 < extended_rates[10]
    assert f"{longer_rates[10]:.3g} next after {short_rates[9]:.3g}" in caplog.text


def test_extended_run_keeps_its_old_model_until_the_new_end(longer_run: Path, tmp_path: Path):
    train_run(constant_lr_config(10), tmp_path / "run")
    old_weights = model_weights(tmp_path / "run")
    unchanged: list[bool] = []

    def compare_and_stop(logger: RunLogger) -> None:
        unchanged.append(
            all(tensor.equal(old_weights[name]) for name, tensor in model_weights(tmp_path / "run").items())
        )
        send_sigterm(logger)

    with at_step(15, compare_and_stop):
        assert train_run(constant_lr_config(20), tmp_path / "run", resume=True).stop_reason == "SIGTERM"
    assert unchanged == [True]
    assert RunFolder(tmp_path / "run").read_config().duration == steps(20)
    resume_run(tmp_path / "run")
    assert identical_weights(tmp_path / "run", longer_run)


def test_run_with_used_up_patience_is_not_reported_as_extended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("vitrail.training.run_logger._is_better", lambda scores, before: before[0] is None)
    config = digits_config(6, patience=2, evaluate_every="1 step")
    assert train_run(config, tmp_path / "run").progress.step == 3
    assert train_run(config.replace(duration=steps(8)), tmp_path / "run", resume=True).progress.step == 3
    assert "the run is not extended: patience=2 is used up at step 3, 2 evaluations after the best one" in caplog.text
    assert train_run(config.replace(duration=steps(8), patience=None), tmp_path / "run", resume=True).progress.step == 8


def test_changed_number_of_steps_per_epoch_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    album = make_photos(tmp_path / "album", {"a": 16, "b": 16}, side=8)
    config = photo_config(album).replace(duration="3 epochs")
    total = interrupt_run(config, tmp_path / "run", 3).progress.total_steps
    for file in sorted(album.glob("*/*"))[::2]:
        file.unlink()
    resume_run(tmp_path / "run")
    assert f"duration=3 epochs was {total} steps and is " in caplog.text


def test_finished_model_without_a_checkpoint_is_not_replaced(tmp_path: Path):
    """The checkpoints were deleted to save space, so that the run cannot be resumed."""
    train_run(digits_config(2), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    before = file_contents(tmp_path / "run")
    for length in (2, 4):
        with pytest.raises(TrainError, match="has a finished model but no usable checkpoint"):
            train_run(digits_config(length), tmp_path / "run", resume=True)
    assert {
        path: content for path, content in file_contents(tmp_path / "run").items() if path.name != ".lock"
    } == before


def test_run_cannot_be_shortened(tmp_path: Path):
    interrupt_run(constant_lr_config(10), tmp_path / "run", 7)
    for shorter in ("9 steps", "5 steps", "0.2 epochs"):
        with pytest.raises(ConfigError, match=r"is shorter than the run \(10 steps, of which 7 are done\)"):
            train_run(constant_lr_config(10).replace(duration=shorter), tmp_path / "run", resume=True)
    assert RunFolder(tmp_path / "run").read_config().duration == steps(10)


def test_result_is_removed_before_the_config_is_extended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """If the process is killed in between, the folder must not look like a finished longer run."""
    run = RunFolder(tmp_path / "run")
    run.create(constant_lr_config(10))
    run.write_result({})
    monkeypatch.setattr(RunFolder, "write_config", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run.reopen(constant_lr_config(20))
    assert run.status == "unfinished"
    assert run.read_result() is None


def test_same_length_in_another_unit_is_not_an_extension(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    interrupt_run(constant_lr_config(10), tmp_path / "run", 7)
    train_run(constant_lr_config(10).replace(duration="640 images"), tmp_path / "run", resume=True)
    assert "extended" not in caplog.text


def test_extension_scales_the_end_of_the_schedule_and_keeps_the_start(tmp_path: Path):
    """Cool-down and mix_off scale with the duration unless they are given; the warm-up cannot change."""
    config = override(
        digits_config(10),
        ["schedule.warmup=2 steps", "schedule.cooldown=4 steps", "augment.mixup=0.2", "augment.mix_off=1 step"],
    )
    run = RunFolder(tmp_path / "run")
    run.create(config)
    extended = resume_config(run, ["duration=20 steps"], {})
    assert [str(extended.schedule.warmup), str(extended.schedule.cooldown)] == ["2 steps", "8 steps"]
    assert str(extended.augment.mix_off) == "2 steps"
    assert (
        str(resume_config(run, ["duration=20 steps", "schedule.cooldown=3 steps"], {}).schedule.cooldown) == "3 steps"
    )
    for overrides in (["schedule.cooldown=3 steps"], ["duration=20 steps", "schedule.warmup=3 steps"]):
        with pytest.raises(ConfigError, match=r"schedule\.\w+ is \d steps and cannot be changed when a run is resumed"):
            resume_config(run, overrides, {})
    assert scale_durations(config, config, ("schedule.cooldown",), set()) == config
