"""`auto_resume`: one call begins a run, goes on with it, and gives back a finished one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from small_models import model, small
from train.small_runs import at_step, contents, digits, photos, same_bits, stop

import vitrail
from vitrail import runtime
from vitrail.api.resuming import changed_settings, resolve_run_folder
from vitrail.config import override, steps
from vitrail.errors import ConfigError, TrainError
from vitrail.recipes import RECIPES
from vitrail.train.run_folder import RESTART_LOCK_TIMEOUT_S, RunFolder

pytestmark = pytest.mark.usefixtures("quick_disk", "elsewhere")


@pytest.fixture(autouse=True)
def everything_is_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_logged", set())


def train(length: int = 6, **options: object) -> vitrail.Run:
    return vitrail.train(digits(length, **options), auto_resume=True, report=False)


def test_the_same_call_begins_goes_on_and_gives_back_what_is_finished(caplog: pytest.LogCaptureFixture):
    with at_step(3, stop):
        cut = train()
    assert (cut.path, cut.stop_reason, cut.resume_step) == (Path("runs/small"), "SIGTERM", 3)
    done = train()
    assert (done.path, done.stop_reason) == (Path("runs/small"), None)
    whole = vitrail.train(digits(6), out="whole", report=False)
    assert same_bits(whole.path, done.path)
    before = contents(Path("runs"))
    again = train()
    assert "the run in runs/small is finished; there is nothing to do." in caplog.text
    assert again.finished
    assert done.scores is not None
    assert again.scores is not None
    assert again.scores.to_dict() == done.scores.to_dict()
    assert again.baselines.keys() == done.baselines.keys()
    assert again.model.labels == tuple("0123456789")
    assert contents(Path("runs")) == before
    assert not Path("runs/small-2").exists()


def test_what_was_killed_before_it_had_settings_or_a_checkpoint_begins_again(caplog: pytest.LogCaptureFixture):
    Path("runs/small/checkpoint").mkdir(parents=True)  # before config.json is there
    Path("runs/small/checkpoint/.lock").touch()
    Path("runs/small/.config.json.ab12.tmp").touch()
    done = train()
    assert done.finished
    RunFolder(Path("early")).create(done.config)  # before the first checkpoint
    early = vitrail.train(digits(6), auto_resume=True, out="early", report=False)
    assert "early has no checkpoint yet: the run starts from the beginning" in caplog.text
    assert same_bits(early.path, done.path)


def test_a_run_is_finished_when_those_it_is_compared_with_are():
    reached = []

    def second(logger: object) -> None:
        reached.append(logger.run.path.name)  # type: ignore[attr-defined]
        if len(reached) == 2:
            stop(logger)  # type: ignore[arg-type]

    with at_step(3, second):
        cut = train(compare=["seed=1"])
    assert (cut.stop_reason, cut.finished, RunFolder(cut.path).status) == ("SIGTERM", True, "unfinished")
    done, again = train(compare=["seed=1"]), train(compare=["seed=1"])
    assert RunFolder(done.path).status == "finished"
    assert [other.path.name for other in again.comparisons] == ["seed-1"]
    assert again.comparisons[0].scores is not None
    assert done.comparisons[0].scores is not None
    assert again.comparisons[0].scores.to_dict() == done.comparisons[0].scores.to_dict()
    assert again.comparisons[0].config.seed == 1
    shutil.rmtree(done.path / "compare")
    assert train(compare=["seed=1"]).comparisons[0].finished


def test_a_result_that_cannot_be_read_is_found_out_again():
    done = train()
    assert done.scores is not None
    result = RunFolder(done.path).read_result()
    for text in ("{", "[]", "{}"):
        RunFolder(done.path).result.write_text(text)
        again = train()
        assert again.scores is not None
        assert again.scores.to_dict() == done.scores.to_dict()
        assert RunFolder(done.path).read_result() == result


def test_other_settings_are_refused_by_name():
    train(2)
    for changed, words in (
        (override(digits(2), ["optim.lr=0.5"]), r"optim.lr is 0.01 and cannot change when a run is resumed"),
        (override(digits(2), ["model.depth=1"]), r"model.depth is 2 and cannot change"),
        (override(digits(2), ["augment.scale=(0.1, 1)"]), r"augment.scale is .* and cannot change"),
        (digits(2, batch_size=32), r"batch_size is 64 and cannot change"),
    ):
        with pytest.raises(ConfigError, match=words):
            vitrail.train(changed, auto_resume=True, report=False)
    with pytest.raises(ConfigError, match=r"name is small and cannot change"):
        vitrail.train("digits", auto_resume=True, out="runs/small", report=False)
    watched = override(digits(2), ["log_every=1 step", "data.workers=1"])
    assert vitrail.train(watched, auto_resume=True, report=False).finished


def test_blanks_that_were_filled_in_are_no_other_settings():
    """num_classes=0, batch_size=auto, preprocess=none: what was found for them is in the folder."""
    found = digits(2, batch_size="auto", preprocess=None)
    assert vitrail.train(found, auto_resume=True, report=False).config.batch_size != "auto"
    assert vitrail.train(found, auto_resume=True, report=False).finished
    settings = ["batch_size=auto", "duration=2 steps"]
    assert vitrail.train(found.replace(batch_size=64), overrides=settings, auto_resume=True, report=False).finished
    for name, recipe in RECIPES.items():
        assert changed_settings(recipe(), recipe()) == [], name


def test_a_longer_duration_extends_and_a_shorter_one_is_refused():
    assert train(4).config.duration == steps(4)
    assert RunFolder(train(6).path).read_config().duration == steps(6)
    with pytest.raises(ConfigError, match=r"duration=4 steps is 4 steps, fewer than the 6 of the run"):
        train(4)
    assert train(6).finished


def test_the_command_that_extends_goes_on_with_the_extended_run():
    """A recipe's warm-up is a share of a new run's length; that of an extended run stays as it began."""
    recipe = override(digits(4), ["schedule.warmup=2 steps"])

    def extend(*more: str) -> vitrail.Run:
        return vitrail.train(recipe, overrides=["duration=8 steps", *more], auto_resume=True, report=False)

    assert vitrail.train(recipe, auto_resume=True, report=False).finished
    with at_step(6, stop):
        assert extend().resume_step == 6
    assert extend().config.schedule.warmup == steps(2)
    assert extend("schedule.warmup=2 steps").finished
    with pytest.raises(ConfigError, match=r"schedule.warmup is 2 steps and cannot change"):
        extend("schedule.warmup=4 steps")


def test_a_setting_that_is_off_again_is_another_setting():
    assert changed_settings(digits(2), digits(2, ema=0.9)) == ["ema"]
    assert changed_settings(digits(2), override(digits(2), ["optim.layer_decay=0.7"])) == ["optim.layer_decay"]
    folder, slash = (override(digits(2), [f"data.source={name}"]) for name in ("photos", "photos/"))
    assert changed_settings(folder, slash) == []


def test_a_network_that_is_named_and_changed_is_the_same_when_the_command_is_given_again():
    def named(name: str = "ViT-Ti/4", **options: object) -> vitrail.Run:
        settings = ["model.depth=1", "model.mlp_dim=32"]
        return vitrail.train(digits(1), model=name, overrides=settings, report=False, **options)  # type: ignore[arg-type]

    assert named(auto_resume=True).finished
    assert named(auto_resume=True).finished
    assert named(resume=True).finished
    with pytest.raises(ConfigError, match="ViT-S/4 cannot change when a run is resumed"):
        named("ViT-S/4", resume=True)


def test_fine_tuning_is_the_same(caplog: pytest.LogCaptureFixture):
    model(small()).save("start")
    photos(Path("photos"), {"a": 20, "b": 20}, side=8)

    def tune(**options: object) -> vitrail.Run:
        settings = ["duration=4 steps", "data.workers=0", "data.held_out=0.2"]
        return vitrail.finetune("start", "photos", overrides=settings, auto_resume=True, report=False, **options)  # type: ignore[arg-type]

    with at_step(2, stop):
        assert tune().resume_step == 2
    done = tune()
    assert (done.path, done.finished) == (Path("runs/finetune-photos"), True)
    assert tune().scores is not None
    assert "runs/finetune-photos is finished" in caplog.text
    with pytest.raises(ConfigError, match="--recipe paper cannot change when a run is resumed"):
        tune(recipe="paper", out="runs/finetune-photos")
    with pytest.raises(ConfigError, match=r"optim.trainable is all and cannot change"):
        tune(trainable="head")
    with at_step(2, stop):
        tune(trainable="head", out="head")
    with pytest.raises(ConfigError, match=r"optim.trainable is head and cannot change"):
        tune(out="head")


def test_the_folder_does_not_depend_on_what_is_there():
    """In each of several processes, and each time it is started."""
    for standing in ("new", "unfinished"):
        folder = resolve_run_folder(None, "some", auto_resume=True)
        assert (folder, folder.status) == (RunFolder(Path("runs/some"), RESTART_LOCK_TIMEOUT_S), standing)
        if standing == "new":
            folder.create(digits(2))
    with pytest.raises(ConfigError, match="cannot be combined"):
        vitrail.train(digits(2), resume=True, auto_resume=True)


def test_a_folder_whose_settings_are_damaged_is_left_alone():
    folder = RunFolder(Path("runs/small"))
    folder.path.mkdir(parents=True)
    folder.config.write_text("{")
    with pytest.raises(TrainError, match="is not the config of a run"):
        train()
    assert folder.config.read_text() == "{"
