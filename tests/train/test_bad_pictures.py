"""Unreadable pictures in a run: named, counted, weighing nothing, or too many; never measured on unasked."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from train.small_runs import on_photos, photos, trained

from vitrail import runtime
from vitrail.config import override
from vitrail.errors import DataError


@pytest.fixture(autouse=True)
def _quick(quick_disk: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_said", set())


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
def test_one_bad_picture_among_many_is_named_and_counts_nothing(
    album: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, resident: bool
):
    shutil.copytree(album, tmp_path / "album")
    truncated(tmp_path / "album" / "train", "cat/007.jpg")
    config = on_photos(tmp_path / "album", 25)
    config = override(config, [f"data.resident={resident}", "log_every=25 steps", "checkpoint_every=25 steps"])
    result = trained(config, tmp_path / "run")
    assert result.progress.step == 25  # an epoch: every picture has come by
    assert "train/cat/007.jpg cannot be used" in caplog.text
    assert "1 picture could not be used and counted nothing" in caplog.text


def test_too_many_bad_pictures_stop_with_their_list(album: Path, tmp_path: Path):
    shutil.copytree(album, tmp_path / "album")
    truncated(tmp_path / "album" / "train", "cat/007.jpg", "dog/002.jpg", "dog/093.jpg")
    words = r"3 of 200 pictures .* cannot be used, more than data.bad_share=0.01"
    with pytest.raises(DataError, match=words) as caught:
        trained(override(on_photos(tmp_path / "album", 25), ["data.resident=true"]), tmp_path / "run")
    assert all(f"\n  train/{name}.jpg: " in str(caught.value) for name in ("cat/007", "dog/002", "dog/093"))
    config = override(on_photos(tmp_path / "album", 25), ["data.resident=false", "data.bad_share=0.02"])
    assert trained(config, tmp_path / "allowed").run.finished


def test_measuring_refuses_bad_pictures_unless_told(album: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    shutil.copytree(album, tmp_path / "album")
    truncated(tmp_path / "album" / "val", "cat/003.jpg")
    config = on_photos(tmp_path / "album")
    words = r"1 of 20 pictures .* cannot be measured on.*data.skip_bad=true.*\n +val/cat/003"
    with pytest.raises(DataError, match=words):
        trained(config, tmp_path / "run")
    result = trained(override(config, ["data.skip_bad=true"]), tmp_path / "skipping")
    assert result.scores is not None
    assert result.scores.count == 19
    assert "val/cat/003.jpg cannot be used" in caplog.text


def test_a_batch_of_bad_pictures_alone_is_no_catastrophe(tmp_path: Path):
    photos(tmp_path / "album" / "train", {"cat": 4, "dog": 4})
    photos(tmp_path / "album" / "val", {"cat": 2, "dog": 2}, seed=1)
    truncated(tmp_path / "album" / "train", *(f"{name}/{i:03d}.jpg" for name in ("cat", "dog") for i in range(3)))
    config = override(on_photos(tmp_path / "album", 12), ["batch=1", "data.bad_share=1"])
    assert trained(config, tmp_path / "run").scores is not None
