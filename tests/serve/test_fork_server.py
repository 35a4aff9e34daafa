"""The fork server exits with its parent, does not run the main script again, and is replaced if it dies."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import photo, wait_until
from small_models import model, small

from vitrail.serve import decode_process
from vitrail.serve.decode_process import DecodeProcess
from vitrail.serve.fork_server import ForkServer
from vitrail.serve.http_errors import RequestError
from vitrail.serve.limits import Limits

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")

SCRIPT = """
import sys, time
print("runs", flush=True)
from pathlib import Path
from vitrail.config import PreprocessConfig
from vitrail.serve.decode_process import DecodeProcess, fork_server
from vitrail.serve.limits import Limits
process = DecodeProcess(PreprocessConfig(image_size=32), Limits())
shape = process.decode(Path(sys.argv[1]).read_bytes(), lambda: True).shape
print(*shape, fork_server._process.pid, process._pid, flush=True)
if sys.argv[2] == "wait":
    time.sleep(60)
"""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    server_ = ForkServer("vitrail.serve.decode_process", "run_decoder")
    monkeypatch.setattr(decode_process, "fork_server", server_)
    yield server_
    server_.close()


@pytest.fixture
def process(server: ForkServer) -> Iterator[DecodeProcess]:
    process_ = DecodeProcess(model(small()).preprocess.config, Limits())
    yield process_
    process_.close()


def is_wanted() -> bool:
    return True


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("sig", [None, signal.SIGKILL])
def test_a_script_without_a_main_guard_runs_once_and_leaves_no_process(
    tmp_path: Path, sig: signal.Signals | None
) -> None:
    script, image = tmp_path / "script.py", tmp_path / "image.jpg"
    script.write_text(SCRIPT)
    image.write_bytes(photo())
    command = [sys.executable, str(script), str(image), "wait" if sig else "end"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        assert program.stdout.readline() == "runs\n"
        values = program.stdout.readline().split()
        assert values[:3] == ["32", "32", "3"], program.stderr.read()
        if sig:
            program.send_signal(sig)
        wait_until(lambda: not any(is_running(int(pid)) for pid in values[3:]))
        stdout, stderr = program.communicate(timeout=20)
    assert stdout == ""
    assert stderr == ""


def test_a_fork_server_that_died_is_replaced(server: ForkServer, process: DecodeProcess) -> None:
    assert process.decode(photo(), is_wanted) is not None
    assert server._process is not None
    first = server._process
    first.kill()
    first.wait()
    assert process.decode(photo(), is_wanted) is not None  # the existing child still works
    assert process.close() is None
    assert process.decode(photo(), is_wanted) is not None
    assert server._process is not first


def test_killed_processes_leave_no_zombies_or_file_descriptors(server: ForkServer, process: DecodeProcess) -> None:
    assert process.decode(photo(), is_wanted) is not None
    assert server._process is not None
    folders = [Path(f"/proc/{pid}/fd") for pid in (os.getpid(), server._process.pid)]
    open_files = [len(list(folder.iterdir())) for folder in folders]
    for _ in range(20):
        os.kill(process._pid or 0, signal.SIGSTOP)
        assert process.decode(photo(), lambda: False) is None
        process._ensure_started()
    assert [len(list(folder.iterdir())) for folder in folders] == open_files
    children = Path(f"/proc/{server._process.pid}/task/{server._process.pid}/children").read_text().split()
    assert children == [str(process._pid)]


def test_an_unknown_process_is_not_killed(server: ForkServer, process: DecodeProcess) -> None:
    assert process.decode(photo(), is_wanted) is not None
    assert server.kill(os.getpid()) is None


@pytest.mark.parametrize("failing_step", ["fork", "start"])
def test_if_no_process_can_be_started_the_response_is_503(
    server: ForkServer,
    process: DecodeProcess,
    failing_step: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR):
        if failing_step == "fork":
            patched.setattr(server, "_request", lambda *_: -errno.EAGAIN)
        else:
            patched.setattr("vitrail.serve.fork_server.get_executable", lambda: "/nowhere/python")
        with pytest.raises(RequestError, match="at the moment; try again in 5 s") as refused:
            process.decode(photo(), is_wanted)
    assert (refused.value.status, refused.value.headers) == (503, {"Retry-After": "5"})
    assert "cannot start a process" in caplog.text
