"""`auto_resume`: the same call starts a run, resumes it, or returns the finished run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from small_models import model, small
from training.small_runs import at_step, digits_config, file_contents, identical_weights, make_photos, send_sigterm

import vitrail
from vitrail import runtime
from vitrail.config import override, steps
from vitrail.errors import ConfigError, TrainError
from vitrail.recipes import RECIPES
from vitrail.runs.run_folder import RESTART_LOCK_TIMEOUT_S, RunFolder
from vitrail.training.resuming import changed_settings, resolve_run_folder

pytestmark = pytest.mark.usefixtures("quick_disk", "in_tmp_dir")


@pytest.fixture(autouse=True)
def reset_logged_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.notes, "_logged", set())


def train(length: int = 6, **options: object) -> vitrail.Run:
    return vitrail.train(digits_config(length, **options), auto_resume=True, report=False)


def test_same_call_starts_resumes_and_returns_the_finished_run(caplog: pytest.LogCaptureFixture):
    with at_step(3, send_sigterm):
        stopped = train()
    assert (stopped.path, stopped.stop_reason, stopped.resume_step) == (Path("runs/small"), "SIGTERM", 3)
    finished = train()
    assert (finished.path, finished.stop_reason) == (Path("runs/small"), None)
    uninterrupted = vitrail.train(digits_config(6), out="uninterrupted", report=False)
    assert identical_weights(uninterrupted.path, finished.path)
    before = file_contents(Path("runs"))
    repeated = train()
    assert "the run in runs/small is finished; there is nothing to do." in caplog.text
    assert repeated.finished
    assert finished.scores is not None
    assert repeated.scores is not None
    assert repeated.scores.to_dict() == finished.scores.to_dict()
    assert repeated.baselines.keys() == finished.baselines.keys()
    assert repeated.model.labels == tuple("0123456789")
    assert file_contents(Path("runs")) == before
    assert not Path("runs/small-2").exists()


def test_run_killed_before_its_config_or_checkpoint_starts_again(caplog: pytest.LogCaptureFixture):
    Path("runs/small/checkpoint").mkdir(parents=True)  # killed before config.json was written
    Path("runs/small/checkpoint/.lock").touch()
    Path("runs/small/.config.json.ab12.tmp").touch()
    finished = train()
    assert finished.finished
    RunFolder(Path("early")).create(finished.config)  # killed before its first checkpoint
    restarted = vitrail.train(digits_config(6), auto_resume=True, out="early", report=False)
    assert "early has no checkpoint yet: the run starts from the beginning" in caplog.text
    assert identical_weights(restarted.path, finished.path)


def test_run_is_finished_only_after_its_comparisons():
    run_names = []

    def stop_second_run(logger: object) -> None:
        run_names.append(logger.run.path.name)  # type: ignore[attr-defined]
        if len(run_names) == 2:
            send_sigterm(logger)  # type: ignore[arg-type]

    with at_step(3, stop_second_run):
        stopped = train(compare=["seed=1"])
    assert (stopped.stop_reason, stopped.finished, RunFolder(stopped.path).status) == ("SIGTERM", True, "unfinished")
    finished, repeated = train(compare=["seed=1"]), train(compare=["seed=1"])
    assert RunFolder(finished.path).status == "finished"
    assert [comparison.path.name for comparison in repeated.comparisons] == ["seed-1"]
    assert repeated.comparisons[0].scores is not None
    assert finished.comparisons[0].scores is not None
    assert repeated.comparisons[0].scores.to_dict() == finished.comparisons[0].scores.to_dict()
    assert repeated.comparisons[0].config.seed == 1
    shutil.rmtree(finished.path / "compare")
    assert train(compare=["seed=1"]).comparisons[0].finished


def test_unreadable_result_is_computed_again():
    finished = train()
    assert finished.scores is not None
    result = RunFolder(finished.path).read_result()
    for text in ("{", "[]", "{}"):
        RunFolder(finished.path).result.write_text(text)
        repeated = train()
        assert repeated.scores is not None
        assert repeated.scores.to_dict() == finished.scores.to_dict()
        assert RunFolder(finished.path).read_result() == result


def test_changed_settings_are_refused_by_name():
    train(2)
    for changed, message in (
        (override(digits_config(2), ["optim.lr=0.5"]), r"optim.lr is 0.01 and cannot be changed when a run is resumed"),
        (override(digits_config(2), ["model.depth=1"]), r"model.depth is 2 and cannot be changed"),
        (override(digits_config(2), ["augment.scale=(0.1, 1)"]), r"augment.scale is .* and cannot be changed"),
        (digits_config(2, batch_size=32), r"batch_size is 64 and cannot be changed"),
    ):
        with pytest.raises(ConfigError, match=message):
            vitrail.train(changed, auto_resume=True, report=False)
    with pytest.raises(ConfigError, match=r"name is small and cannot be changed"):
        vitrail.train("digits", auto_resume=True, out="runs/small", report=False)
    config = override(digits_config(2), ["log_every=1 step", "data.workers=1"])
    assert vitrail.train(config, auto_resume=True, report=False).finished


def test_resolved_settings_do_not_count_as_changed():
    """The run folder has the resolved values of num_classes=0, batch_size=auto and preprocess=none."""
    config = digits_config(2, batch_size="auto", preprocess=None)
    assert vitrail.train(config, auto_resume=True, report=False).config.batch_size != "auto"
    assert vitrail.train(config, auto_resume=True, report=False).finished
    settings = ["batch_size=auto", "duration=2 steps"]
    assert vitrail.train(config.replace(batch_size=64), overrides=settings, auto_resume=True, report=False).finished
    for name, recipe in RECIPES.items():
        assert changed_settings(recipe(), recipe()) == [], name


def test_longer_duration_extends_and_shorter_is_refused():
    assert train(4).config.duration == steps(4)
    assert RunFolder(train(6).path).read_config().duration == steps(6)
    with pytest.raises(ConfigError, match=r"duration=4 steps is shorter than the run \(6 steps"):
        train(4)
    assert train(6).finished


def test_repeated_extending_call_resumes_the_extended_run():
    """The warm-up of a recipe scales with the duration of a new run; that of an extended run does not change."""
    recipe = override(digits_config(4), ["schedule.warmup=2 steps"])

    def extend(*overrides: str) -> vitrail.Run:
        return vitrail.train(recipe, overrides=["duration=8 steps", *overrides], auto_resume=True, report=False)

    assert vitrail.train(recipe, auto_resume=True, report=False).finished
    with at_step(6, send_sigterm):
        assert extend().resume_step == 6
    assert extend().config.schedule.warmup == steps(2)
    assert extend("schedule.warmup=2 steps").finished
    with pytest.raises(ConfigError, match=r"schedule.warmup is 2 steps and cannot be changed"):
        extend("schedule.warmup=4 steps")


def test_setting_that_is_switched_off_counts_as_changed():
    assert changed_settings(digits_config(2), digits_config(2, ema=0.9)) == ["ema"]
    assert changed_settings(digits_config(2), override(digits_config(2), ["optim.layer_decay=0.7"])) == [
        "optim.layer_decay"
    ]
    folder, slash = (override(digits_config(2), [f"data.source={name}"]) for name in ("photos", "photos/"))
    assert changed_settings(folder, slash) == []


def test_repeated_call_with_named_model_and_overrides_is_unchanged():
    def train_named(name: str = "ViT-Ti/4", **options: object) -> vitrail.Run:
        settings = ["model.depth=1", "model.mlp_dim=32"]
        return vitrail.train(digits_config(1), model=name, overrides=settings, report=False, **options)  # type: ignore[arg-type]

    assert train_named(auto_resume=True).finished
    assert train_named(auto_resume=True).finished
    assert train_named(resume=True).finished
    with pytest.raises(ConfigError, match="ViT-S/4 cannot be changed when a run is resumed"):
        train_named("ViT-S/4", resume=True)


def test_fine_tuning_resumes_automatically(caplog: pytest.LogCaptureFixture):
    model(small()).save("start")
    make_photos(Path("photos"), {"a": 20, "b": 20}, side=8)

    def tune(**options: object) -> vitrail.Run:
        settings = ["duration=4 steps", "data.workers=0", "data.held_out=0.2"]
        return vitrail.finetune("start", "photos", overrides=settings, auto_resume=True, report=False, **options)  # type: ignore[arg-type]

    with at_step(2, send_sigterm):
        assert tune().resume_step == 2
    finished = tune()
    assert (finished.path, finished.finished) == (Path("runs/finetune-photos"), True)
    assert tune().scores is not None
    assert "runs/finetune-photos is finished" in caplog.text
    with pytest.raises(ConfigError, match="--recipe paper cannot be changed when a run is resumed"):
        tune(recipe="paper", out="runs/finetune-photos")
    with pytest.raises(ConfigError, match=r"optim.trainable is all and cannot be changed"):
        tune(trainable="head")
    with at_step(2, send_sigterm):
        tune(trainable="head", out="head")
    with pytest.raises(ConfigError, match=r"optim.trainable is head and cannot be changed"):
        tune(out="head")


def test_run_folder_does_not_depend_on_existing_files():
    """All processes must choose the same folder, at every start."""
    for status in ("new", "unfinished"):
        folder = resolve_run_folder(None, "some", auto_resume=True)
        assert (folder, folder.status) == (RunFolder(Path("runs/some"), RESTART_LOCK_TIMEOUT_S), status)
        if status == "new":
            folder.create(digits_config(2))
    with pytest.raises(ConfigError, match="cannot be combined"):
        vitrail.train(digits_config(2), resume=True, auto_resume=True)


def test_folder_with_a_damaged_config_is_left_unchanged():
    folder = RunFolder(Path("runs/small"))
    folder.path.mkdir(parents=True)
    folder.config.write_text("{")
    with pytest.raises(TrainError, match="is not the config of a run"):
        train()
    assert folder.config.read_text() == "{"
