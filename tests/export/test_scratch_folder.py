"""Where files are made: a folder of one process, swept up by the next where that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vitrail.export.scratch_folder import scratch_folder

KILLED = """
import sys, pathlib
from vitrail.export.scratch_folder import scratch_folder
with scratch_folder(pathlib.Path(sys.argv[1])) as folder:
    (folder / "half").write_text("written")
    print("there", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def working(tmp_path: Path):
    """Another process that works on the same file."""
    path = tmp_path / "model.onnx"
    other = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "there\n"
    yield path, other
    other.kill()
    other.communicate()


def test_a_folder_is_gone_however_the_work_ends(tmp_path):
    with scratch_folder(tmp_path / "model.onnx") as folder:
        assert folder.parent == tmp_path
    for error in (ValueError, KeyboardInterrupt, SystemExit):
        with pytest.raises(error), scratch_folder(tmp_path / "model.onnx"):
            raise error
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed(working):
    path, other = working
    with scratch_folder(path):
        assert len(list(path.parent.iterdir())) == 2  # it works still
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert len(list(path.parent.iterdir())) == 1
    with scratch_folder(path) as folder:
        assert list(path.parent.iterdir()) == [folder]


def test_other_folders_stay(tmp_path):
    for name in (".model.onnx.mine", f".model.onnx.{os.getpid()}.abc", ".other.onnx.99999999.abc", "model.onnx.9.a"):
        (tmp_path / name).mkdir()
    (tmp_path / f".model.onnx.{os.getpid()}.abc" / "vitrail.lock").touch()
    (tmp_path / ".other.onnx.99999999.abc" / "vitrail.lock").touch()
    with scratch_folder(tmp_path / "model.onnx"):
        pass
    assert len(list(tmp_path.iterdir())) == 4
