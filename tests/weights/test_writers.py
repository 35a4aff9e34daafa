"""Writers: files and folders appear atomically, and hold exactly the given values."""

from __future__ import annotations

import errno
import json
import os
import resource
import stat
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from vitrail.errors import CheckpointError
from vitrail.storage.atomic_write import write_json
from vitrail.weights.writers import write_npz, write_safetensors, write_torch

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b/c": torch.ones(4, dtype=torch.float16), "file": torch.tensor(3)}
BIG = {"a": torch.zeros(500_000)}
WRITERS: dict[str, Callable[..., object]] = {
    "model.safetensors": lambda path, **k: write_safetensors(path, BIG, **k),
    "model.pth": lambda path, **k: write_torch(path, BIG, **k),
    "model.npz": lambda path, **k: write_npz(path, BIG, **k),
    "config.json": lambda path, **k: write_json(path, {"a": "x" * 2_000_000}, **k),
}
every_writer = pytest.mark.parametrize("name", WRITERS)


def same_tensors(actual: dict, expected: dict) -> bool:
    return list(actual) == list(expected) and all(
        actual[n].dtype == expected[n].dtype and torch.equal(actual[n], expected[n]) for n in actual
    )


def test_safetensors_round_trip_with_metadata(tmp_path: Path):
    write_safetensors(tmp_path / "x.safetensors", TENSORS, {"format": "pt"})
    assert same_tensors(TENSORS, dict(sorted(load_file(tmp_path / "x.safetensors").items())))
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_equal_tensors_and_metadata_give_equal_files(tmp_path: Path):
    """With every kind of character that JSON escapes."""
    metadata = {"format": "pt", "vitrail": 'chêne "🙂" \\ / \b\f\t\r\x01\x1f\x7f\u2028', "a\n": json.dumps(["é"])}
    files = set()
    for i in range(8):
        write_safetensors(tmp_path / f"{i}.safetensors", TENSORS, metadata)
        files.add((tmp_path / f"{i}.safetensors").read_bytes())
    assert len(files) == 1
    assert same_tensors(TENSORS, dict(sorted(load_file(tmp_path / "0.safetensors").items())))
    with safe_open(tmp_path / "0.safetensors", framework="pt") as file:
        assert file.metadata() == metadata


def test_torch_files_round_trip(tmp_path: Path):
    write_torch(tmp_path / "x.pth", TENSORS)
    assert same_tensors(TENSORS, torch.load(tmp_path / "x.pth", weights_only=True))


@pytest.mark.parametrize("write", [write_safetensors, write_torch])
def test_views_and_shared_tensors_are_written_separately(tmp_path: Path, write: Callable[..., None]):
    base = torch.arange(1000.0).view(10, 100)
    tensors = {"row": base[3], "whole": base, "again": base, "turned": base.T}
    tensors["learned"] = torch.nn.Parameter(base[0])
    write(tmp_path / "x", tensors)
    loaded = torch.load(tmp_path / "x", weights_only=True) if write is write_torch else load_file(tmp_path / "x")
    assert same_tensors({n: t.detach().contiguous() for n, t in tensors.items()}, {n: loaded[n] for n in tensors})
    size = sum(t.nbytes for t in tensors.values())
    assert (tmp_path / "x").stat().st_size < size + 4000  # a row is stored without the rest of its storage


def test_npz_keeps_dtypes_and_needs_no_pickle(tmp_path: Path):
    assert write_npz(tmp_path / "x.npz", {**TENSORS, "n": np.arange(3, dtype=np.float64)}) == []
    with np.load(tmp_path / "x.npz", allow_pickle=False) as loaded:
        assert set(loaded.files) == {"a", "b/c", "file", "n"}
        assert [loaded[n].dtype for n in ("a", "b/c", "file", "n")] == [np.float32, np.float16, np.int64, np.float64]
        assert np.array_equal(loaded["a"], TENSORS["a"].numpy())


def test_npz_notes_that_bfloat16_became_float32(tmp_path: Path):
    value = torch.tensor([1.0, 3.140625, -2e38], dtype=torch.bfloat16)
    (note,) = write_npz(tmp_path / "x.npz", {"a": value, "b": torch.ones(1)})
    assert "bfloat16" in note
    assert "1 of 2" in note
    with np.load(tmp_path / "x.npz") as loaded:
        assert loaded["a"].dtype == np.float32
        assert np.array_equal(loaded["a"], value.float().numpy())


def test_equal_weights_give_equal_npz_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_npz(tmp_path / "1.npz", TENSORS)
    monkeypatch.setattr(time, "time", lambda: 2e9)
    write_npz(tmp_path / "2.npz", TENSORS)
    assert (tmp_path / "1.npz").read_bytes() == (tmp_path / "2.npz").read_bytes()


@every_writer
def test_file_mode_follows_the_umask(tmp_path: Path, name: str):
    old = os.umask(0o027)
    try:
        WRITERS[name](tmp_path / name)
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640


@every_writer
def test_existing_file_is_kept_without_overwrite(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(b"old")
    with pytest.raises(CheckpointError, match="already exists"):
        WRITERS[name](tmp_path / name)
    assert (tmp_path / name).read_bytes() == b"old"
    WRITERS[name](tmp_path / name, overwrite=True)
    assert (tmp_path / name).stat().st_size > 3
    assert os.listdir(tmp_path) == [name]


@every_writer
@pytest.mark.parametrize("overwrite", [False, True])
def test_full_disk_keeps_the_existing_file(tmp_path: Path, name: str, overwrite: bool):
    if overwrite:
        (tmp_path / name).write_bytes(b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # Python ignores SIGXFSZ, so the write fails
    try:
        with pytest.raises(CheckpointError, match=r"is full \(\d+ MiB free\)") as caught:
            WRITERS[name](tmp_path / name, overwrite=overwrite)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(tmp_path / name) in str(caught.value)
    assert os.listdir(tmp_path) == ([name] if overwrite else [])
    assert not overwrite or (tmp_path / name).read_bytes() == b"old"


@every_writer
def test_disk_full_at_fsync_leaves_no_file(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    def raise_no_space(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", raise_no_space)
    with pytest.raises(CheckpointError, match="full"):
        WRITERS[name](tmp_path / name)
    assert os.listdir(tmp_path) == []


@every_writer
def test_file_is_flushed_before_it_is_renamed(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    flushed, fsync = [], os.fsync

    def record_fsync(handle: int) -> None:
        flushed.append((os.fstat(handle).st_size, (tmp_path / name).exists()))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", record_fsync)
    WRITERS[name](tmp_path / name)
    assert flushed[0] == ((tmp_path / name).stat().st_size, False)
    assert flushed[1][1]  # then the folder is flushed, so that the new name persists


@every_writer
def test_unwritable_folder_is_an_error(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    def raise_read_only(*_: object, **__: object) -> int:
        raise PermissionError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", raise_read_only)
        with pytest.raises(CheckpointError, match="no permission to write"):
            WRITERS[name](tmp_path / name)
    with pytest.raises(CheckpointError, match="does not exist"):
        WRITERS[name](tmp_path / "gone" / name)
    with pytest.raises(CheckpointError, match="is a folder"):
        WRITERS[name](tmp_path, overwrite=True)
