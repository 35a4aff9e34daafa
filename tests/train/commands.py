"""`vitrail` as a person runs it, in a process of its own, started in a tenth of a second.

    with Commands() as commands:
        running = commands.start("train", "digits", folder=tmp_path)
        os.kill(running.pid, signal.SIGTERM)
        assert running.ended().status == 143

One process imports everything and computes nothing; every command is forked from it.
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
PATIENCE = 120.0
"""Seconds until a command is given up as hung."""


@dataclass
class Ended:
    """What a command left behind."""

    status: int
    out: str
    err: str

    @property
    def problems(self) -> list[str]:
        return [line.removeprefix("error: ") for line in self.err.splitlines() if line.startswith("error: ")]


class Running:
    """A command that may still be running; its process is not reaped before `ended`, so its number stays its own."""

    def __init__(self, commands: Commands, pid: int, files: tuple[Path, Path]) -> None:
        self.commands, self.pid, self.files = commands, pid, files

    def until(self, found: Callable[[], object]) -> None:
        """Wait until something can be seen of it."""
        limit = time.monotonic() + PATIENCE
        while not found():
            if time.monotonic() > limit:
                os.kill(self.pid, signal.SIGKILL)
                raise TimeoutError(f"nothing came of it:\n{self.err}")
            time.sleep(0.005)

    def ended(self) -> Ended:
        status = self.commands.ask({"wait": self.pid})
        out, err = (file.read_text() for file in self.files)
        assert status is not None, f"it hangs:\n{err}"
        assert "Traceback" not in err, err
        return Ended(status, out, err)

    @property
    def err(self) -> str:
        return self.files[1].read_text()


class Commands:
    """Starts commands."""

    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "NO_COLOR": "1"}
        self.server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.count = 0

    def start(self, *arguments: object, folder: Path, script: Path | None = None) -> Running:
        """In a folder; `script`: a file whose `main` is called in place of the command's."""
        self.count += 1
        files = folder / f".{self.count}.out", folder / f".{self.count}.err"
        given = {"arguments": [str(a) for a in arguments], "folder": str(folder), "files": [str(f) for f in files]}
        return Running(self, self.ask(given | ({"script": str(script)} if script else {})), files)

    def run(self, *arguments: object, folder: Path, script: Path | None = None) -> Ended:
        return self.start(*arguments, folder=folder, script=script).ended()

    def ask(self, what: dict[str, Any]) -> Any:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps(what) + "\n")
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


def child(given: dict[str, Any]) -> None:
    """The command itself; never returns."""
    status = 70
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(given["folder"])
        for number, file in enumerate(given["files"], start=1):
            sink = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(sink, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        from vitrail.cli import main

        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        sys.argv = [given.get("script", "vitrail"), *given["arguments"]]
        status = runpy.run_path(sys.argv[0])["main"]() if "script" in given else main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = 130
    finally:
        sys.stderr.flush()
        os._exit(status)


def waited(pid: int) -> int | None:
    """The exit status as a shell gives it; None for a process that does not end."""
    limit = time.monotonic() + PATIENCE
    while time.monotonic() < limit:
        number, status = os.waitpid(pid, os.WNOHANG)
        if number:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def serve() -> None:
    for name in ("vitrail.api.training", "vitrail.cli", "sklearn.datasets", "sklearn.neighbors", "torch._dynamo"):
        importlib.import_module(name)
    importlib.import_module("vitrail.runtime.peak_flops").MEASUREMENT_S = 0.0  # what is measured for the display

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # those that are forked hear it when they are ready
    children: set[int] = set()
    for line in sys.stdin:
        given = json.loads(line)
        if "wait" in given:
            answer: Any = waited(given["wait"])
            children.discard(given["wait"])
        else:
            sys.stdout.flush()
            answer = os.fork()
            if not answer:
                child(given)
            children.add(answer)
        print(json.dumps(answer), flush=True)
    for left in children:
        with suppress(ProcessLookupError):
            os.kill(left, signal.SIGKILL)


if __name__ == "__main__":
    serve()
