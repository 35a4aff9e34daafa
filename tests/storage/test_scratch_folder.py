"""Temporary folders: deleted at the end, and by a later process after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vitrail.storage.scratch_folder import scratch_folder

SCRIPT = """
import sys, pathlib
from vitrail.storage.scratch_folder import scratch_folder
with scratch_folder(pathlib.Path(sys.argv[1])) as folder:
    (folder / "half").write_text("written")
    print("there", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def running_process(tmp_path: Path):
    """Another process with a temporary folder for the same file: (path, process)."""
    path = tmp_path / "model.onnx"
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    yield path, process
    process.kill()
    process.communicate()


def test_the_folder_is_deleted_at_the_end_and_after_errors(tmp_path):
    with scratch_folder(tmp_path / "model.onnx") as folder:
        assert folder.parent == tmp_path
    for error in (ValueError, KeyboardInterrupt, SystemExit):
        with pytest.raises(error), scratch_folder(tmp_path / "model.onnx"):
            raise error
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_killed_process_is_removed(running_process):
    path, process = running_process
    with scratch_folder(path):
        assert len(list(path.parent.iterdir())) == 2  # that of the running process is kept
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(list(path.parent.iterdir())) == 1
    with scratch_folder(path) as folder:
        assert list(path.parent.iterdir()) == [folder]


def test_unrelated_folders_are_not_removed(tmp_path):
    for name in (".model.onnx.mine", f".model.onnx.{os.getpid()}.abc", ".other.onnx.99999999.abc", "model.onnx.9.a"):
        (tmp_path / name).mkdir()
    (tmp_path / f".model.onnx.{os.getpid()}.abc" / "vitrail.lock").touch()
    (tmp_path / ".other.onnx.99999999.abc" / "vitrail.lock").touch()
    with scratch_folder(tmp_path / "model.onnx"):
        pass
    assert len(list(tmp_path.iterdir())) == 4
