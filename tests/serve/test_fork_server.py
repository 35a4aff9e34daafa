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
from serving import photo, until
from small_models import model, small

from vitrail.serve import decode_process
from vitrail.serve.decode_process import DecodeProcess
from vitrail.serve.fork_server import ForkServer
from vitrail.serve.http_errors import RequestError
from vitrail.serve.limits import Limits

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks at processes in /proc")

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
    found = ForkServer()
    monkeypatch.setattr(decode_process, "fork_server", found)
    yield found
    found.close()


@pytest.fixture
def process(server: ForkServer) -> Iterator[DecodeProcess]:
    found = DecodeProcess(model(small()).preprocess.config, Limits())
    yield found
    found.close()


def expected() -> bool:
    return True


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("sig", [None, signal.SIGKILL])
def test_a_script_without_a_guard_runs_once_and_leaves_no_process(tmp_path: Path, sig: signal.Signals | None) -> None:
    script, image = tmp_path / "script.py", tmp_path / "image.jpg"
    script.write_text(SCRIPT)
    image.write_bytes(photo())
    command = [sys.executable, str(script), str(image), "wait" if sig else "end"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        assert program.stdout.readline() == "runs\n"
        found = program.stdout.readline().split()
        assert found[:3] == ["32", "32", "3"], program.stderr.read()
        if sig:
            program.send_signal(sig)
        until(lambda: not any(runs(int(pid)) for pid in found[3:]))
        out, err = program.communicate(timeout=20)
    assert out == ""
    assert err == ""


def test_a_fork_server_that_died_is_replaced(server: ForkServer, process: DecodeProcess) -> None:
    assert process.decode(photo(), expected) is not None
    assert server._process is not None
    first = server._process
    first.kill()
    first.wait()
    assert process.decode(photo(), expected) is not None  # the existing child still works
    assert process.close() is None
    assert process.decode(photo(), expected) is not None
    assert server._process is not first


def test_killing_processes_leaves_neither_zombies_nor_descriptors(server: ForkServer, process: DecodeProcess) -> None:
    assert process.decode(photo(), expected) is not None
    assert server._process is not None
    folders = [Path(f"/proc/{pid}/fd") for pid in (os.getpid(), server._process.pid)]
    before = [len(list(folder.iterdir())) for folder in folders]
    for _ in range(20):
        os.kill(process._pid or 0, signal.SIGSTOP)
        assert process.decode(photo(), lambda: False) is None
        process._ensure_started()
    assert [len(list(folder.iterdir())) for folder in folders] == before
    children = Path(f"/proc/{server._process.pid}/task/{server._process.pid}/children").read_text().split()
    assert children == [str(process._pid)]


def test_an_unknown_process_is_not_killed(server: ForkServer, process: DecodeProcess) -> None:
    assert process.decode(photo(), expected) is not None
    assert server.kill(os.getpid()) is None


@pytest.mark.parametrize("where", ["fork", "start"])
def test_if_no_process_can_be_started_the_response_is_503(
    server: ForkServer,
    process: DecodeProcess,
    where: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR):
        if where == "fork":
            patched.setattr(server, "_request", lambda *_: -errno.EAGAIN)
        else:
            patched.setattr("vitrail.serve.fork_server.get_executable", lambda: "/nowhere/python")
        with pytest.raises(RequestError, match="at the moment; try again in 5 s") as refused:
            process.decode(photo(), expected)
    assert (refused.value.status, refused.value.headers) == (503, {"Retry-After": "5"})
    assert "cannot start a process" in caplog.text
