"""`vitrail finetune`: a trained model and a folder of photographs are all it needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cli.conftest import Command
from PIL import Image
from small_models import model, small
from train.small_runs import at_step, lines, on_photos, one_thread, photos, same_bits, stop, trained, weights

import vitrail as package
from vitrail.config import override
from vitrail.train.run_folder import RunFolder

QUICK = ("data.workers=0", "device=cpu", "evaluate_every=4 steps", "checkpoint_every=4 steps", "--no-report")

pytestmark = pytest.mark.usefixtures("quick_disk", "elsewhere")


@pytest.fixture(scope="module")
def album(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photos(tmp_path_factory.mktemp("album") / "my photos", {"red": 20, "green": 20, "blue": 20}, side=40)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned to tell four other colors apart."""
    folder = tmp_path_factory.mktemp("start")
    classes = {"cyan": 16, "magenta": 16, "yellow": 16, "brown": 16}
    config = on_photos(photos(folder / "colors", classes), 40, evaluate_every=None)
    with one_thread():
        trained(override(config, ["optim.lr=3e-3", "model.width=32", "model.mlp_dim=64"]), folder / "run")
    return folder / "run"


def test_a_model_and_a_folder_are_enough(vitrail: Command, start: Path, album: Path):
    """Everything is the default; in a few hundred steps of a small model three colors are learned."""
    result = vitrail("finetune", "--model", start, "--data", album)
    assert result.status == 0, result.err
    for words in ("all parameters", "AdamW, learning rate 5e-4, layer-wise decay 0.75", "batch size 8"):
        assert words in result.err
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
        for folder in (start.parent, album.parent, Path.cwd()):  # what is sent to others says nothing of this machine
            assert str(folder).encode() not in file.read_bytes()


@pytest.fixture(scope="module")
def half(start: Path, album: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("half") / "run"
    quick = [setting for setting in QUICK if "=" in setting]
    with one_thread():
        package.finetune(str(start), str(album), overrides=[*quick, "duration=12 steps"], out=folder, report=False)
    return folder


def test_settings_of_a_run_are_complete(vitrail: Command, half: Path):
    result = vitrail("train", half / "config.json", "--out", "other", "--no-report")
    assert result.status == 0, result.err
    assert same_bits(Path("other"), half)
    assert lines(Path("other")) == lines(half)
    assert (Path("other") / "config.json").read_bytes() == (half / "config.json").read_bytes()
    assert (Path("other") / "model" / "config.json").read_bytes() == (half / "model" / "config.json").read_bytes()


def test_the_same_command_resumes(vitrail: Command, start: Path, album: Path, half: Path):
    result = vitrail(
        "finetune", "--model", start, "--data", album, "--resume", "--out", half, "--device", "cpu", "--no-report"
    )
    assert result.status == 0, result.err
    assert vitrail("finetune", "--resume", "--out", half, "--no-report").status == 0
    for other, words in {
        ("--trainable", "head"): "optim.trainable is all and cannot change",
        ("--image-size", "32"): "image_size is None and cannot change",
        ("--model", "elsewhere"): "init_from is ",
        ("--data", "digits"): "data.source is ",
    }.items():
        result = vitrail("finetune", "--resume", "--out", half, *other)
        assert result.status == 1
        assert words in result.problems[0]


def test_one_command_starts_goes_on_and_says_when_it_is_finished(vitrail: Command, start: Path, album: Path):
    command = ["finetune", "--model", start, "--data", album, "duration=8 steps", *QUICK, "--auto-resume", "--json"]
    with at_step(6, stop):
        cut = vitrail(*command)
    assert cut.status == 143
    assert "trainable" in cut.err
    done = vitrail(*command)
    assert done.status == 0, done.err
    assert lines(Path("runs/finetune-my-photos"))[-1]["step"] == 8
    again = vitrail(*command)
    assert again.notes == ["the run in runs/finetune-my-photos is finished; there is nothing to do."]
    assert json.loads(again.out)["scores"] == json.loads(done.out)["scores"]
    for other, words in {
        ("--trainable", "head"): "optim.trainable is all and cannot change",
        ("optim.lr=1",): "optim.lr is 0.0005 and cannot change",
    }.items():
        assert words in vitrail(*command, *other).problems[0]


@pytest.mark.parametrize(("what", "moved"), [("head", {"head"}), ("1", {"head", "norm", "blocks.1"}), ("all", None)])
def test_what_learns_is_what_moves(vitrail: Command, start: Path, album: Path, what: str, moved: set[str] | None):
    arguments = ["--model", start, "--data", album, "--trainable", what, "--out", "run"]
    result = vitrail("finetune", *arguments, "duration=6 steps", *QUICK)
    assert result.status == 0, result.err
    before, after = package.load(start).net.state_dict(), weights(Path("run"))
    changed = {n for n in after if before[n].shape != after[n].shape or not torch.equal(before[n], after[n])}
    if moved is None:
        assert changed == set(after)
    else:
        assert {".".join(n.split(".")[: 2 if n.startswith("blocks") else 1]) for n in changed} == moved


def test_the_papers_way_at_a_small_size(vitrail: Command, start: Path, album: Path):
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


def test_gray_images_for_a_model_of_colors(vitrail: Command, start: Path):
    for name, shade in (("dark", 40), ("light", 200)):
        Path("gray", name).mkdir(parents=True)
        for i in range(12):
            Image.new("L", (20, 20), shade + i).save(Path("gray", name, f"{i}.png"))
    result = vitrail("finetune", "--model", start, "--data", "gray", "duration=2 epochs", *QUICK)
    assert result.status == 0, result.err
    assert package.load("runs/finetune-gray").predict("gray/dark/0.png")[0].label in ("dark", "light")


def test_a_network_without_a_head_and_one_of_another_library(vitrail: Command, album: Path):
    model(small(num_classes=0), task="embed").save("headless")
    model(small()).save("timm", to="timm")
    for source in ("headless", "timm"):
        result = vitrail(
            "finetune", "--model", source, "--data", album, "duration=2 steps", "--out", f"{source}-run", *QUICK
        )
        assert result.status == 0, result.err
        assert package.load(f"{source}-run").labels == ("blue", "green", "red")


def test_few_images_are_enough(vitrail: Command, start: Path):
    photos(Path("few"), {"a": 3, "b": 3})
    result = vitrail("finetune", "--model", start, "--data", "few", "duration=3 steps", *QUICK)
    assert result.status == 0, result.err


def test_chance_may_be_changed_in_a_checkpoint(vitrail: Command, start: Path, album: Path):
    settings = ["model.drop_path=0.2", "duration=2 steps", "--out", "run", *QUICK]
    assert vitrail("finetune", "--model", start, "--data", album, *settings).status == 0
    assert RunFolder(Path("run")).read_config().model.drop_path == 0.2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--recipe", "papers"], "no fine-tuning recipe is called 'papers'; did you mean 'paper'?"),
        (["--trainable", "heads"], "OptimConfig.trainable='heads' is not one of its values; did you mean 'head'?"),
        (["--trainable", "7"], "trainable=7 blocks, but the network has 2; try trainable=all."),
        (["--image-size", "17"], "17"),
        (["--image-size", "big"], "--image-size expects 384 or 384x288"),
        (["model.depth=5"], "model.depth=5, but the checkpoint has 2"),
        (["optim.lr"], "got 'optim.lr', expected key=value"),
        (["batch_size=1000"], "batch_size=1000 is more than the 52 images"),
        (["data.class_names=('red',)"], "has the class"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_one_sentence(vitrail: Command, start: Path, album: Path, arguments: list[str], words: str):
    result = vitrail("finetune", "--model", start, "--data", album, *QUICK, *arguments)
    assert result.status == 1
    assert len(result.problems) == 1
    assert words in result.problems[0]
    assert "unexpected error" not in result.err
    assert not Path("runs").exists()


def test_what_is_not_there_is_one_sentence(vitrail: Command, start: Path, album: Path):
    for arguments, words in {
        ("--model", "nowhere/model", "--data", str(album)): "nowhere/model",
        ("--model", str(start), "--data", "no/such/photos"): "no/such/photos",
        ("--model", str(start), "--data", "stream:x.tar"): "x.tar",
    }.items():
        result = vitrail("finetune", *arguments)
        assert result.status == 1
        assert words in result.problems[0]
        assert "unexpected error" not in result.err
    result = vitrail("finetune", "--model", start)
    assert result.status == 2
    assert "finetune needs --model and --data, or --resume with --out RUN" in result.problems[0]
    photos(Path("one"), {"cat": 9})
    result = vitrail("finetune", "--model", start, "--data", "one", *QUICK)
    assert "one has only one class, 'cat'" in result.problems[0]


def test_results_for_machines(vitrail: Command, half: Path):
    result = vitrail("finetune", "--resume", "--out", half, "--no-report", "--json")
    found = json.loads(result.out)
    assert found["run"] == str(half)
    assert found["scores"]["count"] == 8
