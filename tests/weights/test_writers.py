"""Nothing half-written is ever seen, and what is written is what was given."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from vitrail.errors import CheckpointError, ConversionError
from vitrail.weights.writers import new_folder, write_json, write_npz, write_safetensors, write_torch

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b/c": torch.ones(4, dtype=torch.float16), "file": torch.tensor(3)}
BIG = {"a": torch.zeros(500_000)}
WRITERS: dict[str, Callable[..., object]] = {
    "model.safetensors": lambda path, **k: write_safetensors(path, BIG, **k),
    "model.pth": lambda path, **k: write_torch(path, BIG, **k),
    "model.npz": lambda path, **k: write_npz(path, BIG, **k),
    "config.json": lambda path, **k: write_json(path, {"a": "x" * 2_000_000}, **k),
}
every_writer = pytest.mark.parametrize("name", WRITERS)


def same(ours: dict, theirs: dict) -> bool:
    return list(ours) == list(theirs) and all(
        ours[n].dtype == theirs[n].dtype and torch.equal(ours[n], theirs[n]) for n in ours
    )


def test_safetensors_come_back_with_their_metadata(tmp_path: Path):
    write_safetensors(tmp_path / "x.safetensors", TENSORS, {"format": "pt"})
    assert same(TENSORS, dict(sorted(load_file(tmp_path / "x.safetensors").items())))
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_equal_tensors_and_metadata_are_equal_files(tmp_path: Path):
    """Whatever there is to escape in them."""
    metadata = {"format": "pt", "vitrail": 'chêne "🙂" \\ / \b\f\t\r\x01\x1f\x7f\u2028', "a\n": json.dumps(["é"])}
    files = set()
    for i in range(8):
        write_safetensors(tmp_path / f"{i}.safetensors", TENSORS, metadata)
        files.add((tmp_path / f"{i}.safetensors").read_bytes())
    assert len(files) == 1
    assert same(TENSORS, dict(sorted(load_file(tmp_path / "0.safetensors").items())))
    with safe_open(tmp_path / "0.safetensors", framework="pt") as file:
        assert file.metadata() == metadata


def test_torch_files_come_back(tmp_path: Path):
    write_torch(tmp_path / "x.pth", TENSORS)
    assert same(TENSORS, torch.load(tmp_path / "x.pth", weights_only=True))


@pytest.mark.parametrize("write", [write_safetensors, write_torch])
def test_views_and_shared_tensors_are_written_each_by_itself(tmp_path: Path, write: Callable[..., None]):
    base = torch.arange(1000.0).view(10, 100)
    tensors = {"row": base[3], "whole": base, "again": base, "turned": base.T}
    tensors["learned"] = torch.nn.Parameter(base[0])
    write(tmp_path / "x", tensors)
    read = torch.load(tmp_path / "x", weights_only=True) if write is write_torch else load_file(tmp_path / "x")
    assert same({n: t.detach().contiguous() for n, t in tensors.items()}, {n: read[n] for n in tensors})
    written = sum(t.nbytes for t in tensors.values())
    assert (tmp_path / "x").stat().st_size < written + 4000  # a row does not drag the whole along


def test_npz_needs_no_pickle_and_keeps_types(tmp_path: Path):
    assert write_npz(tmp_path / "x.npz", {**TENSORS, "n": np.arange(3, dtype=np.float64)}) == []
    with np.load(tmp_path / "x.npz", allow_pickle=False) as read:
        assert set(read.files) == {"a", "b/c", "file", "n"}
        assert [read[n].dtype for n in ("a", "b/c", "file", "n")] == [np.float32, np.float16, np.int64, np.float64]
        assert np.array_equal(read["a"], TENSORS["a"].numpy())


def test_npz_says_that_bfloat16_became_float32(tmp_path: Path):
    value = torch.tensor([1.0, 3.140625, -2e38], dtype=torch.bfloat16)
    (note,) = write_npz(tmp_path / "x.npz", {"a": value, "b": torch.ones(1)})
    assert "bfloat16" in note
    assert "1 of 2" in note
    with np.load(tmp_path / "x.npz") as read:
        assert read["a"].dtype == np.float32
        assert np.array_equal(read["a"], value.float().numpy())


def test_the_same_weights_give_the_same_npz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_npz(tmp_path / "1.npz", TENSORS)
    monkeypatch.setattr(time, "time", lambda: 2e9)
    write_npz(tmp_path / "2.npz", TENSORS)
    assert (tmp_path / "1.npz").read_bytes() == (tmp_path / "2.npz").read_bytes()


def test_json_is_for_people_and_any_reader(tmp_path: Path):
    write_json(tmp_path / "x.json", {"name": "vitré"})
    assert (tmp_path / "x.json").read_text(encoding="utf-8") == '{\n  "name": "vitré"\n}\n'
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "nan.json", float("nan"))
    assert not (tmp_path / "nan.json").exists()


@every_writer
def test_files_have_the_mode_that_the_umask_gives(tmp_path: Path, name: str):
    old = os.umask(0o027)
    try:
        WRITERS[name](tmp_path / name)
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640


@every_writer
def test_an_existing_file_is_kept_unless_told_otherwise(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(b"old")
    with pytest.raises(CheckpointError, match="exists already"):
        WRITERS[name](tmp_path / name)
    assert (tmp_path / name).read_bytes() == b"old"
    WRITERS[name](tmp_path / name, overwrite=True)
    assert (tmp_path / name).stat().st_size > 3
    assert os.listdir(tmp_path) == [name]


@every_writer
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, name: str, overwrite: bool):
    if overwrite:
        (tmp_path / name).write_bytes(b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # Python ignores the signal: the write fails
    try:
        with pytest.raises(CheckpointError, match=r"is full \(\d+ MiB free\)") as caught:
            WRITERS[name](tmp_path / name, overwrite=overwrite)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(tmp_path / name) in str(caught.value)
    assert os.listdir(tmp_path) == ([name] if overwrite else [])
    assert not overwrite or (tmp_path / name).read_bytes() == b"old"


@every_writer
def test_a_disk_that_fills_while_flushing_leaves_nothing(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="full"):
        WRITERS[name](tmp_path / name)
    assert os.listdir(tmp_path) == []


@every_writer
def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    flushed, fsync = [], os.fsync

    def watch(handle: int) -> None:
        flushed.append((os.fstat(handle).st_size, (tmp_path / name).exists()))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", watch)
    WRITERS[name](tmp_path / name)
    assert flushed[0] == ((tmp_path / name).stat().st_size, False)
    assert flushed[1][1]  # then the folder, so that the name lasts too


@every_writer
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    def forbidden(*_: object, **__: object) -> int:
        raise PermissionError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", forbidden)
        with pytest.raises(CheckpointError, match="no permission to write"):
            WRITERS[name](tmp_path / name)
    with pytest.raises(CheckpointError, match="does not exist"):
        WRITERS[name](tmp_path / "gone" / name)
    with pytest.raises(CheckpointError, match="is a folder"):
        WRITERS[name](tmp_path, overwrite=True)


def fill(folder: Path, text: str = "new") -> None:
    (folder / "config.json").write_text(text)
    write_safetensors(folder / "model.safetensors", TENSORS)


def fill_and(error: BaseException, folder: Path) -> None:
    fill(folder)
    raise error


def test_a_folder_appears_when_it_is_complete(tmp_path: Path):
    out = tmp_path / "out"
    with new_folder(out) as folder:
        fill(folder)
        assert folder.parent == tmp_path
        assert not out.exists()
    assert sorted(os.listdir(out)) == ["config.json", "model.safetensors"]
    assert os.listdir(tmp_path) == ["out"]


def test_an_existing_folder_is_kept_unless_empty_or_told_otherwise(tmp_path: Path):
    out = tmp_path / "out"
    out.mkdir()
    with new_folder(out) as folder:
        fill(folder, "first")
    with pytest.raises(CheckpointError, match="not empty"), new_folder(out):
        pytest.fail("the block must not run")
    with new_folder(out, overwrite=True) as folder:
        (folder / "config.json").write_text("second")
        assert (out / "config.json").read_text() == "first"  # until the new one is complete
    assert os.listdir(out) == ["config.json"]
    assert (out / "config.json").read_text() == "second"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("stranger", ["cat.jpg", "photos/"])
def test_a_folder_with_other_things_is_never_replaced(tmp_path: Path, stranger: str):
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    (out / stranger).mkdir() if stranger.endswith("/") else (out / stranger).write_text("dear")
    with pytest.raises(CheckpointError, match=stranger.strip("/")), new_folder(out, overwrite=True):
        pytest.fail("the block must not run")
    assert len(os.listdir(out)) == 2


def test_a_file_or_a_link_in_the_place_of_the_folder_is_kept(tmp_path: Path):
    (tmp_path / "file").write_text("dear")
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for name in ("file", "link"):
        with pytest.raises(CheckpointError, match="not a folder"), new_folder(tmp_path / name, overwrite=True):
            pytest.fail("the block must not run")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError, ConversionError])
@pytest.mark.parametrize("overwrite", [False, True])
def test_any_failure_removes_the_new_folder_and_keeps_the_old(
    tmp_path: Path, error: type[BaseException], overwrite: bool
):
    out = tmp_path / "out"
    if overwrite:
        with new_folder(out) as folder:
            fill(folder, "old")
    with pytest.raises(error), new_folder(out, overwrite=overwrite) as folder:
        fill_and(error("stop"), folder)
    assert os.listdir(tmp_path) == (["out"] if overwrite else [])
    assert not overwrite or (out / "config.json").read_text() == "old"


def test_errors_inside_a_new_folder_speak_of_its_real_name(tmp_path: Path):
    out = tmp_path / "out"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for write in (lambda path: write_npz(path, BIG), lambda path: path.write_bytes(bytes(2_000_000))):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            with pytest.raises(CheckpointError, match="full") as caught, new_folder(out) as folder:
                write(folder / "model.npz")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert f"could not write {out}" in str(caught.value)
        assert ".tmp" not in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_an_error_of_the_block_that_is_no_writing_stays_itself(tmp_path: Path):
    with pytest.raises(FileNotFoundError), new_folder(tmp_path / "out"):
        (tmp_path / "elsewhere").read_bytes()
    assert os.listdir(tmp_path) == []


def test_a_swap_that_fails_half_way_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out, replace = tmp_path / "out", os.replace
    with new_folder(out) as folder:
        fill(folder, "old")

    def second_fails(source: Path, target: Path) -> None:
        if str(source).endswith(".tmp"):
            raise OSError(errno.EIO, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(os, "replace", second_fails)
    with pytest.raises(CheckpointError, match="Input/output error"), new_folder(out, overwrite=True) as folder:
        (folder / "config.json").write_text("new")
    assert (out / "config.json").read_text() == "old"
    assert os.listdir(tmp_path) == ["out"]


def test_a_parent_that_vanishes_is_one_sentence(tmp_path: Path):
    with pytest.raises(CheckpointError, match="does not exist"), new_folder(tmp_path / "gone" / "out"):
        pytest.fail("the block must not run")
    (tmp_path / "parent").mkdir()
    with pytest.raises(CheckpointError, match="does not exist or was removed"), new_folder(tmp_path / "parent" / "out"):
        shutil.rmtree(tmp_path / "parent")


def test_a_killed_writer_leaves_the_old_file_whole(tmp_path: Path):
    """A real kill, in the middle of a write that takes for ever."""
    path = tmp_path / "x.json"
    write_json(path, "old")
    code = (
        "import pathlib, time, vitrail.weights.writers as w\n"
        f"with w._new_file(pathlib.Path({str(path)!r}), True) as t:\n"
        "    t.write_text('half'); print('writing', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGKILL)
    assert json.loads(path.read_text()) == "old"
