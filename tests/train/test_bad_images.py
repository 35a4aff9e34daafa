"""Unreadable images in a run: named, counted, weighing nothing, or too many; never measured on unasked."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from train.processes import Processes
from train.small_runs import interrupted, on_photos, photos, resumed, saved_steps, trained

from vitrail.config import TrainConfig, override
from vitrail.errors import DataError
from vitrail.train.loop import fit
from vitrail.train.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("quick_disk")


def truncated(folder: Path, *names: str) -> None:
    for name in names:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 3])


@pytest.fixture(scope="module")
def album(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With parts of its own, so that the damage is where it is meant to be."""
    folder = tmp_path_factory.mktemp("album")
    photos(folder / "train", {"cat": 100, "dog": 100}, side=24)
    photos(folder / "val", {"cat": 10, "dog": 10}, side=24, seed=1)
    return folder


@pytest.mark.parametrize("resident", [True, False])
def test_one_bad_image_among_many_is_named_and_counts_nothing(
    album: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, resident: bool
):
    shutil.copytree(album, tmp_path / "album")
    truncated(tmp_path / "album" / "train", "cat/007.jpg")
    config = on_photos(tmp_path / "album", 25)
    config = override(config, [f"data.resident={resident}", "log_every=25 steps", "checkpoint_every=25 steps"])
    result = trained(config, tmp_path / "run")
    assert result.progress.step == 25  # an epoch: every image has come by
    assert "train/cat/007.jpg cannot be used" in caplog.text
    assert "1 image could not be read and had no weight in training" in caplog.text


def test_too_many_bad_images_stop_with_their_list(album: Path, tmp_path: Path):
    shutil.copytree(album, tmp_path / "album")
    truncated(tmp_path / "album" / "train", "cat/007.jpg", "dog/002.jpg", "dog/093.jpg")
    words = r"3 of 200 images .* cannot be read, more than data.max_bad_fraction=0.01"
    with pytest.raises(DataError, match=words) as caught:
        trained(override(on_photos(tmp_path / "album", 25), ["data.resident=true"]), tmp_path / "run")
    assert all(f"\n  train/{name}.jpg: " in str(caught.value) for name in ("cat/007", "dog/002", "dog/093"))
    config = override(on_photos(tmp_path / "album", 25), ["data.resident=false", "data.max_bad_fraction=0.02"])
    assert trained(config, tmp_path / "allowed").run.finished


def test_measuring_refuses_bad_images_unless_told(album: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    shutil.copytree(album, tmp_path / "album")
    truncated(tmp_path / "album" / "val", "cat/003.jpg")
    config = on_photos(tmp_path / "album")
    words = r"1 of 20 images .* cannot be read.*data.skip_bad=true.*\n +val/cat/003"
    with pytest.raises(DataError, match=words):
        trained(config, tmp_path / "run")
    result = trained(override(config, ["data.skip_bad=true"]), tmp_path / "skipping")
    assert result.scores is not None
    assert result.scores.count == 19
    assert "val/cat/003.jpg cannot be used" in caplog.text


def test_a_measurement_that_fails_costs_no_step(album: Path, tmp_path: Path):
    shutil.copytree(album, tmp_path / "album")
    truncated(tmp_path / "album" / "val", "cat/003.jpg")
    settings = ["data.resident=false", "evaluate_every=5 steps", "checkpoint_every=100 steps"]
    config = override(on_photos(tmp_path / "album", 8), settings)
    words = (
        r"(?s)cannot be read.*val/cat/003.*\nThe training state is saved; "
        r"resume from step 5 with: .* --resume --skip-bad --out "
    )
    with pytest.raises(DataError, match=words):
        trained(config, tmp_path / "run")
    assert saved_steps(tmp_path / "run") == [5]
    result = trained(override(config, ["data.skip_bad=true"]), tmp_path / "run", resume=True)
    assert (result.progress.step, result.scores.count) == (8, 19)


BAD = ("cat/007.jpg", "cat/050.jpg", "dog/002.jpg", "dog/093.jpg")


@pytest.fixture(scope="module")
def damaged(album: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four of two hundred training images are bad."""
    folder = tmp_path_factory.mktemp("damaged") / "album"
    shutil.copytree(album, folder)
    truncated(folder / "train", *BAD)
    return folder


def reading(folder: Path, *settings: str) -> TrainConfig:
    """An epoch and a half, every image read when it is needed."""
    usual = ["data.resident=false", "data.max_bad_fraction=0.02", "log_every=25 steps", "checkpoint_every=100 steps"]
    return override(on_photos(folder, 38), [*usual, *settings])


def test_the_list_goes_on_after_a_resume(damaged: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    stopped = interrupted(reading(damaged), tmp_path / "run", 12)
    assert 0 < len(stopped.unreadable_images) < 4
    result = resumed(tmp_path / "run")
    assert set(result.unreadable_images) == {f"train/{name}" for name in BAD}
    assert "4 images could not be read and had no weight in training" in caplog.text


def test_the_share_goes_on_after_a_resume(damaged: Path, tmp_path: Path):
    config = reading(damaged, "data.max_bad_fraction=0.015", "duration=25 steps")
    interrupted(config, tmp_path / "run", 12)
    with pytest.raises(DataError, match="4 of 200 images"):
        resumed(tmp_path / "run")


def train_here(config: dict[str, Any], folder: str) -> tuple[str, ...]:
    """In one of several processes: the images that could not be read, or the words of an error."""
    try:
        return tuple(sorted(fit(TrainConfig.from_dict(config), RunFolder(Path(folder))).unreadable_images))
    except DataError as error:
        return ("stopped", str(error))


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes(2) as started:
        yield started


def test_processes_count_their_bad_images_together(processes: Processes, damaged: Path, tmp_path: Path):
    found = processes.run(train_here, reading(damaged).to_dict(), str(tmp_path / "allowed"))
    assert found == [tuple(f"train/{name}" for name in BAD)] * 2
    config = reading(damaged, "data.max_bad_fraction=0.015")
    (one, words), other = processes.run(train_here, config.to_dict(), str(tmp_path / "too many"))
    assert (one, words) == other
    assert words.startswith("4 of 200 images")
    assert all(f"\n  train/{name}: " in words for name in BAD)


@pytest.mark.parametrize("resident", [True, False])
def test_processes_refuse_a_measurement_together(processes: Processes, album: Path, tmp_path: Path, resident: bool):
    shutil.copytree(album, tmp_path / "album")
    truncated(tmp_path / "album" / "val", "cat/003.jpg", "dog/003.jpg")
    config = reading(tmp_path / "album", f"data.resident={str(resident).lower()}", "evaluate_every=5 steps")
    (one, words), other = processes.run(train_here, config.to_dict(), str(tmp_path / "run"))
    assert (one, words) == other
    assert words.startswith("2 of 20 images")
    assert ("resume from step 5" in words) == (not resident)  # those that are kept are looked at before


def test_a_batch_of_bad_images_alone_is_no_catastrophe(tmp_path: Path):
    photos(tmp_path / "album" / "train", {"cat": 4, "dog": 4})
    photos(tmp_path / "album" / "val", {"cat": 2, "dog": 2}, seed=1)
    truncated(tmp_path / "album" / "train", *(f"{name}/{i:03d}.jpg" for name in ("cat", "dog") for i in range(3)))
    config = override(on_photos(tmp_path / "album", 12), ["batch_size=1", "data.max_bad_fraction=1"])
    assert trained(config, tmp_path / "run").scores is not None
