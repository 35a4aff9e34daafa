"""Preparing a run: unset fields are resolved, settings take effect, and invalid settings are refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data.sources.conftest import tar_bytes
from images import encoded
from PIL import Image
from small_models import model, small
from training.processes import Processes
from training.small_objective import SINGLE_PROCESS
from training.small_runs import (
    at_step,
    digits_config,
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

import vitrail
from vitrail.config import TrainConfig, override
from vitrail.data.sources import open_data
from vitrail.errors import ConfigError, DataError, TrainError, VitrailError
from vitrail.runs.run_folder import RunFolder
from vitrail.runtime.distributed import DistributedContext
from vitrail.training.checkpointing import Progress
from vitrail.training.loop import fit
from vitrail.training.setup import prepare_run
from vitrail.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("quick_disk")


def first_losses(config: TrainConfig, folder: Path, *settings: str) -> list[float]:
    train_run(override(config, settings), folder)
    return [line["loss"] for line in logged_metrics(folder) if "loss" in line]


def test_unset_fields_are_resolved(images: Path):
    setup = prepare_run(photo_config(images, preprocess=None), SINGLE_PROCESS)
    assert setup.config.model.num_classes == 3
    assert setup.config.preprocess == setup.info.preprocess
    assert setup.info.labels == ("blue", "green", "red")
    assert setup.class_counts is not None
    assert setup.class_counts.tolist() == np.bincount(setup.splits.train.targets).tolist()
    assert TrainConfig.from_dict(json.loads(json.dumps(setup.config.to_dict()))) == setup.config


@pytest.mark.parametrize("setting", ["grad_accum_steps=4", "gradient_checkpointing=true"])
def test_memory_saving_settings_do_not_change_losses(tmp_path: Path, setting: str):
    config = digits_config(6, precision="float64", log_every="1 step", evaluate_every=None)
    plain = first_losses(config, tmp_path / "plain")
    assert first_losses(config, tmp_path / "saving", setting) == pytest.approx(plain, rel=1e-9)
    assert all(tensor.dtype == torch.float32 for tensor in model_weights(tmp_path / "saving").values())


@pytest.fixture(scope="module")
def plain_losses(images: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    with one_thread():
        return first_losses(photo_config(images, log_every="1 step"), tmp_path_factory.mktemp("plain") / "run")


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
def test_settings_take_effect_and_the_run_resumes_with_them(
    plain_losses: list[float], images: Path, tmp_path: Path, settings: list[str]
):
    config = override(photo_config(images, log_every="1 step"), settings)
    assert first_losses(config, tmp_path / "changed") != pytest.approx(plain_losses, rel=1e-6)
    interrupt_run(config, tmp_path / "interrupted", 3)
    resume_run(tmp_path / "interrupted")
    assert identical_weights(tmp_path / "interrupted", tmp_path / "changed")


def test_balanced_order_shows_each_class_equally_often(images: Path):
    config = photo_config(images, 30, data={"source": str(images), "workers": 0, "order": "balanced"})
    trainer = Trainer(prepare_run(config, SINGLE_PROCESS), SINGLE_PROCESS)
    with trainer.training_loader(Progress()) as batches:
        seen = torch.cat([batch.targets for batch in batches])
    assert torch.bincount(seen).tolist() == [80, 80, 80]


def test_saved_model_has_the_averaged_weights(tmp_path: Path):
    result = train_run(digits_config(ema=0.9), tmp_path / "run")
    saved = model_weights(tmp_path / "run")
    current = {n.removeprefix("net."): p for n, p in _read_last_checkpoint(tmp_path / "run", "learner").items()}
    average = {n.removeprefix("net."): p for n, p in _read_last_checkpoint(tmp_path / "run", "average").items()}
    assert all(torch.equal(saved[name], tensor) for name, tensor in average.items())
    assert not torch.equal(saved["head.weight"], current["head.weight"])
    assert result.scores is not None


def _read_last_checkpoint(folder: Path, part: str) -> dict[str, torch.Tensor]:
    from vitrail.training.checkpointing import read_tensors, select_prefix

    return select_prefix(part, read_tensors(max((folder / "checkpoint").glob("0*"))))


def test_multi_label_run_from_a_table(tmp_path: Path):
    rows = []
    for i in range(40):
        present = [name for bit, name in enumerate(("red", "green", "blue")) if (i % 8) >> bit & 1]
        color = [220 if name in present else 30 for name in ("red", "green", "blue")]
        Image.new("RGB", (16, 16), tuple(color)).save(tmp_path / f"{i}.png")
        rows.append((f"{i}.png", "|".join(present)))
    with (tmp_path / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "labels"), *rows])
    config = photo_config(tmp_path, 30, data={"source": f"table:{tmp_path}/table.csv", "workers": 0})
    config = override(config, ["optim.lr=1e-2", "augment.crop=none", "evaluate_every=10 steps"])
    result = train_run(config, tmp_path / "run")
    assert result.scores is not None
    assert result.scores.mean_average_precision > 0.9
    assert all("map" in line["evaluation"] for line in logged_metrics(tmp_path / "run") if "evaluation" in line)
    predictions = vitrail.load(tmp_path / "run").predict(Image.new("RGB", (16, 16), (220, 220, 30)), top=3)
    assert {prediction.label for prediction in predictions if prediction.score > 0.5} == {"red", "green"}
    auto_result = train_run(override(config, ["batch_size=auto", "duration=2 steps"]), tmp_path / "auto")
    assert auto_result.setup.config.batch_size in (1, 2, 4)


def test_auto_batch_size_is_found_and_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    result = train_run(digits_config(batch_size="auto", grad_accum_steps=2, duration="3 steps"), tmp_path / "run")
    batch_size = RunFolder(tmp_path / "run").read_config().batch_size
    assert isinstance(batch_size, int)
    assert 16 <= batch_size <= 1438 // 8
    assert batch_size & (batch_size - 1) == 0
    assert f"using batch_size={batch_size}" in caplog.text
    assert {line["images"] for line in logged_metrics(tmp_path / "run")} == {3 * batch_size}
    assert result.setup.config.batch_size == batch_size


def train_in_process(config: dict[str, Any], folder: str, resume: bool = False) -> Any:
    """Train in one process of a group; returns its batch size."""
    result = fit(TrainConfig.from_dict(config), RunFolder(Path(folder)), resume=resume)
    return result.setup.config.batch_size


def test_all_processes_agree_on_the_auto_batch_size(two_processes: Processes, tmp_path: Path):
    config = digits_config(batch_size="auto", duration="2 steps").to_dict()
    first, second = two_processes.run(train_in_process, config, str(tmp_path / "run"))
    assert first == second == RunFolder(tmp_path / "run").read_config().batch_size
    with pytest.raises(ConfigError, match="batch_size=63 cannot be divided evenly among 2 processes with 1 parts each"):
        Trainer(
            prepare_run(digits_config(batch_size=63), SINGLE_PROCESS), DistributedContext(torch.device("cpu"), 0, 2)
        )


def test_tensorboard_has_each_step_once(tmp_path: Path):
    board = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def raise_interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with at_step(11, raise_interrupt), pytest.raises(KeyboardInterrupt):  # after a logged step that was not saved
        train_run(digits_config(12, trackers=("tensorboard",), evaluate_every=None), tmp_path / "run")
    resume_run(tmp_path / "run")
    events = board.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    logged = [(line["step"], line["loss"]) for line in logged_metrics(tmp_path / "run") if "loss" in line]
    assert [step for step, _ in logged] == [3, 6, 9, 12]
    board_losses = [(e.step, e.value) for e in events.Scalars("training/loss")]
    assert board_losses == [(step, pytest.approx(loss)) for step, loss in logged]


@pytest.mark.slow
def test_compiled_run_has_the_same_losses(tmp_path: Path):
    config = override(digits_config(6, log_every="1 step", evaluate_every="3 steps"), ["model.depth=1"])
    plain = first_losses(config, tmp_path / "plain")
    compiled = first_losses(config, tmp_path / "compiled", "compile=true")
    assert compiled == pytest.approx(plain, rel=1e-3)


def test_epoch_shows_each_labeled_image_once(tmp_path: Path):
    make_photos(tmp_path, {"red": 20, "green": 20})
    names = [(f"{c}/{i:03d}.jpg", c if i % 2 else "", "train") for c in ("red", "green") for i in range(20)]
    names += [(f"{c}/{i:03d}.jpg", c, "val") for c in ("red", "green") for i in range(4)]
    with (tmp_path / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label", "split"), *names])
    config = photo_config(tmp_path, data={"source": f"table:{tmp_path}/table.csv", "workers": 0})
    config = override(config, ["duration=2 epochs", "batch_size=5"])
    trainer = Trainer(prepare_run(config, SINGLE_PROCESS), SINGLE_PROCESS)
    assert (trainer.num_images, trainer.total_steps) == (20, 8)
    with trainer.training_loader(Progress()) as batches:
        seen = torch.cat([batch.indices for batch in batches])
    assert torch.bincount(seen).unique().tolist() == [0, 2]
    unlabeled_config = override(config, ["objective=masked-patch"])
    assert Trainer(prepare_run(unlabeled_config, SINGLE_PROCESS), SINGLE_PROCESS).num_images == 40


@pytest.fixture(scope="module")
def teacher(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / "run"
    with one_thread():
        train_run(override(photo_config(images, 30), ["optim.lr=5e-3", "augment.crop=none"]), folder)
    return folder


@pytest.mark.parametrize(("kind", "distilled"), [("hard", True), ("soft", False)])
def test_distillation_run_trains_resumes_and_loads(
    teacher: Path, images: Path, tmp_path: Path, kind: str, distilled: bool
):
    settings = ["objective=distill", f"distill.teacher={teacher}", f"distill.kind={kind}"]
    config = override(photo_config(images, 8), [*settings, f"model.distilled={distilled}"])
    train_run(config, tmp_path / "uninterrupted")
    interrupt_run(config, tmp_path / "interrupted", 5)
    resume_run(tmp_path / "interrupted")
    assert identical_weights(tmp_path / "uninterrupted", tmp_path / "interrupted")
    assert logged_metrics(tmp_path / "uninterrupted") == logged_metrics(tmp_path / "interrupted")
    assert "agreed" in logged_metrics(tmp_path / "uninterrupted")[0]
    assert vitrail.load(tmp_path / "uninterrupted").predict(images / "red" / "000.jpg")[0].label in (
        "red",
        "green",
        "blue",
    )


def test_teacher_with_other_classes_is_refused(images: Path, tmp_path: Path):
    model(small(num_classes=7)).save(tmp_path / "other")
    config = override(photo_config(images), ["objective=distill", f"distill.teacher={tmp_path}/other"])
    with pytest.raises(ConfigError, match=r"the teacher .* has 7 classes, but the data has 3"):
        train_run(config, tmp_path / "run")


# Starting from a checkpoint


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model of three color classes with its own family and origin."""
    path = tmp_path_factory.mktemp("start") / "model"
    initial = model(
        small(num_classes=3, image_size=16), labels=("blue", "green", "red"), family="DeiT", origin="a test"
    )
    initial.save(path)
    return path


def test_head_is_kept_for_the_same_classes_and_reset_for_others(start: Path, images: Path, tmp_path: Path):
    config = photo_config(images, init_from=str(start), model=None, preprocess=None)
    same = prepare_run(config, SINGLE_PROCESS)
    assert torch.equal(same.net.head.weight, vitrail.load(start).net.head.weight)
    renamed = make_photos(tmp_path / "renamed", {"red": 4, "green": 4, "azure": 4})
    changed = prepare_run(config.replace(data={"source": str(renamed)}), SINGLE_PROCESS)
    assert changed.info.labels == ("azure", "green", "red")
    assert not changed.net.head.weight.any()
    assert torch.equal(changed.net.blocks[0].mlp.up.weight, vitrail.load(start).net.blocks[0].mlp.up.weight)
    assert changed.info.origin == "fine-tuned from a test"


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of mapped files")
def test_weights_are_not_mapped_from_the_initial_checkpoint(start: Path, images: Path, tmp_path: Path):
    """Otherwise overwriting the file would change frozen weights, and truncating it would crash the run."""
    path = tmp_path / "start.safetensors"
    vitrail.load(start).save(path)
    setup = prepare_run(photo_config(images, init_from=str(path), model=None, preprocess=None), SINGLE_PROCESS)
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert torch.equal(setup.net.head.weight, vitrail.load(start).net.head.weight)


def test_run_killed_before_its_first_checkpoint_still_uses_init_from(start: Path, images: Path, tmp_path: Path):
    """A resumed run keeps its origin and no longer needs the initial checkpoint."""
    config = photo_config(images, init_from=str(start), model=None, preprocess=None)
    train_run(config, tmp_path / "uninterrupted")
    RunFolder(tmp_path / "early").create(prepare_run(config, SINGLE_PROCESS).config)
    resume_run(tmp_path / "early")
    assert identical_weights(tmp_path / "early", tmp_path / "uninterrupted")
    interrupt_run(config, tmp_path / "late", 3)
    settings = json.loads((tmp_path / "late" / "config.json").read_text())
    (tmp_path / "late" / "config.json").write_text(json.dumps(settings | {"init_from": str(tmp_path / "gone")}))
    resume_run(tmp_path / "late")
    assert identical_weights(tmp_path / "late", tmp_path / "uninterrupted")
    infos = [json.loads((tmp_path / name / "model" / "config.json").read_text()) for name in ("uninterrupted", "late")]
    assert infos[0] == infos[1]
    assert (infos[0]["family"], infos[0]["origin"]) == ("DeiT", "fine-tuned from a test")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.depth=3"], r"model.depth=3, but the checkpoint has 2.*drop_path can be changed"),
        (["image_size=30"], r"30"),
        (["optim.trainable=5"], r"trainable=5 blocks, but the network has 2"),
    ],
)
def test_settings_that_contradict_the_checkpoint_are_refused(
    start: Path, images: Path, settings: list[str], message: str
):
    config = photo_config(images, init_from=str(start), preprocess=None, model=vitrail.load(start).config)
    with pytest.raises(ConfigError, match=message):
        Trainer(prepare_run(override(config, settings), SINGLE_PROCESS), SINGLE_PROCESS)


def test_drop_path_and_image_size_of_a_checkpoint_can_change(start: Path, images: Path):
    config = photo_config(images, init_from=str(start), preprocess=None, model=vitrail.load(start).config)
    setup = prepare_run(override(config, ["model.drop_path=0.2", "image_size=24"]), SINGLE_PROCESS)
    assert (setup.net.config.drop_path, setup.net.config.image_size) == (0.2, (24, 24))
    assert setup.info.preprocess.image_size == (24, 24)


# Invalid settings


@pytest.mark.parametrize(
    ("settings", "error", "message"),
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
def test_invalid_settings_are_refused(tmp_path: Path, settings: list[str], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        train_run(override(digits_config(), settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_data_with_one_class_are_refused(tmp_path: Path):
    make_photos(tmp_path / "photos", {"cat": 8})
    with pytest.raises(DataError, match="has only one class, 'cat'"):
        train_run(photo_config(tmp_path / "photos"), tmp_path / "run")


# Streams


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four training shards of 40 images, and one for validation."""
    folder = tmp_path_factory.mktemp("shards")
    (folder / "classes.json").write_text('["dark", "light"]')
    for name in ("train-000", "train-001", "train-002", "train-003", "val-000"):
        members = []
        for i in range(40):
            shade = np.random.default_rng([i, *name.encode()]).integers(0, 120, (16, 16, 3)) + 130 * (i % 2)
            image = encoded(Image.fromarray(shade.astype(np.uint8)), "PNG")
            members += [(f"{name}-{i:03d}.png", image), (f"{name}-{i:03d}.cls", b"%d" % (i % 2))]
        (folder / f"{name}.tar").write_bytes(tar_bytes(members))
    return folder


def stream_config(shards: Path, **changes: Any) -> TrainConfig:
    settings = {"data": {"source": f"stream:{shards}", "workers": 0}, "evaluate_every": "4 steps"}
    return photo_config(shards, 12, **settings | changes)


def test_stream_run_resumes_at_its_position(shards: Path, tmp_path: Path):
    uninterrupted = train_run(stream_config(shards), tmp_path / "uninterrupted")
    assert uninterrupted.scores is not None
    assert uninterrupted.scores.count == 40
    for step in (3, 8):
        interrupt_run(stream_config(shards), tmp_path / f"interrupted-{step}", step)
        resume_run(tmp_path / f"interrupted-{step}")
        assert identical_weights(tmp_path / f"interrupted-{step}", tmp_path / "uninterrupted")
        assert logged_metrics(tmp_path / f"interrupted-{step}") == logged_metrics(tmp_path / "uninterrupted")
    assert all("epoch" not in line for line in logged_metrics(tmp_path / "uninterrupted"))


@pytest.mark.parametrize("name", ["duration", "evaluate_every", "checkpoint_every", "log_every"])
def test_stream_has_no_epochs(shards: Path, tmp_path: Path, name: str):
    with pytest.raises(
        ConfigError, match=rf"{name}=1 epoch cannot be converted to steps: .* give it in steps or images"
    ):
        train_run(stream_config(shards, **{name: "1 epoch"}), tmp_path / "run")


def test_stream_resumes_only_on_the_same_number_of_processes(two_processes: Processes, shards: Path, tmp_path: Path):
    config = stream_config(shards)
    assert two_processes.run(train_until_interrupted, config.to_dict(), str(tmp_path / "interrupted")) == [5, 5]
    assert two_processes.run(train_in_process, config.to_dict(), str(tmp_path / "uninterrupted")) == [8, 8]
    with pytest.raises(TrainError, match=r"only on as many processes as before, 2, and there are 1; shards:"):
        resume_run(tmp_path / "interrupted")
    two_processes.run(train_in_process, config.to_dict(), str(tmp_path / "interrupted"), True)
    assert identical_weights(tmp_path / "interrupted", tmp_path / "uninterrupted")


def train_until_interrupted(config: dict[str, Any], folder: str) -> int:
    with at_step(5, send_sigterm):
        return fit(TrainConfig.from_dict(config), RunFolder(Path(folder))).progress.step


def test_non_finite_loss_of_a_stream_names_its_samples(shards: Path, tmp_path: Path):
    with pytest.raises(TrainError, match=r"the loss of step \d+ is not finite; its images were number \d+ of the"):
        train_run(
            override(stream_config(shards), ["optim.lr=1e30", "optim.kind=sgd", "optim.grad_clip=none"]),
            tmp_path / "run",
        )


def test_photos_are_evaluated_on_held_out_images(images: Path):
    """The tests in this file rely on it."""
    assert open_data(photo_config(images).data).eval_split == "held out"
