"""`vitrail train`: recipes and settings in, a run folder out, and one clear sentence where that cannot be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli.conftest import Command
from train.small_runs import contents, lines, one_thread, same_bits

import vitrail as package
from vitrail.recipes import RECIPES
from vitrail.train.run_folder import RunFolder

TINY = (
    "model.width=16", "model.depth=2", "model.num_heads=2", "model.mlp_dim=32", "batch_size=64", "data.workers=0",
    "compare=()",
    "schedule.warmup=0 steps", "duration=12 steps", "log_every=3 steps", "evaluate_every=6 steps",
    "checkpoint_every=4 steps", "device=cpu",
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("quick_disk", "elsewhere")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that every test may look at and none may change."""
    folder = tmp_path_factory.mktemp("done") / "run"
    with one_thread():
        package.train("digits", overrides=TINY, out=folder, report=False)
    return folder


def test_a_run_says_how_good_it_is_and_where_things_are(vitrail: Command):
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


def test_json_is_for_machines(vitrail: Command):
    result = vitrail("train", "digits", *TINY, "--no-report", "--json")
    found = json.loads(result.out)
    assert found["run"] == "runs/digits"
    assert found["model"] == "runs/digits/model"
    assert found["report"] is None
    assert found["stop_reason"] is None
    assert found["scores"]["count"] == 359


def test_the_test_images_have_the_last_word(vitrail: Command):
    """Digits have a test split; with others held out to choose by, both are told."""
    result = vitrail("train", "digits", *TINY, "data.held_out=0.1", "--no-report", "--json")
    found = json.loads(result.out)
    assert (found["scores"]["count"], found["test"]["count"]) == (143, 359)
    result = vitrail("train", "--resume", "--no-report")
    assert [line.split("  ")[0] for line in result.out.splitlines()][:2] == ["accuracy", "test accuracy"]


def test_a_name_that_is_taken_gets_a_number(vitrail: Command):
    for expected in ("runs/digits", "runs/digits-2", "runs/digits-3"):
        result = vitrail("train", "digits", *TINY, "duration=1 step", "--no-report", "--json")
        assert json.loads(result.out)["run"] == expected
    assert "runs/digits already holds a run; this one is in runs/digits-3." in result.notes
    result = vitrail("train", "--resume", "--no-report", "--json")
    assert json.loads(result.out)["run"] == "runs/digits-3"


def test_a_named_run_is_found_by_its_name(vitrail: Command):
    assert vitrail("train", "digits", *TINY, "duration=1 step", "name=mine", "--no-report").status == 0
    result = vitrail("train", "digits", "name=mine", "--resume", "--no-report", "--json")
    assert json.loads(result.out)["run"] == "runs/mine"


def test_a_folder_that_holds_a_run_is_left_alone(vitrail: Command, done: Path):
    before = (done / "metrics.jsonl").read_bytes()
    result = vitrail("train", "digits", *TINY, "--out", done)
    assert result.status == 1
    assert result.problems == [f"{done} holds a run already (finished); choose another folder with --out."]
    assert (done / "metrics.jsonl").read_bytes() == before


def test_a_finished_run_prints_its_result_again(vitrail: Command, done: Path):
    before = contents(done)
    result = vitrail("train", "--resume", "--out", done, "--no-report", "--json")
    assert result.status == 0
    last = [line["evaluation"] for line in lines(done) if "evaluation" in line][-1]
    assert json.loads(result.out)["scores"] == last
    assert contents(done) == before


def test_a_folder_with_a_space_in_its_name_is_quoted(vitrail: Command, done: Path):
    shutil.copytree(done, "my cut")
    result = vitrail("train", "--resume", "--out", "my cut", "--no-report")
    assert "vitrail predict --model 'my cut' IMAGE" in result.out


def test_the_same_command_may_be_given_again_with_resume(vitrail: Command, done: Path):
    result = vitrail("train", "digits", *TINY, "--data", "digits", "--resume", "--out", done, "--no-report")
    assert result.status == 0, result.err


@pytest.mark.parametrize(
    "settings", [["optim.lr=0.1"], ["seed=1"], ["schedule.warmup=1 step"], ["batch_size=32"], ["--data", "mnist"]]
)
def test_a_run_cannot_change_what_it_computes(vitrail: Command, done: Path, settings: list[str]):
    result = vitrail("train", "--resume", "--out", done, *settings)
    assert result.status == 1
    assert len(result.problems) == 1
    name = "data.source" if "--data" in settings else settings[0].partition("=")[0]
    assert result.problems[0].startswith(f"{name} is ")
    assert "cannot change when a run is resumed: its result would differ" in result.err
    assert "What can change: checkpoint_every, " in result.err


def test_a_finished_run_can_be_made_longer_and_not_shorter(vitrail: Command, done: Path):
    shutil.copytree(done, "longer")
    result = vitrail("train", "--resume", "--out", "longer", "duration=14 steps", "--no-report")
    assert result.status == 0, result.err
    assert any(note.startswith("the run is extended from 12 to 14 steps: from step 13 on") for note in result.notes)
    assert lines(Path("longer"))[-1]["step"] == 14
    result = vitrail("train", "--resume", "--out", "longer", "duration=13 steps")
    assert result.problems == [
        "duration=13 steps is 13 steps, fewer than the 14 of the run (14 steps), of which 14 are done: a run can be "
        "made longer when it is resumed, not shorter."
    ]


def test_one_command_starts_a_run_and_says_when_it_is_finished(vitrail: Command):
    command = ["train", "digits", *TINY, "batch_size=auto", "--no-report", "--json", "--auto-resume"]
    first = vitrail(*command)
    assert first.status == 0, first.err
    before = contents(Path("runs"))
    again = vitrail(*command)
    assert again.status == 0
    assert again.notes == ["the run in runs/digits is finished; there is nothing to do."]
    assert json.loads(again.out) == json.loads(first.out)
    assert contents(Path("runs")) == before
    assert vitrail(*command, "--resume").problems == [
        "resume and auto_resume cannot be combined: auto_resume starts or resumes as needed."
    ]


def test_a_run_cannot_become_another_network(vitrail: Command, done: Path):
    result = vitrail("train", "--resume", "--out", done, "--model", "ViT-Ti/4")
    assert result.problems == ["--model ViT-Ti/4 cannot change when a run is resumed. Start a new run instead."]


def test_a_run_may_change_how_it_is_watched_and_spread(vitrail: Command, done: Path):
    watched = ["log_every=1 step", "grad_accum_steps=2", "data.workers=1", "on_nan=skip", "gradient_checkpointing=true"]
    result = vitrail("train", "--resume", "--out", done, *watched, "--no-report")
    assert result.status == 0, result.err


def test_settings_of_a_run_run_again_with_the_same_bits(vitrail: Command, done: Path):
    result = vitrail("train", done / "config.json", "--out", "again", "--no-report")
    assert result.status == 0, result.err
    assert same_bits(Path("again"), done)
    assert lines(Path("again")) == lines(done)
    assert RunFolder(Path("again")).read_config() == RunFolder(done).read_config()


def test_settings_may_lie_in_any_file(vitrail: Command, done: Path):
    """And it is that file which is read, whatever lies beside it."""
    settings = json.loads((done / "config.json").read_text())
    Path("config.json").write_text("{}")
    Path("mine.json").write_text(json.dumps(settings | {"duration": "2 steps", "name": "mine"}))
    result = vitrail("train", "mine.json", "--no-report", "--json")
    assert json.loads(result.out)["run"] == "runs/mine"
    assert lines(Path("runs/mine"))[-1]["step"] == 2


def test_another_network_by_name(vitrail: Command):
    result = vitrail("train", "digits", "--model", "ViT-Ti/4", *TINY[4:], "duration=1 step", "--no-report")
    assert result.status == 0, result.err
    assert package.load("runs/digits").config.width == 192


def test_recipes_are_listed(vitrail: Command):
    result = vitrail("train", "--list")
    assert result.status == 0
    assert [line.split()[0] for line in result.out.splitlines()[1:] if line[0] != " "] == list(RECIPES)
    assert "Run: vitrail" not in result.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["digit"], "no recipe is called 'digit'; did you mean 'digits'?"),
        (["nothing.json"], "nothing.json cannot be read: No such file or directory."),
        (["digits", "optim.learning=1"], "no setting 'optim.learning': OptimConfig has no 'learning'"),
        (["digits", "optm.lr=1"], "no setting 'optm.lr': TrainConfig has no 'optm'; did you mean 'optim'?"),
        (["digits", "optim.lr", "0.1"], "got two recipes, digits and optim.lr; settings are written KEY=VALUE."),
        (["digits", "optim.lr=fast"], "OptimConfig.lr expects float, got 'fast'."),
        (["digits", "batch_size=0"], "batch_size=0: one image or more."),
        (
            ["digits", "batch_size=5000"],
            "batch_size=5000 is more than the 1,438 images to learn from; try batch_size=719.",
        ),
        (["digits", "duration=ten epochs"], "got 'ten epochs', expected a duration with its unit"),
        (
            ["digits", "duration=5 steps", "schedule.warmup=5 epochs"],
            "a warm-up of 5 epochs is 57 steps, but the whole run has 5",
        ),
        (["digits", "model.image_size=9"], "patch_size=2 leaves"),
        (["digits", "augment.mix_off=-3 epochs"], "got '-3 epochs', expected a duration with its unit"),
        (["digits", "batch_size=auto", "parallel=fsdp"], "with parallel=fsdp give a number"),
        (["digits", "classify.class_weights=balanced", "data.order=balanced"], "classify.class_weights=none with it"),
        (["digits", "device=tpu"], "there is no device 'tpu'"),
        (["digits", "data.source=nowhere"], "nowhere"),
        (["digits", "--data", "photos/"], "photos"),
        (["--data", "photos/"], "--data photos/ needs a recipe, such as"),
        (["digits", "--model", "ViT-X/4"], "ViT-X/4"),
        (["digits", "objective=distill"], "objective=distill needs distill.teacher"),
        (["digits", "objective=distill", "distill.teacher=gone/"], "gone"),
        (["digits", "compare=('model.posture=none',)"], "no setting 'model.posture'"),
        (["digits", "seed=99999999999999999999"], "seed=99999999999999999999 is too large"),
        (["digits", "keep=both"], "TrainConfig.keep='both' is not one of its values"),
        (["--resume"], "there is no run to resume in runs/digits: it has no config.json."),
        (["--resume", "--out", "nowhere"], "there is no run to resume in nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_one_sentence(vitrail: Command, arguments: list[str], words: str):
    result = vitrail("train", *arguments)
    assert result.status == 1
    assert len(result.problems) == 1
    assert words in result.problems[0]
    assert "Traceback" not in result.err
    assert "unexpected error" not in result.err
    assert result.out == ""
    assert not Path("runs").exists()


@pytest.mark.parametrize("content", ["{", "[]", "3", '{"batch": "many"}', '{"color": "red"}'])
def test_a_file_that_holds_no_settings(vitrail: Command, content: str):
    Path("mine.json").write_text(content)
    result = vitrail("train", "mine.json")
    assert result.status == 1
    assert result.problems[0].startswith("mine.json is not the config of a run: ")


def test_settings_may_come_in_any_order(vitrail: Command, done: Path):
    """Each alone would be refused."""
    teach = ["objective=distill", f"distill.teacher={done}", "model.width=27", "model.num_heads=3"]
    result = vitrail("train", "digits", *TINY[1:2], *TINY[3:], *teach, "duration=1 step", "--no-report")
    assert result.status == 0, result.err
