"""Missing permissions raise one-sentence errors, tested with real file modes."""

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
from vitrail.storage.atomic_write import new_folder, write_json
from vitrail.weights.archive import open_archive
from vitrail.weights.writers import write_safetensors

NOBODY = 65534


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that other users can enter, unlike pytest's temporary folders."""
    folder = Path(tempfile.mkdtemp(prefix="vitrail-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def as_ordinary_user() -> Iterator[None]:
    """Drops root privileges inside the block, because file modes do not restrict root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_file_without_read_permission_is_an_error(shared_folder: Path):
    path = shared_folder / "model.safetensors"
    write_safetensors(path, {"a": torch.ones(1)})
    path.chmod(0)
    with as_ordinary_user(), pytest.raises(CheckpointError, match=f"no permission to read {path}"):
        open_archive(path)


def test_folder_without_read_permission_is_an_error(shared_folder: Path):
    (shared_folder / "repo").mkdir(mode=0)
    with as_ordinary_user(), pytest.raises(CheckpointError, match="no permission to read"):
        open_archive(shared_folder / "repo")
    (shared_folder / "repo").chmod(0o755)


def test_folder_without_write_permission_is_an_error(shared_folder: Path):
    shared_folder.chmod(0o555)
    with as_ordinary_user():
        with pytest.raises(CheckpointError, match=f"no permission to write in {shared_folder}"):
            write_json(shared_folder / "x.json", 1)
        with (
            pytest.raises(CheckpointError, match=f"no permission to write in {shared_folder}"),
            new_folder(shared_folder / "out"),
        ):
            pytest.fail("the block must not run")
    assert os.listdir(shared_folder) == []
    shared_folder.chmod(0o755)
