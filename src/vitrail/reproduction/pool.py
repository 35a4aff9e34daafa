"""Worker processes that run trials at the same time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self

from vitrail.reproduction.worker import Task

EXIT_TIMEOUT_S = 60.0
"""Seconds that a stopped worker may take to save its checkpoint."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")

Reply = dict[str, Any]
"""key, and result, error or stopped."""


class WorkerPool:
    """Runs at most `jobs` tasks at a time, each in a process with `threads` threads (0: torch's default).

    Processes are started when they are needed and are reused. They are in sessions of their own, so that Ctrl-C reaches
    the main process only; leaving the `with` block stops them: current runs save a checkpoint.
    """

    def __init__(self, jobs: int, threads: int, log: Path) -> None:
        self.jobs, self.threads, self.log = jobs, threads, log
        self.idle: list[subprocess.Popen[str]] = []
        self.busy: dict[str, subprocess.Popen[str]] = {}
        self.processes: list[subprocess.Popen[str]] = []
        """All that have not ended."""
        self.replies: SimpleQueue[tuple[subprocess.Popen[str], Reply | None]] = SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            _close_input(process)
        for process in self.processes:
            try:
                process.wait(EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @property
    def has_room(self) -> bool:
        return len(self.busy) < self.jobs

    def submit(self, task: Task) -> None:
        """Start a task in an idle process, or in a new one."""
        process = self.idle.pop() if self.idle else self._start()
        self.busy[task["key"]] = process
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({**task, "threads": self.threads}) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # the process has died: the thread that reads its replies reports it

    def next_reply(self, timeout_s: float) -> Reply | None:
        """The next reply; None if there is none within the timeout."""
        try:
            process, reply = self.replies.get(timeout=timeout_s)
        except Empty:
            return None
        if reply is None:  # the process has ended
            _close_input(process)
            status = process.wait()
            self.processes.remove(process)
            if process in self.idle:
                self.idle.remove(process)
            key = next((key for key, other in self.busy.items() if other is process), None)
            if key is None:
                return None
            del self.busy[key]
            return {"key": key, "error": f"its process ended with status {status}."}
        del self.busy[reply["key"]]
        if "stopped" not in reply:
            self.idle.append(process)
        return reply

    def _start(self) -> subprocess.Popen[str]:
        environment: Mapping[str, str] = os.environ
        if self.threads:
            environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, str(self.threads))}
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "vitrail.reproduction.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env=environment,
            )
        self.processes.append(process)
        threading.Thread(target=self._read_replies, args=(process,), daemon=True).start()
        return process

    def _read_replies(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self.replies.put((process, json.loads(line)))
        self.replies.put((process, None))


def _close_input(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has died before it read its task
        process.stdin.close()
