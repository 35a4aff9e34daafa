"""Unreadable images: reported, given weight zero and limited in number in training, refused in evaluation."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from training.processes import Processes
from training.small_runs import interrupt_run, make_photos, photo_config, resume_run, saved_steps, train_run

from vitrail.config import TrainConfig, override
from vitrail.errors import DataError
from vitrail.runs.run_folder import RunFolder
from vitrail.training.loop import fit

pytestmark = pytest.mark.usefixtures("quick_disk")


def truncate_files(folder: Path, *names: str) -> None:
    for name in names:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 3])


@pytest.fixture(scope="module")
def album(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos with explicit train and val splits, so that tests choose the split with damaged files."""
    folder = tmp_path_factory.mktemp("album")
    make_photos(folder / "train", {"cat": 100, "dog": 100}, side=24)
    make_photos(folder / "val", {"cat": 10, "dog": 10}, side=24, seed=1)
    return folder


@pytest.mark.parametrize("resident", [True, False])
def test_one_bad_image_is_reported_and_has_no_weight(
    album: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, resident: bool
):
    shutil.copytree(album, tmp_path / "album")
    truncate_files(tmp_path / "album" / "train", "cat/007.jpg")
    config = photo_config(tmp_path / "album", 25)
    config = override(config, [f"data.resident={resident}", "log_every=25 steps", "checkpoint_every=25 steps"])
    result = train_run(config, tmp_path / "run")
    assert result.progress.step == 25  # one epoch: every image was read
    assert "train/cat/007.jpg cannot be used" in caplog.text
    assert "1 image could not be read and had no weight in training" in caplog.text


def test_too_many_bad_images_stop_training_and_are_listed(album: Path, tmp_path: Path):
    shutil.copytree(album, tmp_path / "album")
    truncate_files(tmp_path / "album" / "train", "cat/007.jpg", "dog/002.jpg", "dog/093.jpg")
    pattern = r"3 of 200 images .* cannot be read, more than data.max_bad_fraction=0.01"
    with pytest.raises(DataError, match=pattern) as caught:
        train_run(override(photo_config(tmp_path / "album", 25), ["data.resident=true"]), tmp_path / "run")
    assert all(f"\n  train/{name}.jpg: " in str(caught.value) for name in ("cat/007", "dog/002", "dog/093"))
    config = override(photo_config(tmp_path / "album", 25), ["data.resident=false", "data.max_bad_fraction=0.02"])
    assert train_run(config, tmp_path / "allowed").run.finished


def test_evaluation_refuses_bad_images_unless_skip_bad_is_set(
    album: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    shutil.copytree(album, tmp_path / "album")
    truncate_files(tmp_path / "album" / "val", "cat/003.jpg")
    config = photo_config(tmp_path / "album")
    pattern = r"1 of 20 images .* cannot be read.*data.skip_bad=true.*\n +val/cat/003"
    with pytest.raises(DataError, match=pattern):
        train_run(config, tmp_path / "run")
    result = train_run(override(config, ["data.skip_bad=true"]), tmp_path / "skipping")
    assert result.scores is not None
    assert result.scores.count == 19
    assert "val/cat/003.jpg cannot be used" in caplog.text


def test_failed_evaluation_loses_no_step(album: Path, tmp_path: Path):
    shutil.copytree(album, tmp_path / "album")
    truncate_files(tmp_path / "album" / "val", "cat/003.jpg")
    settings = ["data.resident=false", "evaluate_every=5 steps", "checkpoint_every=100 steps"]
    config = override(photo_config(tmp_path / "album", 8), settings)
    pattern = (
        r"(?s)cannot be read.*val/cat/003.*\nThe training state is saved; "
        r"resume from step 5 with: .* --resume --skip-bad --out "
    )
    with pytest.raises(DataError, match=pattern):
        train_run(config, tmp_path / "run")
    assert saved_steps(tmp_path / "run") == [5]
    result = train_run(override(config, ["data.skip_bad=true"]), tmp_path / "run", resume=True)
    assert (result.progress.step, result.scores.count) == (8, 19)


BAD = ("cat/007.jpg", "cat/050.jpg", "dog/002.jpg", "dog/093.jpg")


@pytest.fixture(scope="module")
def damaged_album(album: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos of which 4 of 200 training images are damaged."""
    folder = tmp_path_factory.mktemp("damaged") / "album"
    shutil.copytree(album, folder)
    truncate_files(folder / "train", *BAD)
    return folder


def on_demand_config(folder: Path, *settings: str) -> TrainConfig:
    """Config of one and a half epochs in which images are read on demand."""
    defaults = ["data.resident=false", "data.max_bad_fraction=0.02", "log_every=25 steps", "checkpoint_every=100 steps"]
    return override(photo_config(folder, 38), [*defaults, *settings])


def test_list_of_bad_images_continues_after_resume(
    damaged_album: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    stopped = interrupt_run(on_demand_config(damaged_album), tmp_path / "run", 12)
    assert 0 < len(stopped.unreadable_images) < 4
    result = resume_run(tmp_path / "run")
    assert set(result.unreadable_images) == {f"train/{name}" for name in BAD}
    assert "4 images could not be read and had no weight in training" in caplog.text


def test_fraction_of_bad_images_continues_after_resume(damaged_album: Path, tmp_path: Path):
    config = on_demand_config(damaged_album, "data.max_bad_fraction=0.015", "duration=25 steps")
    interrupt_run(config, tmp_path / "run", 12)
    with pytest.raises(DataError, match="4 of 200 images"):
        resume_run(tmp_path / "run")


def train_in_process(config: dict[str, Any], folder: str) -> tuple[str, ...]:
    """Train in one process of a group; returns the unreadable images, or the error message."""
    try:
        return tuple(sorted(fit(TrainConfig.from_dict(config), RunFolder(Path(folder))).unreadable_images))
    except DataError as error:
        return ("stopped", str(error))


def test_bad_images_are_counted_over_all_processes(two_processes: Processes, damaged_album: Path, tmp_path: Path):
    results = two_processes.run(train_in_process, on_demand_config(damaged_album).to_dict(), str(tmp_path / "allowed"))
    assert results == [tuple(f"train/{name}" for name in BAD)] * 2
    config = on_demand_config(damaged_album, "data.max_bad_fraction=0.015")
    (status, message), other_rank = two_processes.run(train_in_process, config.to_dict(), str(tmp_path / "too many"))
    assert (status, message) == other_rank
    assert message.startswith("4 of 200 images")
    assert all(f"\n  train/{name}: " in message for name in BAD)


@pytest.mark.parametrize("resident", [True, False])
def test_all_processes_refuse_evaluation_with_the_same_message(
    two_processes: Processes, album: Path, tmp_path: Path, resident: bool
):
    shutil.copytree(album, tmp_path / "album")
    truncate_files(tmp_path / "album" / "val", "cat/003.jpg", "dog/003.jpg")
    config = on_demand_config(tmp_path / "album", f"data.resident={str(resident).lower()}", "evaluate_every=5 steps")
    (status, message), other_rank = two_processes.run(train_in_process, config.to_dict(), str(tmp_path / "run"))
    assert (status, message) == other_rank
    assert message.startswith("2 of 20 images")
    assert ("resume from step 5" in message) == (not resident)  # resident images are checked before training


def test_batch_of_only_bad_images_does_not_stop_training(tmp_path: Path):
    make_photos(tmp_path / "album" / "train", {"cat": 4, "dog": 4})
    make_photos(tmp_path / "album" / "val", {"cat": 2, "dog": 2}, seed=1)
    truncate_files(tmp_path / "album" / "train", *(f"{name}/{i:03d}.jpg" for name in ("cat", "dog") for i in range(3)))
    config = override(photo_config(tmp_path / "album", 12), ["batch_size=1", "data.max_bad_fraction=1"])
    assert train_run(config, tmp_path / "run").scores is not None
