"""`vitrail train`: recipes, overrides, run folders, resuming, one-sentence errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli.conftest import Command
from training.small_runs import TINY_OVERRIDES, file_contents, identical_weights, logged_metrics, one_thread

import vitrail as package
from vitrail.recipes import RECIPES
from vitrail.runs.run_folder import RunFolder

TINY = (
    *TINY_OVERRIDES, "batch_size=64", "data.workers=0", "compare=()",
    "schedule.warmup=0 steps", "duration=12 steps", "log_every=3 steps", "evaluate_every=6 steps",
    "checkpoint_every=4 steps", "device=cpu",
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("quick_disk", "in_tmp_dir")


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, which the tests must not change."""
    folder = tmp_path_factory.mktemp("done") / "run"
    with one_thread():
        package.train("digits", overrides=TINY, out=folder, report=False)
    return folder


def test_run_prints_its_accuracy_and_its_files(vitrail: Command):
    result = vitrail("train", "digits", *TINY, "compare=('model.position=none',)")
    assert result.status == 0
    words = result.out.split()
    assert words[0] == "accuracy"
    assert "3-nearest" in words
    assert "model.position=none" in words
    assert "runs/digits/model" in words
    assert "runs/digits/report.html" in words
    page = Path("runs/digits/report.html").read_text()
    assert "vitrail train digits" in page or "digits" in page
    assert Path("runs/digits/compare/model.position-none/model").is_dir()
    assert package.load("runs/digits").labels == tuple("0123456789")


def test_json_has_the_run_its_files_and_scores(vitrail: Command):
    result = vitrail("train", "digits", *TINY, "--no-report", "--json")
    values = json.loads(result.out)
    assert values["run"] == "runs/digits"
    assert values["model"] == "runs/digits/model"
    assert values["report"] is None
    assert values["stop_reason"] is None
    assert values["scores"]["count"] == 359


def test_held_out_and_test_images_are_both_scored(vitrail: Command):
    """Digits have a test split; with held-out images for model selection, both scores are printed."""
    result = vitrail("train", "digits", *TINY, "data.held_out=0.1", "--no-report", "--json")
    values = json.loads(result.out)
    assert (values["scores"]["count"], values["test"]["count"]) == (143, 359)
    result = vitrail("train", "--resume", "--no-report")
    assert [line.split("  ")[0] for line in result.out.splitlines()][:2] == ["accuracy", "test accuracy"]


def test_taken_run_name_gets_a_number(vitrail: Command):
    for expected in ("runs/digits", "runs/digits-2", "runs/digits-3"):
        result = vitrail("train", "digits", *TINY, "duration=1 step", "--no-report", "--json")
        assert json.loads(result.out)["run"] == expected
    assert "runs/digits already contains a run; this one is written to runs/digits-3." in result.notes
    result = vitrail("train", "--resume", "--no-report", "--json")
    assert json.loads(result.out)["run"] == "runs/digits-3"


def test_run_is_resumed_by_its_name(vitrail: Command):
    assert vitrail("train", "digits", *TINY, "duration=1 step", "name=mine", "--no-report").status == 0
    result = vitrail("train", "digits", "name=mine", "--resume", "--no-report", "--json")
    assert json.loads(result.out)["run"] == "runs/mine"


def test_folder_with_a_run_is_not_overwritten(vitrail: Command, finished_run: Path):
    before = (finished_run / "metrics.jsonl").read_bytes()
    result = vitrail("train", "digits", *TINY, "--out", finished_run)
    assert result.status == 1
    assert result.errors == [f"{finished_run} already contains a run (finished); choose another folder with --out."]
    assert (finished_run / "metrics.jsonl").read_bytes() == before


def test_resumed_finished_run_prints_its_result(vitrail: Command, finished_run: Path):
    before = file_contents(finished_run)
    result = vitrail("train", "--resume", "--out", finished_run, "--no-report", "--json")
    assert result.status == 0
    last = [line["evaluation"] for line in logged_metrics(finished_run) if "evaluation" in line][-1]
    assert json.loads(result.out)["scores"] == last
    assert file_contents(finished_run) == before


def test_folder_name_with_a_space_is_quoted(vitrail: Command, finished_run: Path):
    shutil.copytree(finished_run, "my cut")
    result = vitrail("train", "--resume", "--out", "my cut", "--no-report")
    assert "vitrail predict --model 'my cut' IMAGE" in result.out


def test_same_command_with_resume_is_accepted(vitrail: Command, finished_run: Path):
    result = vitrail("train", "digits", *TINY, "--data", "digits", "--resume", "--out", finished_run, "--no-report")
    assert result.status == 0, result.err


@pytest.mark.parametrize(
    "settings", [["optim.lr=0.1"], ["seed=1"], ["schedule.warmup=1 step"], ["batch_size=32"], ["--data", "mnist"]]
)
def test_settings_that_change_the_result_cannot_change_on_resume(
    vitrail: Command, finished_run: Path, settings: list[str]
):
    result = vitrail("train", "--resume", "--out", finished_run, *settings)
    assert result.status == 1
    assert len(result.errors) == 1
    name = "data.source" if "--data" in settings else settings[0].partition("=")[0]
    assert result.errors[0].startswith(f"{name} is ")
    assert "cannot be changed when a run is resumed, because the result would differ" in result.err
    assert "Settings that can be changed: checkpoint_every, " in result.err


def test_finished_run_can_be_extended_but_not_shortened(vitrail: Command, finished_run: Path):
    shutil.copytree(finished_run, "longer")
    result = vitrail("train", "--resume", "--out", "longer", "duration=14 steps", "--no-report")
    assert result.status == 0, result.err
    assert any(note.startswith("the run is extended from 12 to 14 steps: from step 13 on") for note in result.notes)
    assert logged_metrics(Path("longer"))[-1]["step"] == 14
    result = vitrail("train", "--resume", "--out", "longer", "duration=13 steps")
    assert result.errors == [
        "duration=13 steps is shorter than the run (14 steps, of which 14 are done); when a run is "
        "resumed, its duration can only be increased."
    ]


def test_auto_resume_starts_a_run_and_reports_completion(vitrail: Command):
    command = ["train", "digits", *TINY, "batch_size=auto", "--no-report", "--json", "--auto-resume"]
    first = vitrail(*command)
    assert first.status == 0, first.err
    before = file_contents(Path("runs"))
    repeated = vitrail(*command)
    assert repeated.status == 0
    assert repeated.notes == ["the run in runs/digits is finished; there is nothing to do."]
    assert json.loads(repeated.out) == json.loads(first.out)
    assert file_contents(Path("runs")) == before
    assert vitrail(*command, "--resume").errors == [
        "resume and auto_resume cannot be combined: auto_resume starts or resumes as needed."
    ]


def test_model_cannot_change_on_resume(vitrail: Command, finished_run: Path):
    result = vitrail("train", "--resume", "--out", finished_run, "--model", "ViT-Ti/4")
    assert result.errors == ["--model ViT-Ti/4 cannot be changed when a run is resumed. Start a new run instead."]


def test_logging_and_execution_settings_can_change_on_resume(vitrail: Command, finished_run: Path):
    settings = [
        "log_every=1 step",
        "grad_accum_steps=2",
        "data.workers=1",
        "on_nan=skip",
        "gradient_checkpointing=true",
    ]
    result = vitrail("train", "--resume", "--out", finished_run, *settings, "--no-report")
    assert result.status == 0, result.err


def test_config_json_of_a_run_reproduces_its_bits(vitrail: Command, finished_run: Path):
    result = vitrail("train", finished_run / "config.json", "--out", "again", "--no-report")
    assert result.status == 0, result.err
    assert identical_weights(Path("again"), finished_run)
    assert logged_metrics(Path("again")) == logged_metrics(finished_run)
    assert RunFolder(Path("again")).read_config() == RunFolder(finished_run).read_config()


def test_config_is_read_from_any_file(vitrail: Command, finished_run: Path):
    """The named file is read, not a config.json beside it."""
    settings = json.loads((finished_run / "config.json").read_text())
    Path("config.json").write_text("{}")
    Path("mine.json").write_text(json.dumps(settings | {"duration": "2 steps", "name": "mine"}))
    result = vitrail("train", "mine.json", "--no-report", "--json")
    assert json.loads(result.out)["run"] == "runs/mine"
    assert logged_metrics(Path("runs/mine"))[-1]["step"] == 2


def test_model_option_selects_the_network(vitrail: Command):
    result = vitrail("train", "digits", "--model", "ViT-Ti/4", *TINY[4:], "duration=1 step", "--no-report")
    assert result.status == 0, result.err
    assert package.load("runs/digits").config.width == 192


def test_recipes_are_listed(vitrail: Command):
    result = vitrail("train", "--list")
    assert result.status == 0
    assert [line.split()[0] for line in result.out.splitlines()[1:] if line[0] != " "] == list(RECIPES)
    assert "Run: vitrail" not in result.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digit"], "unknown recipe 'digit'; did you mean 'digits'?"),
        (["nothing.json"], "nothing.json cannot be read: No such file or directory."),
        (["digits", "optim.learning=1"], "unknown setting 'optim.learning'; did you mean 'optim.lr'?"),
        (["digits", "optm.lr=1"], "unknown setting 'optm.lr'; did you mean 'optim.lr'?"),
        (["digits", "optim.lr", "0.1"], "the setting optim.lr has no value; settings are written optim.lr=VALUE."),
        (["digits", "optim.lr=fast"], "optim.lr expects a number, got 'fast'."),
        (["digits", "batch_size=0"], "batch_size=0: expected 1 or more, or auto."),
        (
            ["digits", "batch_size=5000"],
            "batch_size=5000 is more than the 1,438 training images; try batch_size=719.",
        ),
        (["digits", "duration=ten epochs"], "got 'ten epochs', expected a duration with a unit"),
        (
            ["digits", "duration=5 steps", "schedule.warmup=5 epochs"],
            "a warm-up of 5 epochs is 57 steps, but the whole run has 5",
        ),
        (["digits", "model.image_size=9"], "patch_size=2 leaves"),
        (["digits", "augment.mix_off=-3 epochs"], "got '-3 epochs', expected a duration with a unit"),
        (["digits", "batch_size=auto", "parallel=fsdp"], "with parallel=fsdp, give a number"),
        (["digits", "classify.class_weights=balanced", "data.order=balanced"], "set classify.class_weights=none"),
        (["digits", "device=tpu"], "unknown device 'tpu'"),
        (["digits", "data.source=nowhere"], "nowhere"),
        (["digits", "--data", "photos/"], "photos"),
        (["--data", "photos/"], "--data photos/ needs a recipe, such as"),
        (["digits", "--model", "ViT-X/4"], "ViT-X/4"),
        (["digits", "objective=distill"], "objective=distill needs distill.teacher"),
        (["digits", "objective=distill", "distill.teacher=gone/"], "gone"),
        (["digits", "compare=('model.posture=none',)"], "unknown setting 'model.posture'"),
        (["digits", "seed=99999999999999999999"], "seed=99999999999999999999: expected a 64-bit integer"),
        (["digits", "keep=both"], "keep='both' is not a valid value"),
        (["--resume"], "there is no run to resume in runs/digits: it has no config.json."),
        (["--resume", "--out", "nowhere"], "there is no run to resume in nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_arguments_are_one_sentence_errors(vitrail: Command, arguments: list[str], message: str):
    result = vitrail("train", *arguments)
    assert result.status == 1
    assert len(result.errors) == 1
    assert message in result.errors[0]
    assert "Traceback" not in result.err
    assert "unexpected error" not in result.err
    assert result.out == ""
    assert not Path("runs").exists()


@pytest.mark.parametrize("content", ["{", "[]", "3", '{"batch": "many"}', '{"color": "red"}'])
def test_file_without_a_config_is_an_error(vitrail: Command, content: str):
    Path("mine.json").write_text(content)
    result = vitrail("train", "mine.json")
    assert result.status == 1
    assert result.errors[0].startswith("mine.json is not the config of a run: ")


def test_overrides_are_validated_together(vitrail: Command, finished_run: Path):
    """Each override alone would be invalid."""
    distill = ["objective=distill", f"distill.teacher={finished_run}", "model.width=27", "model.num_heads=3"]
    result = vitrail("train", "digits", *TINY[1:2], *TINY[3:], *distill, "duration=1 step", "--no-report")
    assert result.status == 0, result.err
