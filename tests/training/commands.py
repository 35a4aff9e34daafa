"""Run the `vitrail` command in a separate process that starts in about 0.1 s.

    with Commands() as commands:
        running = commands.start("train", "digits", folder=tmp_path)
        os.kill(running.pid, signal.SIGTERM)
        assert running.wait().status == 143

A server process imports all modules without computing anything; every command is forked from it.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120.0
"""Seconds after which a command counts as hung."""


@dataclass
class CommandResult:
    """Exit status and output of a command."""

    status: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        """Messages of the lines on standard error that start with `error: `."""
        return self._messages("error: ")

    @property
    def notes(self) -> list[str]:
        return self._messages("note: ")

    def _messages(self, prefix: str) -> list[str]:
        return [line.removeprefix(prefix) for line in self.err.splitlines() if line.startswith(prefix)]


class RunningCommand:
    """A command that may still be running. Its process is reaped by `wait`, so its pid stays valid until then."""

    def __init__(self, commands: Commands, pid: int, files: tuple[Path, Path]) -> None:
        self.commands, self.pid, self.files = commands, pid, files

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait until the condition holds; after `TIMEOUT_S`, kill the command and raise TimeoutError."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                raise TimeoutError(f"the command timed out:\n{self.err}")
            time.sleep(0.005)

    def wait(self) -> CommandResult:
        status = self.commands.send_request({"wait": self.pid})
        out, err = (file.read_text() for file in self.files)
        assert status is not None, f"the command hangs:\n{err}"
        assert "Traceback" not in err, err
        return CommandResult(status, out, err)

    @property
    def err(self) -> str:
        return self.files[1].read_text()


class Commands:
    """A server process from which commands are forked."""

    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "NO_COLOR": "1"}
        self.server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.count = 0

    def start(self, *arguments: object, folder: Path, script: Path | None = None) -> RunningCommand:
        """Start a command in `folder`; `script` is a file whose `main` is called instead of the command's."""
        self.count += 1
        files = folder / f".{self.count}.out", folder / f".{self.count}.err"
        request = {"arguments": [str(a) for a in arguments], "folder": str(folder), "files": [str(f) for f in files]}
        return RunningCommand(self, self.send_request(request | ({"script": str(script)} if script else {})), files)

    def run(self, *arguments: object, folder: Path, script: Path | None = None) -> CommandResult:
        return self.start(*arguments, folder=folder, script=script).wait()

    def send_request(self, request: dict[str, Any]) -> Any:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())

    def __enter__(self) -> Commands:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.close()
        self.server.wait()
        self.server.stdout.close()


def run_child(request: dict[str, Any]) -> None:
    """Run the command in the forked process; never returns."""
    status = 70
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(request["folder"])
        for descriptor, file in enumerate(request["files"], start=1):
            output = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(output, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        from vitrail.cli import main

        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        sys.argv = [request.get("script", "vitrail"), *request["arguments"]]
        status = runpy.run_path(sys.argv[0])["main"]() if "script" in request else main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = 130
    finally:
        sys.stderr.flush()
        os._exit(status)


def wait_for_exit(pid: int) -> int | None:
    """The exit status as a shell reports it; None for a process that was killed because it did not end."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        ended_pid, status = os.waitpid(pid, os.WNOHANG)
        if ended_pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def serve() -> None:
    for name in ("vitrail.training.runs", "vitrail.cli", "sklearn.datasets", "sklearn.neighbors", "torch._dynamo"):
        importlib.import_module(name)
    importlib.import_module("vitrail.runtime.peak_flops").MEASUREMENT_S = 0.0  # only the display uses it

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # commands unblock it when they are ready
    children: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            response: Any = wait_for_exit(request["wait"])
            children.discard(request["wait"])
        else:
            sys.stdout.flush()
            response = os.fork()
            if not response:
                run_child(request)
            children.add(response)
        print(json.dumps(response), flush=True)
    for pid in children:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    serve()
