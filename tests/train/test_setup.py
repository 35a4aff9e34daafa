"""From settings to a run: every blank is filled in, every setting does what it says, what cannot be is refused."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data.sources.conftest import tar_bytes
from images import encoded
from PIL import Image
from small_models import model, small
from train.processes import Processes
from train.small_runs import (
    at_step,
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

import vitrail
from vitrail.config import TrainConfig, override
from vitrail.data.sources import open_data
from vitrail.errors import ConfigError, DataError, TrainError, VitrailError
from vitrail.train.checkpointing import Progress
from vitrail.train.distributed import DistributedContext
from vitrail.train.loop import fit
from vitrail.train.run_folder import RunFolder
from vitrail.train.setup import prepare_run
from vitrail.train.trainer import Trainer

ALONE = DistributedContext(torch.device("cpu"))


pytestmark = pytest.mark.usefixtures("quick_disk")


def first_losses(config: TrainConfig, folder: Path, *settings: str) -> list[float]:
    trained(override(config, settings), folder)
    return [line["loss"] for line in lines(folder) if "loss" in line]


def test_every_blank_is_filled_in(images: Path):
    setup = prepare_run(on_photos(images, preprocess=None), ALONE)
    assert setup.config.model.num_classes == 3
    assert setup.config.preprocess == setup.info.preprocess
    assert setup.info.labels == ("blue", "green", "red")
    assert setup.class_counts is not None
    assert setup.class_counts.tolist() == np.bincount(setup.splits.train.targets).tolist()
    assert TrainConfig.from_dict(json.loads(json.dumps(setup.config.to_dict()))) == setup.config


@pytest.mark.parametrize("setting", ["grad_accum_steps=4", "gradient_checkpointing=true"])
def test_what_saves_memory_changes_nothing_else(tmp_path: Path, setting: str):
    config = digits(6, precision="float64", log_every="1 step", evaluate_every=None)
    plain = first_losses(config, tmp_path / "plain")
    assert first_losses(config, tmp_path / "sparing", setting) == pytest.approx(plain, rel=1e-9)
    assert all(tensor.dtype == torch.float32 for tensor in weights(tmp_path / "sparing").values())


@pytest.fixture(scope="module")
def plain_losses(images: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    with one_thread():
        return first_losses(on_photos(images, log_every="1 step"), tmp_path_factory.mktemp("plain") / "run")


@pytest.mark.parametrize(
    "settings",
    [
        ["classify.loss=sigmoid"],
        ["classify.label_smoothing=0.2"],
        ["classify.class_weights=balanced"],
        ["data.order=balanced"],
        ["data.repeats=2"],
        ["optim.kind=sgd", "optim.lr=0.1"],
        ["optim.kind=muon"],
        ["precision=bfloat16"],
        ["schedule.kind=rsqrt", "schedule.timescale=5 steps", "schedule.cooldown=2 steps"],
        ["augment.mixup=0.5", "augment.cutmix=1.0"],
    ],
    ids=lambda settings: settings[0],
)
def test_settings_do_something_and_the_run_goes_on_with_them(
    plain_losses: list[float], images: Path, tmp_path: Path, settings: list[str]
):
    config = override(on_photos(images, log_every="1 step"), settings)
    assert first_losses(config, tmp_path / "changed") != pytest.approx(plain_losses, rel=1e-6)
    interrupted(config, tmp_path / "cut", 3)
    resumed(tmp_path / "cut")
    assert same_bits(tmp_path / "cut", tmp_path / "changed")


def test_balanced_classes_are_seen_equally_often(images: Path):
    config = on_photos(images, 30, data={"source": str(images), "workers": 0, "order": "balanced"})
    trainer = Trainer(prepare_run(config, ALONE), ALONE)
    with trainer.training_loader(Progress()) as batches:
        seen = torch.cat([batch.targets for batch in batches])
    assert torch.bincount(seen).tolist() == [80, 80, 80]


def test_an_average_is_what_is_measured_and_kept(tmp_path: Path):
    result = trained(digits(ema=0.9), tmp_path / "run")
    kept = weights(tmp_path / "run")
    trainer_has = {n.removeprefix("net."): p for n, p in _last(tmp_path / "run", "learner").items()}
    average = {n.removeprefix("net."): p for n, p in _last(tmp_path / "run", "average").items()}
    assert all(torch.equal(kept[name], tensor) for name, tensor in average.items())
    assert not torch.equal(kept["head.weight"], trainer_has["head.weight"])
    assert result.scores is not None


def _last(folder: Path, part: str) -> dict[str, torch.Tensor]:
    from vitrail.train.checkpointing import read_tensors, select_prefix

    return select_prefix(part, read_tensors(max((folder / "checkpoint").glob("0*"))))


def test_several_labels_from_a_table(tmp_path: Path):
    rows = []
    for i in range(40):
        has = [name for bit, name in enumerate(("red", "green", "blue")) if (i % 8) >> bit & 1]
        color = [220 if name in has else 30 for name in ("red", "green", "blue")]
        Image.new("RGB", (16, 16), tuple(color)).save(tmp_path / f"{i}.png")
        rows.append((f"{i}.png", "|".join(has)))
    with (tmp_path / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "labels"), *rows])
    config = on_photos(tmp_path, 30, data={"source": f"table:{tmp_path}/table.csv", "workers": 0})
    config = override(config, ["optim.lr=1e-2", "augment.crop=none", "evaluate_every=10 steps"])
    result = trained(config, tmp_path / "run")
    assert result.scores is not None
    assert result.scores.mean_average_precision > 0.9
    assert all("map" in line["evaluation"] for line in lines(tmp_path / "run") if "evaluation" in line)
    answers = vitrail.load(tmp_path / "run").predict(Image.new("RGB", (16, 16), (220, 220, 30)), top=3)
    assert {a.label for a in answers if a.score > 0.5} == {"red", "green"}
    found = trained(override(config, ["batch_size=auto", "duration=2 steps"]), tmp_path / "auto")
    assert found.setup.config.batch_size in (1, 2, 4)


def test_a_batch_is_found_and_written_down(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    result = trained(digits(batch_size="auto", grad_accum_steps=2, duration="3 steps"), tmp_path / "run")
    found = RunFolder(tmp_path / "run").read_config().batch_size
    assert isinstance(found, int)
    assert 16 <= found <= 1438 // 8
    assert found & (found - 1) == 0
    assert f"using batch_size={found}" in caplog.text
    assert {line["images"] for line in lines(tmp_path / "run")} == {3 * found}
    assert result.setup.config.batch_size == found


def train_here(config: dict[str, Any], folder: str, resume: bool = False) -> Any:
    """In one of several processes."""
    result = fit(TrainConfig.from_dict(config), RunFolder(Path(folder)), resume=resume)
    return result.setup.config.batch_size


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes(2) as started:
        yield started


def test_all_processes_agree_on_a_batch(processes: Processes, tmp_path: Path):
    config = digits(batch_size="auto", duration="2 steps").to_dict()
    one, two = processes.run(train_here, config, str(tmp_path / "run"))
    assert one == two == RunFolder(tmp_path / "run").read_config().batch_size
    with pytest.raises(ConfigError, match="batch_size=63 cannot be shared evenly by 2 processes in 1 parts each"):
        Trainer(prepare_run(digits(batch_size=63), ALONE), DistributedContext(torch.device("cpu"), 0, 2))


def test_tensorboard_has_each_step_once_too(tmp_path: Path):
    board = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def kill(_: object) -> None:
        raise KeyboardInterrupt

    with at_step(11, kill), pytest.raises(KeyboardInterrupt):  # after a logged step that was not saved
        trained(digits(12, tensorboard=True, evaluate_every=None), tmp_path / "run")
    resumed(tmp_path / "run")
    read = board.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    logged = [(line["step"], line["loss"]) for line in lines(tmp_path / "run") if "loss" in line]
    assert [step for step, _ in logged] == [3, 6, 9, 12]
    found = [(e.step, e.value) for e in read.Scalars("training/loss")]
    assert found == [(step, pytest.approx(loss)) for step, loss in logged]


@pytest.mark.slow
def test_a_compiled_run_learns_the_same(tmp_path: Path):
    config = override(digits(6, log_every="1 step", evaluate_every="3 steps"), ["model.depth=1"])
    plain = first_losses(config, tmp_path / "plain")
    compiled = first_losses(config, tmp_path / "compiled", "compile=true")
    assert compiled == pytest.approx(plain, rel=1e-3)


def test_an_epoch_shows_each_labeled_image_once(tmp_path: Path):
    photos(tmp_path, {"red": 20, "green": 20})
    names = [(f"{c}/{i:03d}.jpg", c if i % 2 else "", "train") for c in ("red", "green") for i in range(20)]
    names += [(f"{c}/{i:03d}.jpg", c, "val") for c in ("red", "green") for i in range(4)]
    with (tmp_path / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label", "split"), *names])
    config = on_photos(tmp_path, data={"source": f"table:{tmp_path}/table.csv", "workers": 0})
    config = override(config, ["duration=2 epochs", "batch_size=5"])
    trainer = Trainer(prepare_run(config, ALONE), ALONE)
    assert (trainer.num_images, trainer.total_steps) == (20, 8)
    with trainer.training_loader(Progress()) as batches:
        seen = torch.cat([batch.indices for batch in batches])
    assert torch.bincount(seen).unique().tolist() == [0, 2]
    unlearned = override(config, ["objective=masked-patch"])
    assert Trainer(prepare_run(unlearned, ALONE), ALONE).num_images == 40


@pytest.fixture(scope="module")
def teacher(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / "run"
    with one_thread():
        trained(override(on_photos(images, 30), ["optim.lr=5e-3", "augment.crop=none"]), folder)
    return folder


@pytest.mark.parametrize(("kind", "distilled"), [("hard", True), ("soft", False)])
def test_a_student_of_a_run_trains_resumes_and_loads(
    teacher: Path, images: Path, tmp_path: Path, kind: str, distilled: bool
):
    settings = ["objective=distill", f"distill.teacher={teacher}", f"distill.kind={kind}"]
    config = override(on_photos(images, 8), [*settings, f"model.distilled={distilled}"])
    trained(config, tmp_path / "whole")
    interrupted(config, tmp_path / "cut", 5)
    resumed(tmp_path / "cut")
    assert same_bits(tmp_path / "whole", tmp_path / "cut")
    assert lines(tmp_path / "whole") == lines(tmp_path / "cut")
    assert "agreed" in lines(tmp_path / "whole")[0]
    assert vitrail.load(tmp_path / "whole").predict(images / "red" / "000.jpg")[0].label in ("red", "green", "blue")


def test_a_teacher_of_other_things_is_refused(images: Path, tmp_path: Path):
    model(small(num_classes=7)).save(tmp_path / "other")
    config = override(on_photos(images), ["objective=distill", f"distill.teacher={tmp_path}/other"])
    with pytest.raises(ConfigError, match=r"the teacher .* has 7 classes, the student 3"):
        trained(config, tmp_path / "run")


# Starting from a checkpoint


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three colors, under names of its own."""
    path = tmp_path_factory.mktemp("start") / "model"
    given = model(small(num_classes=3, image_size=16), labels=("blue", "green", "red"), family="DeiT", origin="a test")
    given.save(path)
    return path


def test_a_head_is_kept_for_the_same_classes_and_new_for_others(start: Path, images: Path, tmp_path: Path):
    config = on_photos(images, init_from=str(start), model=None, preprocess=None)
    kept = prepare_run(config, ALONE)
    assert torch.equal(kept.net.head.weight, vitrail.load(start).net.head.weight)
    renamed = photos(tmp_path / "renamed", {"red": 4, "green": 4, "azure": 4})
    new = prepare_run(config.replace(data={"source": str(renamed)}), ALONE)
    assert new.info.labels == ("azure", "green", "red")
    assert not new.net.head.weight.any()
    assert torch.equal(new.net.blocks[0].mlp.up.weight, vitrail.load(start).net.blocks[0].mlp.up.weight)
    assert new.info.origin == "fine-tuned from a test"


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of mapped files")
def test_a_run_does_not_depend_on_the_file_it_started_from(start: Path, images: Path, tmp_path: Path):
    """What is frozen would change when the file is written over, and end the run when it is cut off."""
    path = tmp_path / "start.safetensors"
    vitrail.load(start).save(path)
    setup = prepare_run(on_photos(images, init_from=str(path), model=None, preprocess=None), ALONE)
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert torch.equal(setup.net.head.weight, vitrail.load(start).net.head.weight)


def test_a_run_killed_before_its_first_checkpoint_still_starts_from_its_checkpoint(
    start: Path, images: Path, tmp_path: Path
):
    """And one that goes on says where it came from; it needs the checkpoint no more."""
    config = on_photos(images, init_from=str(start), model=None, preprocess=None)
    trained(config, tmp_path / "whole")
    RunFolder(tmp_path / "early").create(prepare_run(config, ALONE).config)
    resumed(tmp_path / "early")
    assert same_bits(tmp_path / "early", tmp_path / "whole")
    interrupted(config, tmp_path / "late", 3)
    settings = json.loads((tmp_path / "late" / "config.json").read_text())
    (tmp_path / "late" / "config.json").write_text(json.dumps(settings | {"init_from": str(tmp_path / "gone")}))
    resumed(tmp_path / "late")
    assert same_bits(tmp_path / "late", tmp_path / "whole")
    infos = [json.loads((tmp_path / name / "model" / "config.json").read_text()) for name in ("whole", "late")]
    assert infos[0] == infos[1]
    assert (infos[0]["family"], infos[0]["origin"]) == ("DeiT", "fine-tuned from a test")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["model.depth=3"], r"model.depth=3, but the checkpoint has 2.*drop_path can be changed"),
        (["image_size=30"], r"30"),
        (["optim.trainable=5"], r"trainable=5 blocks, but the network has 2"),
    ],
)
def test_what_a_checkpoint_cannot_follow(start: Path, images: Path, settings: list[str], words: str):
    config = on_photos(images, init_from=str(start), preprocess=None, model=vitrail.load(start).config)
    with pytest.raises(ConfigError, match=words):
        Trainer(prepare_run(override(config, settings), ALONE), ALONE)


def test_chance_may_change_in_a_checkpoint(start: Path, images: Path):
    config = on_photos(images, init_from=str(start), preprocess=None, model=vitrail.load(start).config)
    setup = prepare_run(override(config, ["model.drop_path=0.2", "image_size=24"]), ALONE)
    assert (setup.net.config.drop_path, setup.net.config.image_size) == (0.2, (24, 24))
    assert setup.info.preprocess.image_size == (24, 24)


# What cannot be


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        (["image_size=32"], ConfigError, r"image_size=32 is only for init_from; set model.image_size"),
        (["model.num_classes=4"], ConfigError, r"got model.num_classes=4, and the data has 10 classes"),
        (["model.channels=3"], ConfigError, r"gives 1 channels, but the network needs 3"),
        (["model.image_size=16"], ConfigError, r"preprocess.image_size=.*8.*, but .* model.image_size=.*16"),
        (["schedule.warmup=30 steps"], ConfigError, r"warm-up of 30 steps is 30 steps, but the whole run has 20"),
        (["data.source=no-such-data"], VitrailError, r"no-such-data"),
        (["data.source=./nowhere/"], VitrailError, r"nowhere"),
        (["model.patch_size=3"], ConfigError, r"patch_size=3 leaves"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, settings: list[str], error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        trained(override(digits(), settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_one_class_is_nothing_to_learn(tmp_path: Path):
    photos(tmp_path / "photos", {"cat": 8})
    with pytest.raises(DataError, match="has only one class, 'cat'"):
        trained(on_photos(tmp_path / "photos"), tmp_path / "run")


# A plain stream


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four shards of 40 images, and one to measure on."""
    folder = tmp_path_factory.mktemp("web")
    (folder / "classes.json").write_text('["dark", "light"]')
    for name in ("train-000", "train-001", "train-002", "train-003", "val-000"):
        members = []
        for i in range(40):
            shade = np.random.default_rng([i, *name.encode()]).integers(0, 120, (16, 16, 3)) + 130 * (i % 2)
            image = encoded(Image.fromarray(shade.astype(np.uint8)), "PNG")
            members += [(f"{name}-{i:03d}.png", image), (f"{name}-{i:03d}.cls", b"%d" % (i % 2))]
        (folder / f"{name}.tar").write_bytes(tar_bytes(members))
    return folder


def streaming(web: Path, **changes: Any) -> TrainConfig:
    settings = {"data": {"source": f"stream:{web}", "workers": 0}, "evaluate_every": "4 steps"}
    return on_photos(web, 12, **settings | changes)


def test_a_stream_trains_saves_its_place_and_goes_on(web: Path, tmp_path: Path):
    whole = trained(streaming(web), tmp_path / "whole")
    assert whole.scores is not None
    assert whole.scores.count == 40
    for step in (3, 8):
        interrupted(streaming(web), tmp_path / f"cut-{step}", step)
        resumed(tmp_path / f"cut-{step}")
        assert same_bits(tmp_path / f"cut-{step}", tmp_path / "whole")
        assert lines(tmp_path / f"cut-{step}") == lines(tmp_path / "whole")
    assert all("epoch" not in line for line in lines(tmp_path / "whole"))


@pytest.mark.parametrize("name", ["duration", "evaluate_every", "checkpoint_every", "log_every"])
def test_a_stream_has_no_epochs(web: Path, tmp_path: Path, name: str):
    with pytest.raises(
        ConfigError, match=rf"{name}=1 epoch cannot be converted to steps: .* give it in steps or images"
    ):
        trained(streaming(web, **{name: "1 epoch"}), tmp_path / "run")


def test_a_stream_goes_on_only_on_as_many_processes(processes: Processes, web: Path, tmp_path: Path):
    config = streaming(web)
    assert processes.run(train_half, config.to_dict(), str(tmp_path / "cut")) == [5, 5]
    assert processes.run(train_here, config.to_dict(), str(tmp_path / "whole")) == [8, 8]
    with pytest.raises(TrainError, match=r"only on as many processes as before, 2, and there are 1; shards:"):
        resumed(tmp_path / "cut")
    processes.run(train_here, config.to_dict(), str(tmp_path / "cut"), True)
    assert same_bits(tmp_path / "cut", tmp_path / "whole")


def train_half(config: dict[str, Any], folder: str) -> int:
    with at_step(5, stop):
        return fit(TrainConfig.from_dict(config), RunFolder(Path(folder))).progress.step


def test_a_loss_of_a_stream_that_is_not_finite_names_its_samples(web: Path, tmp_path: Path):
    with pytest.raises(TrainError, match=r"the loss of step \d+ is not finite; its images were number \d+ of the"):
        trained(override(streaming(web), ["optim.lr=1e30", "optim.kind=sgd", "optim.grad_clip=none"]), tmp_path / "run")


def test_the_data_are_measured_as_they_are(images: Path):
    """What tests here rely on: a tenth is held out."""
    assert open_data(on_photos(images).data).eval_split == "held out"
