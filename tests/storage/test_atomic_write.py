"""Files and folders appear atomically, under the right names, or not at all."""

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
from pathlib import Path

import pytest

from vitrail.errors import CheckpointError, ConversionError
from vitrail.storage import atomic_write
from vitrail.storage.atomic_write import (
    atomic_file,
    fsync_tree,
    new_file,
    new_folder,
    rename_synced,
    write_json,
    write_text,
)


def test_a_file_appears_only_when_complete(tmp_path: Path):
    path = tmp_path / "x.bin"
    path.write_bytes(b"old")
    with atomic_file(path) as temporary:
        assert temporary.parent == tmp_path
        assert temporary.name.startswith(".x.bin.")
        temporary.write_bytes(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["x.bin"]


def test_the_temporary_file_can_be_in_another_folder(tmp_path: Path):
    (tmp_path / "parts").mkdir()
    for context in (atomic_file, lambda path, folder: new_file(path, overwrite=True, folder=folder)):
        with context(tmp_path / "x", folder=tmp_path / "parts") as temporary:
            assert temporary.parent == tmp_path / "parts"
            temporary.write_text("whole")
        assert (tmp_path / "x").read_text() == "whole"
        assert os.listdir(tmp_path / "parts") == []


def test_writers_of_the_same_file_have_temporary_files_of_their_own(tmp_path: Path):
    with atomic_file(tmp_path / "x") as first, atomic_file(tmp_path / "x") as second:
        assert first != second
        first.write_text("outer")
        second.write_text("inner")
    assert (tmp_path / "x").read_text() == "outer"  # renamed last


def test_an_existing_file_is_never_opened_as_the_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(atomic_write.secrets, "token_hex", lambda count: "00")
    (tmp_path / ".x.00.tmp").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError), atomic_file(tmp_path / "x"):
        pytest.fail("the block must not run")
    assert not (tmp_path / "elsewhere").exists()


def write_and_raise(error: BaseException, path: Path) -> None:
    path.write_text("half")
    raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), ValueError(), OSError(errno.ENOSPC, "full")])
def test_any_failure_removes_the_temporary_file_and_is_raised_unchanged(tmp_path: Path, error: BaseException):
    (tmp_path / "x").write_text("old")
    with pytest.raises(type(error)) as caught, atomic_file(tmp_path / "x") as temporary:
        write_and_raise(error, temporary)
    assert caught.value is error
    assert os.listdir(tmp_path) == ["x"]
    assert (tmp_path / "x").read_text() == "old"


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failure_after_the_block_removes_the_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
):
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match="Input/output error"), atomic_file(tmp_path / "x") as temporary:
        temporary.write_text("whole")
    assert os.listdir(tmp_path) == []


def test_a_file_that_appears_meanwhile_is_kept_without_overwrite(tmp_path: Path):
    with pytest.raises(FileExistsError), atomic_file(tmp_path / "x", overwrite=False):
        (tmp_path / "x").write_text("theirs")
    with pytest.raises(CheckpointError, match=r"could not write .*y: File exists"), new_file(tmp_path / "y"):
        (tmp_path / "y").write_text("theirs")
    assert (tmp_path / "x").read_text() == (tmp_path / "y").read_text() == "theirs"
    assert sorted(os.listdir(tmp_path)) == ["x", "y"]


def test_a_missing_folder_is_an_error_of_the_operating_system_or_one_sentence(tmp_path: Path):
    with pytest.raises(FileNotFoundError), atomic_file(tmp_path / "gone" / "x"):
        pytest.fail("the block must not run")
    with pytest.raises(CheckpointError, match="gone does not exist"), new_file(tmp_path / "gone" / "x"):
        pytest.fail("the block must not run")


def test_file_mode_follows_the_umask(tmp_path: Path):
    old = os.umask(0o027)
    try:
        write_text(tmp_path / "x", "text")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files and folders that are flushed to disk, and of those that are renamed, in order."""
    names: list[str] = []
    fsync, replace = atomic_write.fsync, os.replace

    def record_fsync(path: Path) -> None:
        names.append(path.name)
        fsync(path)

    def record_replace(source: Path, target: Path) -> None:
        names.append(f"{source.name} -> {target.name}")
        replace(source, target)

    monkeypatch.setattr(atomic_write, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    return names


def test_a_rename_is_between_two_flushes(tmp_path: Path, flushed: list[str]):
    (tmp_path / "a").write_text("new")
    (tmp_path / "b").write_text("old")
    rename_synced(tmp_path / "a", tmp_path / "b")
    assert flushed == ["a", "a -> b", tmp_path.name]
    assert (tmp_path / "b").read_text() == "new"


def test_a_tree_is_flushed_from_its_files_to_its_folder(tmp_path: Path, flushed: list[str]):
    (tmp_path / "tree" / "sub").mkdir(parents=True)
    (tmp_path / "tree" / "sub" / "x").touch()
    (tmp_path / "tree" / "y").touch()
    fsync_tree(tmp_path / "tree")
    assert flushed == ["sub", "x", "y", "tree"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_flush_folders_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
):
    fsync = os.fsync

    def refuse_folders(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    with atomic_file(tmp_path / "x") as temporary:
        temporary.write_text("whole")
    assert (tmp_path / "x").read_text() == "whole"


def test_json_is_indented_utf8_and_refuses_nan(tmp_path: Path):
    write_json(tmp_path / "x.json", {"name": "vitré"})
    assert (tmp_path / "x.json").read_text(encoding="utf-8") == '{\n  "name": "vitré"\n}\n'
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "nan.json", float("nan"))
    assert not (tmp_path / "nan.json").exists()


def fill(folder: Path, text: str = "new") -> None:
    (folder / "config.json").write_text(text)
    (folder / "model.safetensors").write_bytes(b"weights")


def fill_and_raise(error: BaseException, folder: Path) -> None:
    fill(folder)
    raise error


def test_folder_appears_only_when_complete(tmp_path: Path):
    out = tmp_path / "out"
    with new_folder(out) as folder:
        fill(folder)
        assert folder.parent == tmp_path
        assert not out.exists()
    assert sorted(os.listdir(out)) == ["config.json", "model.safetensors"]
    assert os.listdir(tmp_path) == ["out"]


def test_existing_folder_is_kept_unless_empty_or_with_overwrite(tmp_path: Path):
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


@pytest.mark.parametrize("other_file", ["cat.jpg", "photos/"])
def test_folder_with_other_files_is_not_replaced(tmp_path: Path, other_file: str):
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    (out / other_file).mkdir() if other_file.endswith("/") else (out / other_file).write_text("dear")
    with pytest.raises(CheckpointError, match=other_file.strip("/")), new_folder(out, overwrite=True):
        pytest.fail("the block must not run")
    assert len(os.listdir(out)) == 2


def test_file_or_symlink_at_the_folders_path_is_kept(tmp_path: Path):
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
        fill_and_raise(error("stop"), folder)
    assert os.listdir(tmp_path) == (["out"] if overwrite else [])
    assert not overwrite or (out / "config.json").read_text() == "old"


def test_errors_inside_a_new_folder_give_its_final_path(tmp_path: Path):
    out = tmp_path / "out"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for write in (lambda path: write_text(path, "x" * 2_000_000), lambda path: path.write_bytes(bytes(2_000_000))):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            with pytest.raises(CheckpointError, match="full") as caught, new_folder(out) as folder:
                write(folder / "model.npz")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert f"could not write {out}" in str(caught.value)
        assert ".tmp" not in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_unrelated_error_in_the_block_propagates_unchanged(tmp_path: Path):
    with pytest.raises(FileNotFoundError), new_folder(tmp_path / "out"):
        (tmp_path / "elsewhere").read_bytes()
    assert os.listdir(tmp_path) == []


def test_failed_swap_restores_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out, replace = tmp_path / "out", os.replace
    with new_folder(out) as folder:
        fill(folder, "old")

    def fail_second_replace(source: Path, target: Path) -> None:
        if str(source).endswith(".tmp"):
            raise OSError(errno.EIO, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail_second_replace)
    with pytest.raises(CheckpointError, match="Input/output error"), new_folder(out, overwrite=True) as folder:
        (folder / "config.json").write_text("new")
    assert (out / "config.json").read_text() == "old"
    assert os.listdir(tmp_path) == ["out"]


def test_removed_parent_folder_is_a_one_sentence_error(tmp_path: Path):
    with pytest.raises(CheckpointError, match="does not exist"), new_folder(tmp_path / "gone" / "out"):
        pytest.fail("the block must not run")
    (tmp_path / "parent").mkdir()
    with pytest.raises(CheckpointError, match="does not exist or was removed"), new_folder(tmp_path / "parent" / "out"):
        shutil.rmtree(tmp_path / "parent")


def test_killed_writer_leaves_the_old_file_intact(tmp_path: Path):
    """SIGKILL in the middle of a write."""
    path = tmp_path / "x.json"
    write_json(path, "old")
    code = (
        "import pathlib, time, vitrail.storage.atomic_write as w\n"
        f"with w.new_file(pathlib.Path({str(path)!r}), True) as t:\n"
        "    t.write_text('half'); print('writing', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGKILL)
    assert json.loads(path.read_text()) == "old"


def test_a_folder_that_appears_meanwhile_is_kept_without_overwrite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Even between the check and the rename."""
    out, theirs = tmp_path / "out", tmp_path / "theirs"
    theirs.mkdir()
    fill(theirs, "theirs")
    monkeypatch.setattr(atomic_write, "_check_folder", lambda path, overwrite: None)
    with pytest.raises(CheckpointError, match="not empty"), new_folder(out):
        shutil.copytree(theirs, out)
    assert (out / "config.json").read_text() == "theirs"
    assert sorted(os.listdir(tmp_path)) == ["out", "theirs"]
