"""What a user may not read or write gets one sentence, for real and not by imitation."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from vitrail.errors import CheckpointError
from vitrail.weights.archive import open_archive
from vitrail.weights.writers import new_folder, write_json, write_safetensors

NOBODY = 65534


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that others may enter, which pytest's own are not."""
    folder = Path(tempfile.mkdtemp(prefix="vitrail-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def as_ordinary_user() -> Iterator[None]:
    """Root may do everything, so it steps down for a moment."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_file_that_may_not_be_read(place: Path):
    path = place / "model.safetensors"
    write_safetensors(path, {"a": torch.ones(1)})
    path.chmod(0)
    with as_ordinary_user(), pytest.raises(CheckpointError, match=f"no permission to read {path}"):
        open_archive(path)


def test_a_folder_that_may_not_be_listed(place: Path):
    (place / "repo").mkdir(mode=0)
    with as_ordinary_user(), pytest.raises(CheckpointError, match="no permission to read"):
        open_archive(place / "repo")
    (place / "repo").chmod(0o755)


def test_a_folder_that_may_not_be_written(place: Path):
    place.chmod(0o555)
    with as_ordinary_user():
        with pytest.raises(CheckpointError, match=f"no permission to write in {place}"):
            write_json(place / "x.json", 1)
        with pytest.raises(CheckpointError, match=f"no permission to write in {place}"), new_folder(place / "out"):
            pytest.fail("the block must not run")
    assert os.listdir(place) == []
    place.chmod(0o755)
