"""`vitrail.train` and `vitrail.finetune` from a program: what they give back, and what they refuse."""

from __future__ import annotations

import importlib
import os
import signal
from pathlib import Path

import pytest
from small_models import model, small
from train.small_runs import at_step, digits, photos, same_bits, stop

import vitrail
from vitrail.api.training import CHANGEABLE, _apply_overrides, _is_comparison, _resolve_recipe, finetune_config
from vitrail.config import BiTConfig, StemConfig, TrainConfig, ViTConfig, override
from vitrail.config.base import field_types
from vitrail.errors import ConfigError, NotFoundError, TrainError
from vitrail.recipes import RECIPES
from vitrail.recipes.finetune import paper_image_size
from vitrail.report import write_report
from vitrail.train.run_folder import RunFolder, first_unused_folder, latest_run_folder

pytestmark = pytest.mark.usefixtures("quick_disk", "elsewhere")


def test_train_is_a_function_and_a_folder_of_modules():
    """Python gives the package an attribute `train` when the folder is imported: both must go on working."""
    assert callable(vitrail.train)
    assert importlib.import_module("vitrail.train.loop").fit
    assert callable(vitrail.train)
    assert vitrail.train.__doc__


def test_a_run_and_its_model():
    run = vitrail.train(digits(6), report=False)
    assert run.path == Path("runs/small")
    assert run.finished
    assert run.scores is not None
    assert run.config.model.num_classes == 10
    assert run.model.labels == tuple("0123456789")
    assert run.report == Path("runs/small/report.html")
    assert not run.report.exists()
    assert 0 < run.baselines["3-nearest neighbors"].top1 <= 1
    again = vitrail.train(digits(6), resume=True, report=False)
    assert again.path == run.path
    assert again.scores is not None
    assert again.scores.to_dict() == run.scores.to_dict()


def test_a_run_that_is_stopped_says_so_and_goes_on():
    with at_step(3, stop):
        run = vitrail.train(digits(6), out="a", report=False)
    assert (run.stop_reason, run.scores, run.resume_step, run.finished) == ("SIGTERM", None, 3, False)
    assert vitrail.train(resume=True, out="a", report=False).finished
    whole = vitrail.train(digits(6), out="b", report=False)
    assert same_bits(whole.path, Path("a"))


def test_a_handler_of_ones_own_is_there_again_afterwards():
    def mine(*_: object) -> None: ...

    before = signal.signal(signal.SIGTERM, mine)
    try:
        vitrail.train(digits(2), report=False)
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_comparisons_are_runs_of_their_own_and_go_on_too():
    config = digits(6, compare=["model.position=none", "seed=1"])
    whole = vitrail.train(config, out="whole", report=False)
    assert [other.path.name for other in whole.comparisons] == ["model.position-none", "seed-1"]
    assert whole.comparisons[0].config.model.position == "none"
    assert all(other.scores is not None for other in whole.comparisons)
    reached = []

    def second(logger: object) -> None:
        reached.append(logger.run.path.name)  # type: ignore[attr-defined]
        if len(reached) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with at_step(3, second):
        cut = vitrail.train(config, out="cut", report=False)
    assert reached == ["cut", "model.position-none"]
    assert (cut.stop_reason, cut.resume_step, cut.finished) == ("SIGTERM", 3, True)
    again = vitrail.train(out="cut", resume=True, report=False)
    assert again.stop_reason is None
    for mine, theirs in zip((again, *again.comparisons), (whole, *whole.comparisons), strict=True):
        assert same_bits(mine.path, theirs.path)


def test_comparisons_have_the_batch_that_was_found(monkeypatch: pytest.MonkeyPatch):
    found = iter((16, 32))
    monkeypatch.setattr("vitrail.train.trainer.find_batch_size", lambda *_, **__: next(found))
    run = vitrail.train(digits(2, batch_size="auto", compare=["seed=1"]), report=False)
    assert (run.config.batch_size, run.comparisons[0].config.batch_size) == (16, 16)


def test_a_report_that_cannot_be_written_loses_no_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    assert write_report is not full
    monkeypatch.setattr("vitrail.api.training.write_report", full)
    assert vitrail.train(digits(2)).finished
    assert "the report could not be written: [Errno 28] No space left on device" in caplog.text


def test_names_of_folders():
    assert first_unused_folder(Path("runs/x")) == Path("runs/x")
    for name in ("x", "x-2", "x-4"):
        Path("runs", name).mkdir(parents=True)
        Path("runs", name, "config.json").write_text("{}")
    assert first_unused_folder(Path("runs/x")) == Path("runs/x-3")
    assert latest_run_folder(Path("runs/x")) == Path("runs/x-2")
    assert latest_run_folder(Path("runs/y")) == Path("runs/y")


def test_a_folder_of_other_things_may_hold_a_run():
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("keep me")
    assert vitrail.train(digits(2), out="mine", report=False).finished
    assert Path("mine/notes.txt").read_text() == "keep me"


def test_what_may_change_is_there():
    for path in CHANGEABLE:
        kind = TrainConfig
        *inner, last = path.split(".")
        for name in inner:
            kind = field_types(kind)[name]
        assert last in field_types(kind)


def test_what_is_refused():
    for call, error, words in (
        (lambda: vitrail.train("digit"), NotFoundError, "no recipe is called 'digit'; did you mean 'digits'"),
        (lambda: vitrail.train(overrides=["lr=1"]), ConfigError, "no setting 'lr'"),
        (lambda: vitrail.train(resume=True), TrainError, "there is no run to resume in runs/digits"),
        (lambda: vitrail.finetune("nowhere/x", "digits"), vitrail.VitrailError, "nowhere/x"),
        (lambda: vitrail.finetune("m", "d", recipe="quick"), NotFoundError, "no fine-tuning recipe is called 'quick'"),
    ):
        with pytest.raises(error, match=words):
            call()
    assert not Path("runs").exists()


def test_fine_tuning_picks_settings_that_suit_the_images():
    model(small()).save("start")
    photos(Path("photos"), {"a": 60, "b": 60}, side=8)
    config = finetune_config("start", "photos", overrides=["data.held_out=0.5"])
    assert config.init_from == "start"
    assert config.name == "finetune-photos"
    assert config.data.held_out == 0.5
    assert config.batch_size == 8
    more = finetune_config("start", "photos", trainable=1, image_size=(16, 32), device="cpu")
    assert (more.optim.trainable, more.image_size, more.device) == (1, (16, 32), "cpu")
    assert override(more, ["image_size=24"]).image_size == 24


def test_the_papers_resolution_is_in_whole_patches_and_small_images_are_doubled():
    photos(Path("photos"), {"a": 6, "b": 6}, side=8)
    sizes = {"B/16": (224, 16), "H/14": (224, 14), "digits": (8, 2)}
    for name, (image, patch) in sizes.items():
        model(small(image_size=image, patch_size=patch)).save(name)
    found = {name: finetune_config(name, "photos", recipe="paper").image_size for name in sizes}
    assert found == {"B/16": 384, "H/14": 378, "digits": 16}
    assert finetune_config("H/14", "photos", recipe="paper", image_size=224).image_size == 224
    assert paper_image_size(ViTConfig(patch_size=1, stem=StemConfig(layers=(3, 4, 9)))) == 384
    assert paper_image_size(BiTConfig()) == 384


def test_another_way_to_fine_tune_is_not_taken_up_by_resuming():
    model(small()).save("start")
    photos(Path("photos"), {"a": 20, "b": 20}, side=8)
    settings = ["duration=2 steps", "data.workers=0"]
    vitrail.finetune("start", "photos", recipe="paper", image_size=8, overrides=settings, out="paper", report=False)
    vitrail.finetune("start", "photos", overrides=settings, out="usual", report=False)
    with pytest.raises(ConfigError, match="--recipe paper cannot change when a run is resumed"):
        vitrail.finetune("", "", recipe="paper", resume=True, out="usual")
    assert vitrail.finetune("", "", recipe="paper", resume=True, out="paper", report=False).finished


def test_a_recipe_of_another_length_keeps_its_shares():
    picked = RECIPES["cifar10"]()
    for length, warmup, unmixed in (("37 epochs", "1.5 epochs", "3.7 epochs"), ("740 steps", "30 steps", "74 steps")):
        config = _apply_overrides(picked, [f"duration={length}"])
        assert (str(config.schedule.warmup), str(config.augment.mix_off)) == (warmup, unmixed)
    config = _apply_overrides(picked, ["duration=37 epochs", "schedule.warmup=2 epochs"])
    assert (str(config.schedule.warmup), str(config.augment.mix_off)) == ("2 epochs", "3.7 epochs")
    assert _apply_overrides(picked, ["seed=1"]) == picked.replace(seed=1)
    tenth = override(picked, ["duration=32 epochs", "schedule.warmup=3.2 epochs"])
    assert (
        str(_apply_overrides(tenth, ["duration=3 epochs"]).schedule.warmup) == "0.3 epochs"
    )  # not 0.30000000000000004


def test_a_recipe_is_not_compared_with_itself_or_with_what_cannot_be(caplog: pytest.LogCaptureFixture):
    digits = RECIPES["digits"]()
    assert _is_comparison(digits, "model.position=none")
    assert not _is_comparison(digits, "model.position=learned-1d")
    assert not _is_comparison(_resolve_recipe("digits", None, "BiT-R50x1"), "model.position=none")
    assert "the comparison model.position=none is skipped: no setting 'model.position'" in caplog.text
    short = ["duration=2 steps", "model.position=none", "model.depth=1"]
    assert vitrail.train("digits", overrides=short, report=False).comparisons == ()
    with pytest.raises(ConfigError, match="positoin"):  # a slip of the user's own
        vitrail.train("digits", overrides=["compare=('model.positoin=none',)"])


def test_a_run_goes_on_where_it_is(monkeypatch: pytest.MonkeyPatch):
    """From a folder that is not the one it was started in, as long as its data are named in full."""
    with at_step(2, stop):
        vitrail.train(digits(4), out="run", report=False)
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert vitrail.train(resume=True, out="../run", report=False).finished
    assert RunFolder(Path("../run")).finished


def test_what_flatters_or_does_nothing_is_said(caplog: pytest.LogCaptureFixture):
    settings = ["patience=3", "augment.mixup=0.2", "augment.mix_off=2 steps"]
    vitrail.train(override(digits(2), settings), report=False)
    assert "early stopping uses the test images, which biases their score" in caplog.text
    assert "augment.mix_off=2 steps covers the whole run: no images are mixed" in caplog.text


def test_settings_count_the_images_that_have_a_label():
    photos(Path("photos"), {"a": 60, "b": 60}, side=8)
    rows = [
        f"{path},{'' if i % 4 else path.parent.name}" for i, path in enumerate(sorted(Path("photos").rglob("*.jpg")))
    ]
    Path("some.csv").write_text("\n".join(["path,label", *rows]))
    model(small()).save("start")
    few = finetune_config("start", "table:some.csv", overrides=["data.held_out=0.2"])
    assert few.duration.count > finetune_config("start", "photos", overrides=["data.held_out=0.2"]).duration.count


def test_under_torchrun_only_the_first_process_speaks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    photos(Path("photos"), {"a": 20, "b": 20}, side=8)
    model(small()).save("start")
    monkeypatch.setenv("RANK", "1")
    finetune_config("start", "photos")
    assert "held out" not in caplog.text
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("vitrail.runtime._logged", set())
    finetune_config("start", "photos")
    assert "held out" in caplog.text


def test_images_are_prepared_for_the_network_that_was_asked_for():
    config = _apply_overrides(RECIPES["digits"](), ["model.image_size=32", "model.channels=3"])
    assert (config.preprocess.image_size, config.preprocess.mean) == ((32, 32), (0.5, 0.5, 0.5))
    told = _apply_overrides(RECIPES["digits"](), ["model.image_size=32", "preprocess.image_size=16"])
    assert told.preprocess.image_size == (16, 16)


def test_a_number_of_epochs_is_a_duration():
    with pytest.raises(ConfigError, match=r"no setting 'epochs'.*; try duration='3 epochs'"):
        override(RECIPES["digits"](), ["epochs=3"])
