"""`vitrail.train` and `vitrail.finetune`: their results, settings and errors."""

from __future__ import annotations

import importlib
import os
import signal
from pathlib import Path

import pytest
from small_models import model, small
from training.small_runs import at_step, digits_config, identical_weights, make_photos, send_sigterm

import vitrail
from vitrail.config import BiTConfig, StemConfig, TrainConfig, ViTConfig, override
from vitrail.config.base import field_types
from vitrail.errors import ConfigError, NotFoundError, TrainError
from vitrail.recipes import RECIPES
from vitrail.recipes.finetune import paper_image_size
from vitrail.report import write_report
from vitrail.runs.run_folder import RunFolder, first_unused_folder, latest_run_folder
from vitrail.training.runs import CHANGEABLE, _apply_overrides, _is_comparison, finetune_config, resolve_recipe

pytestmark = pytest.mark.usefixtures("quick_disk", "in_tmp_dir")


def test_train_is_both_a_function_and_a_package():
    """Importing the subpackage sets the attribute `vitrail.train`, which must stay the function."""
    assert callable(vitrail.train)
    assert importlib.import_module("vitrail.training.loop").fit
    assert callable(vitrail.train)
    assert vitrail.training.__doc__


def test_train_returns_the_run_and_its_model():
    run = vitrail.train(digits_config(6), report=False)
    assert run.path == Path("runs/small")
    assert run.finished
    assert run.scores is not None
    assert run.config.model.num_classes == 10
    assert run.model.labels == tuple("0123456789")
    assert run.report == Path("runs/small/report.html")
    assert not run.report.exists()
    assert 0 < run.baselines["3-nearest neighbors"].top1 <= 1
    resumed = vitrail.train(digits_config(6), resume=True, report=False)
    assert resumed.path == run.path
    assert resumed.scores is not None
    assert resumed.scores.to_dict() == run.scores.to_dict()


def test_stopped_run_reports_its_reason_and_resumes():
    with at_step(3, send_sigterm):
        run = vitrail.train(digits_config(6), out="a", report=False)
    assert (run.stop_reason, run.scores, run.resume_step, run.finished) == ("SIGTERM", None, 3, False)
    assert vitrail.train(resume=True, out="a", report=False).finished
    uninterrupted = vitrail.train(digits_config(6), out="b", report=False)
    assert identical_weights(uninterrupted.path, Path("a"))


def test_custom_signal_handler_is_restored():
    def custom_handler(*_: object) -> None: ...

    previous_handler = signal.signal(signal.SIGTERM, custom_handler)
    try:
        vitrail.train(digits_config(2), report=False)
        assert signal.getsignal(signal.SIGTERM) is custom_handler
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def test_comparisons_are_separate_runs_and_resume():
    config = digits_config(6, compare=["model.position=none", "seed=1"])
    uninterrupted = vitrail.train(config, out="uninterrupted", report=False)
    assert [comparison.path.name for comparison in uninterrupted.comparisons] == ["model.position-none", "seed-1"]
    assert uninterrupted.comparisons[0].config.model.position == "none"
    assert all(comparison.scores is not None for comparison in uninterrupted.comparisons)
    run_names = []

    def stop_second_run(logger: object) -> None:
        run_names.append(logger.run.path.name)  # type: ignore[attr-defined]
        if len(run_names) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with at_step(3, stop_second_run):
        stopped = vitrail.train(config, out="interrupted", report=False)
    assert run_names == ["interrupted", "model.position-none"]
    assert (stopped.stop_reason, stopped.resume_step, stopped.finished) == ("SIGTERM", 3, True)
    resumed = vitrail.train(out="interrupted", resume=True, report=False)
    assert resumed.stop_reason is None
    for actual, expected in zip(
        (resumed, *resumed.comparisons), (uninterrupted, *uninterrupted.comparisons), strict=True
    ):
        assert identical_weights(actual.path, expected.path)


def test_comparisons_use_the_batch_size_that_was_found(monkeypatch: pytest.MonkeyPatch):
    batch_sizes = iter((16, 32))
    monkeypatch.setattr("vitrail.training.trainer.find_batch_size", lambda *_, **__: next(batch_sizes))
    run = vitrail.train(digits_config(2, batch_size="auto", compare=["seed=1"]), report=False)
    assert (run.config.batch_size, run.comparisons[0].config.batch_size) == (16, 16)


def test_failed_report_does_not_fail_the_run(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    def raise_disk_full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    assert write_report is not raise_disk_full
    monkeypatch.setattr("vitrail.training.runs.write_report", raise_disk_full)
    assert vitrail.train(digits_config(2)).finished
    assert "the report could not be written: [Errno 28] No space left on device" in caplog.text


def test_unused_and_latest_run_folders():
    assert first_unused_folder(Path("runs/x")) == Path("runs/x")
    for name in ("x", "x-2", "x-4"):
        Path("runs", name).mkdir(parents=True)
        Path("runs", name, "config.json").write_text("{}")
    assert first_unused_folder(Path("runs/x")) == Path("runs/x-3")
    assert latest_run_folder(Path("runs/x")) == Path("runs/x-2")
    assert latest_run_folder(Path("runs/y")) == Path("runs/y")


def test_run_can_be_written_to_a_folder_with_other_files():
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("keep me")
    assert vitrail.train(digits_config(2), out="mine", report=False).finished
    assert Path("mine/notes.txt").read_text() == "keep me"


def test_changeable_settings_exist():
    for path in CHANGEABLE:
        kind = TrainConfig
        *inner, last = path.split(".")
        for name in inner:
            kind = field_types(kind)[name]
        assert last in field_types(kind)


def test_invalid_arguments_are_refused():
    for call, error, message in (
        (lambda: vitrail.train("digit"), NotFoundError, "unknown recipe 'digit'; did you mean 'digits'"),
        (lambda: vitrail.train(overrides=["lr=1"]), ConfigError, "unknown setting 'lr'"),
        (lambda: vitrail.train(resume=True), TrainError, "there is no run to resume in runs/digits"),
        (lambda: vitrail.finetune("nowhere/x", "digits"), vitrail.VitrailError, "nowhere/x"),
        (lambda: vitrail.finetune("m", "d", recipe="quick"), NotFoundError, "unknown fine-tuning recipe 'quick'"),
    ):
        with pytest.raises(error, match=message):
            call()
    assert not Path("runs").exists()


def test_fine_tuning_settings_depend_on_the_images():
    model(small()).save("start")
    make_photos(Path("photos"), {"a": 60, "b": 60}, side=8)
    config = finetune_config("start", "photos", overrides=["data.held_out=0.5"])
    assert config.init_from == "start"
    assert config.name == "finetune-photos"
    assert config.data.held_out == 0.5
    assert config.batch_size == 8
    explicit = finetune_config("start", "photos", trainable=1, image_size=(16, 32), device="cpu")
    assert (explicit.optim.trainable, explicit.image_size, explicit.device) == (1, (16, 32), "cpu")
    assert override(explicit, ["image_size=24"]).image_size == 24


def test_paper_image_size_is_whole_patches_and_doubles_small_images():
    make_photos(Path("photos"), {"a": 6, "b": 6}, side=8)
    sizes = {"B/16": (224, 16), "H/14": (224, 14), "digits": (8, 2)}
    for name, (image, patch) in sizes.items():
        model(small(image_size=image, patch_size=patch)).save(name)
    image_sizes = {name: finetune_config(name, "photos", recipe="paper").image_size for name in sizes}
    assert image_sizes == {"B/16": 384, "H/14": 378, "digits": 16}
    assert finetune_config("H/14", "photos", recipe="paper", image_size=224).image_size == 224
    assert paper_image_size(ViTConfig(patch_size=1, stem=StemConfig(layers=(3, 4, 9)))) == 384
    assert paper_image_size(BiTConfig()) == 384


def test_fine_tuning_recipe_cannot_change_on_resume():
    model(small()).save("start")
    make_photos(Path("photos"), {"a": 20, "b": 20}, side=8)
    settings = ["duration=2 steps", "data.workers=0"]
    vitrail.finetune("start", "photos", recipe="paper", image_size=8, overrides=settings, out="paper", report=False)
    vitrail.finetune("start", "photos", overrides=settings, out="usual", report=False)
    with pytest.raises(ConfigError, match="--recipe paper cannot be changed when a run is resumed"):
        vitrail.finetune("", "", recipe="paper", resume=True, out="usual")
    assert vitrail.finetune("", "", recipe="paper", resume=True, out="paper", report=False).finished


def test_changed_duration_scales_warmup_and_mix_off():
    recipe = RECIPES["cifar10"]()
    for length, warmup, mix_off in (("37 epochs", "1.5 epochs", "3.7 epochs"), ("740 steps", "30 steps", "74 steps")):
        config = _apply_overrides(recipe, [f"duration={length}"])
        assert (str(config.schedule.warmup), str(config.augment.mix_off)) == (warmup, mix_off)
    config = _apply_overrides(recipe, ["duration=37 epochs", "schedule.warmup=2 epochs"])
    assert (str(config.schedule.warmup), str(config.augment.mix_off)) == ("2 epochs", "3.7 epochs")
    assert _apply_overrides(recipe, ["seed=1"]) == recipe.replace(seed=1)
    tenth_warmup = override(recipe, ["duration=32 epochs", "schedule.warmup=3.2 epochs"])
    assert (
        str(_apply_overrides(tenth_warmup, ["duration=3 epochs"]).schedule.warmup) == "0.3 epochs"
    )  # not 0.30000000000000004


def test_identical_and_impossible_comparisons_are_skipped(caplog: pytest.LogCaptureFixture):
    recipe = RECIPES["digits"]()
    assert _is_comparison(recipe, "model.position=none")
    assert not _is_comparison(recipe, "model.position=learned-1d")
    assert not _is_comparison(resolve_recipe("digits", None, "BiT-R50x1"), "model.position=none")
    assert "the comparison model.position=none is skipped: unknown setting 'model.position'" in caplog.text
    overrides = ["duration=2 steps", "model.position=none", "model.depth=1"]
    assert vitrail.train("digits", overrides=overrides, report=False).comparisons == ()
    with pytest.raises(ConfigError, match="positoin"):  # a typo in the user's own comparison
        vitrail.train("digits", overrides=["compare=('model.positoin=none',)"])


def test_run_resumes_from_another_working_directory(monkeypatch: pytest.MonkeyPatch):
    """This requires data that do not depend on the working directory."""
    with at_step(2, send_sigterm):
        vitrail.train(digits_config(4), out="run", report=False)
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert vitrail.train(resume=True, out="../run", report=False).finished
    assert RunFolder(Path("../run")).finished


def test_biased_and_ineffective_settings_are_reported(caplog: pytest.LogCaptureFixture):
    settings = ["patience=3", "augment.mixup=0.2", "augment.mix_off=2 steps"]
    vitrail.train(override(digits_config(2), settings), report=False)
    assert "early stopping uses the test images, which biases their score" in caplog.text
    assert "augment.mix_off=2 steps covers the whole run: no images are mixed" in caplog.text


def test_fine_tuning_settings_count_only_labeled_images():
    make_photos(Path("photos"), {"a": 60, "b": 60}, side=8)
    rows = [
        f"{path},{'' if i % 4 else path.parent.name}" for i, path in enumerate(sorted(Path("photos").rglob("*.jpg")))
    ]
    Path("some.csv").write_text("\n".join(["path,label", *rows]))
    model(small()).save("start")
    labeled = finetune_config("start", "table:some.csv", overrides=["data.held_out=0.2"])
    assert labeled.duration.count > finetune_config("start", "photos", overrides=["data.held_out=0.2"]).duration.count


def test_only_the_first_process_logs_under_torchrun(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    make_photos(Path("photos"), {"a": 20, "b": 20}, side=8)
    model(small()).save("start")
    monkeypatch.setenv("RANK", "1")
    finetune_config("start", "photos")
    assert "held out" not in caplog.text
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("vitrail.runtime.notes._logged", set())
    finetune_config("start", "photos")
    assert "held out" in caplog.text


def test_preprocessing_follows_the_model_settings():
    config = _apply_overrides(RECIPES["digits"](), ["model.image_size=32", "model.channels=3"])
    assert (config.preprocess.image_size, config.preprocess.mean) == ((32, 32), (0.5, 0.5, 0.5))
    explicit = _apply_overrides(RECIPES["digits"](), ["model.image_size=32", "preprocess.image_size=16"])
    assert explicit.preprocess.image_size == (16, 16)


def test_epochs_setting_suggests_duration():
    with pytest.raises(ConfigError, match=r"unknown setting 'epochs'.*; try duration='3 epochs'"):
        override(RECIPES["digits"](), ["epochs=3"])
