"""`vitrail finetune` on a folder of images: defaults, resuming, recipes, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cli.conftest import Command
from PIL import Image
from small_models import model, small
from training.small_runs import (
    at_step,
    identical_weights,
    logged_metrics,
    make_photos,
    model_weights,
    one_thread,
    photo_config,
    send_sigterm,
    train_run,
)

import vitrail as package
from vitrail.config import override
from vitrail.runs.run_folder import RunFolder

QUICK = ("data.workers=0", "device=cpu", "evaluate_every=4 steps", "checkpoint_every=4 steps", "--no-report")

pytestmark = pytest.mark.usefixtures("quick_disk", "in_tmp_dir")


@pytest.fixture(scope="module")
def album(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_photos(tmp_path_factory.mktemp("album") / "my photos", {"red": 20, "green": 20, "blue": 20}, side=40)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on four other colors."""
    folder = tmp_path_factory.mktemp("start")
    classes = {"cyan": 16, "magenta": 16, "yellow": 16, "brown": 16}
    config = photo_config(make_photos(folder / "colors", classes), 40, evaluate_every=None)
    with one_thread():
        train_run(override(config, ["optim.lr=3e-3", "model.width=32", "model.mlp_dim=64"]), folder / "run")
    return folder / "run"


def test_model_and_folder_are_the_only_required_options(vitrail: Command, start: Path, album: Path):
    """With the defaults, a small model learns three colors in a few hundred steps."""
    result = vitrail("finetune", "--model", start, "--data", album)
    assert result.status == 0, result.err
    for message in ("all parameters", "AdamW, learning rate 5e-4, layer-wise decay 0.75", "batch size 8"):
        assert message in result.err
    assert "accuracy  100.00 %" in result.out
    run = Path("runs/finetune-my-photos")
    assert (run / "report.html").exists()
    tuned = package.load(run)
    assert tuned.labels == ("blue", "green", "red")
    assert tuned.predict(album / "red" / "003.jpg")[0].label == "red"
    assert tuned.info.origin.startswith("fine-tuned from ")
    assert RunFolder(run).read_config().data.source == str(album)
    assert tuned.explain(album / "red" / "003.jpg", methods=["rollout"]).model == "finetune-my-photos"
    for file in (run / "report.html", run / "model" / "config.json", run / "model" / "model.safetensors"):
        for folder in (start.parent, album.parent, Path.cwd()):  # shared files contain no local paths
            assert str(folder).encode() not in file.read_bytes()


@pytest.fixture(scope="module")
def short_run(start: Path, album: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("short") / "run"
    quick = [setting for setting in QUICK if "=" in setting]
    with one_thread():
        package.finetune(str(start), str(album), overrides=[*quick, "duration=12 steps"], out=folder, report=False)
    return folder


def test_config_json_of_a_run_reproduces_it(vitrail: Command, short_run: Path):
    result = vitrail("train", short_run / "config.json", "--out", "other", "--no-report")
    assert result.status == 0, result.err
    assert identical_weights(Path("other"), short_run)
    assert logged_metrics(Path("other")) == logged_metrics(short_run)
    assert (Path("other") / "config.json").read_bytes() == (short_run / "config.json").read_bytes()
    assert (Path("other") / "model" / "config.json").read_bytes() == (short_run / "model" / "config.json").read_bytes()


def test_same_command_with_resume_resumes(vitrail: Command, start: Path, album: Path, short_run: Path):
    result = vitrail(
        "finetune", "--model", start, "--data", album, "--resume", "--out", short_run, "--device", "cpu", "--no-report"
    )
    assert result.status == 0, result.err
    assert vitrail("finetune", "--resume", "--out", short_run, "--no-report").status == 0
    for options, message in {
        ("--trainable", "head"): "optim.trainable is all and cannot be changed",
        ("--image-size", "32"): "image_size is None and cannot be changed",
        ("--model", "elsewhere"): "init_from is ",
        ("--data", "digits"): "data.source is ",
    }.items():
        result = vitrail("finetune", "--resume", "--out", short_run, *options)
        assert result.status == 1
        assert message in result.errors[0]


def test_auto_resume_starts_resumes_and_reports_completion(vitrail: Command, start: Path, album: Path):
    command = ["finetune", "--model", start, "--data", album, "duration=8 steps", *QUICK, "--auto-resume", "--json"]
    with at_step(6, send_sigterm):
        interrupted = vitrail(*command)
    assert interrupted.status == 143
    assert "trainable" in interrupted.err
    finished = vitrail(*command)
    assert finished.status == 0, finished.err
    assert logged_metrics(Path("runs/finetune-my-photos"))[-1]["step"] == 8
    repeated = vitrail(*command)
    assert repeated.notes == ["the run in runs/finetune-my-photos is finished; there is nothing to do."]
    assert json.loads(repeated.out)["scores"] == json.loads(finished.out)["scores"]
    for options, message in {
        ("--trainable", "head"): "optim.trainable is all and cannot be changed",
        ("optim.lr=1",): "optim.lr is 0.0005 and cannot be changed",
    }.items():
        assert message in vitrail(*command, *options).errors[0]


@pytest.mark.parametrize(
    ("trainable", "expected"), [("head", {"head"}), ("1", {"head", "norm", "blocks.1"}), ("all", None)]
)
def test_only_trainable_parameters_change(
    vitrail: Command, start: Path, album: Path, trainable: str, expected: set[str] | None
):
    arguments = ["--model", start, "--data", album, "--trainable", trainable, "--out", "run"]
    result = vitrail("finetune", *arguments, "duration=6 steps", *QUICK)
    assert result.status == 0, result.err
    before, after = package.load(start).net.state_dict(), model_weights(Path("run"))
    changed = {n for n in after if before[n].shape != after[n].shape or not torch.equal(before[n], after[n])}
    if expected is None:
        assert changed == set(after)
    else:
        assert {".".join(n.split(".")[: 2 if n.startswith("blocks") else 1]) for n in changed} == expected


def test_paper_recipe_at_a_small_size(vitrail: Command, start: Path, album: Path):
    result = vitrail(
        "finetune", "--model", start, "--data", album, "--recipe", "paper", "image_size=32", "duration=110 steps",
        "optim.lr=0.03", *QUICK,
    )  # fmt: skip
    assert result.status == 0, result.err
    config = RunFolder(Path("runs/paper-my-photos")).read_config()
    assert (config.optim.kind, config.image_size, config.model.image_size) == ("sgd", 32, (32, 32))
    assert config.batch_size == 32  # of 52 images
    assert package.load("runs/paper-my-photos").config.image_size == (32, 32)
    assert "SGD, learning rate 0.03" in result.err


def test_gray_images_with_a_color_model(vitrail: Command, start: Path):
    for name, shade in (("dark", 40), ("light", 200)):
        Path("gray", name).mkdir(parents=True)
        for i in range(12):
            Image.new("L", (20, 20), shade + i).save(Path("gray", name, f"{i}.png"))
    result = vitrail("finetune", "--model", start, "--data", "gray", "duration=2 epochs", *QUICK)
    assert result.status == 0, result.err
    assert package.load("runs/finetune-gray").predict("gray/dark/0.png")[0].label in ("dark", "light")


def test_headless_and_timm_checkpoints_are_fine_tuned(vitrail: Command, album: Path):
    model(small(num_classes=0), task="embed").save("headless")
    model(small()).save("timm", to="timm")
    for source in ("headless", "timm"):
        result = vitrail(
            "finetune", "--model", source, "--data", album, "duration=2 steps", "--out", f"{source}-run", *QUICK
        )
        assert result.status == 0, result.err
        assert package.load(f"{source}-run").labels == ("blue", "green", "red")


def test_six_images_are_enough(vitrail: Command, start: Path):
    make_photos(Path("few"), {"a": 3, "b": 3})
    result = vitrail("finetune", "--model", start, "--data", "few", "duration=3 steps", *QUICK)
    assert result.status == 0, result.err


def test_drop_path_of_a_checkpoint_can_be_changed(vitrail: Command, start: Path, album: Path):
    settings = ["model.drop_path=0.2", "duration=2 steps", "--out", "run", *QUICK]
    assert vitrail("finetune", "--model", start, "--data", album, *settings).status == 0
    assert RunFolder(Path("run")).read_config().model.drop_path == 0.2


def test_missing_model_or_data_is_a_one_sentence_error(vitrail: Command, start: Path, album: Path):
    for arguments, message in {
        ("--model", "nowhere/model", "--data", str(album)): "nowhere/model",
        ("--model", str(start), "--data", "no/such/photos"): "no/such/photos",
        ("--model", str(start), "--data", "stream:x.tar"): "x.tar",
    }.items():
        result = vitrail("finetune", *arguments)
        assert result.status == 1
        assert message in result.errors[0]
        assert "unexpected error" not in result.err
    result = vitrail("finetune", "--model", start)
    assert result.status == 2
    assert "finetune needs --model and --data, or --resume with --out RUN" in result.errors[0]
    make_photos(Path("one"), {"cat": 9})
    result = vitrail("finetune", "--model", start, "--data", "one", *QUICK)
    assert "one has only one class, 'cat'" in result.errors[0]


def test_json_has_the_run_and_its_scores(vitrail: Command, short_run: Path):
    result = vitrail("finetune", "--resume", "--out", short_run, "--no-report", "--json")
    values = json.loads(result.out)
    assert values["run"] == str(short_run)
    assert values["scores"]["count"] == 8
