"""Runs the cases of a group: a process for each, and rounds in which they take turns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from vitrail.bench.cases import PRODUCT, Case, Group
from vitrail.bench.measurement import Row, make_rows

ROUNDS = 5
TURN_S = {"cpu": 0.5, "cuda": 1.0}
"""Seconds of one turn; at least one step."""
PAUSE_S = 0.2
"""Before each turn on a CPU: threads of the previous process go on spinning for a while."""
EXIT_TIMEOUT_S = 10.0
POLL_S = 0.05

Reply = dict[str, Any]
Progress = Callable[[str], None]
OUT_OF_TIME = "not measured: time limit"


class TimeLimit(Exception):
    """The time is over before the group has been measured."""


class CaseProcess:
    """The process of one case, seen from the main process. It leads a process group, which `close` ends."""

    def __init__(self, case: Case, log: Path, environment: Mapping[str, str]) -> None:
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vitrail.bench.case_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                start_new_session=True,  # Ctrl-C reaches the main process only
                env=environment,
            )
        self.replies: SimpleQueue[Reply] = SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.send(case.to_json())

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.replies.put(json.loads(line))
        self.replies.put({"kind": "failed", "reason": _describe_exit(self.process.wait())})

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has died: `_read` reports it
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def reply(self, deadline: float) -> Reply:
        """The next reply; TimeLimit if there is none until the deadline."""
        found = self.poll(max(min(deadline - time.monotonic(), threading.TIMEOUT_MAX), 0.01))
        if found is None:
            raise TimeLimit
        return found

    def poll(self, timeout_s: float) -> Reply | None:
        """The next reply; None if there is none within the timeout."""
        try:
            return self.replies.get(timeout=timeout_s)
        except Empty:
            return None

    def close(self) -> None:
        """End the process, and those that it has started to compile."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(EXIT_TIMEOUT_S)


def _describe_exit(status: int) -> str:
    if status >= 0:
        return f"its process ended with status {status}"
    name = signal.Signals(-status).name if -status in {*signal.Signals} else str(-status)
    return f"its process was ended by {name}" + " (perhaps out of memory)" * (name == "SIGKILL")


def measure_group(
    group: Group,
    folder: Path,
    *,
    environment: Mapping[str, str],
    jobs: int = 1,
    rounds: int = ROUNDS,
    turn_s: float | None = None,
    deadline: float = float("inf"),
    progress: Progress = lambda what: None,
) -> list[Row]:
    """Set up every case, `jobs` at a time, then let them take turns. `folder` gets what the processes print.

    A case that fails is a row that says why. TimeLimit is raised if the deadline (of time.monotonic) passes before the
    first round is complete; later rounds are left out instead.
    """
    folder.mkdir(parents=True, exist_ok=True)
    logs = [folder / f"{group.key}-{i}-{case.library.replace(' ', '-')}.log" for i, case in enumerate(group.cases)]
    processes: dict[int, CaseProcess] = {}
    setups: list[Reply] = [{} for _ in group.cases]

    def set_up(waiting: list[int], jobs: int) -> None:
        """Start the processes of these cases, `jobs` at a time, and wait for their replies."""
        running: list[int] = []
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(waiting.pop(0))
                processes[running[-1]] = CaseProcess(group.cases[running[-1]], logs[running[-1]], environment)
                progress(f"{group.title}: preparing {', '.join(_name(group.cases[i]) for i in running)}")
            if time.monotonic() > deadline:
                raise TimeLimit
            for i in list(running):
                reply = processes[i].poll(POLL_S)
                if reply is not None:
                    running.remove(i)
                    setups[i] = reply
                    if "reason" in reply:
                        processes.pop(i).close()

    try:
        set_up([*range(len(group.cases))], jobs)
        if jobs > 1:  # there may have been too little memory for several at a time
            set_up([i for i, setup in enumerate(setups) if setup.get("kind") == "memory"], 1)
        turns = _take_turns(group, processes, setups, rounds, turn_s, deadline, progress)
        return make_rows(group, setups, turns)
    finally:
        for process in processes.values():
            process.close()


def _take_turns(
    group: Group,
    processes: Mapping[int, CaseProcess],
    setups: list[Reply],
    rounds: int,
    turn_s: float | None,
    deadline: float,
    progress: Progress,
) -> list[list[Reply]]:
    """The replies of each case, one for each round; every second round has the opposite order."""
    device = group.cases[0].device.partition(":")[0]
    seconds = turn_s if turn_s is not None else TURN_S.get(device, 1.0)
    turns: list[list[Reply]] = [[] for _ in group.cases]
    for number in range(rounds):
        order = [i for i in processes if "reason" not in setups[i]]
        if all(group.cases[i].library == PRODUCT for i in order):
            break
        replies: dict[int, Reply] = {}
        progress(f"{group.title}: round {number + 1} of {rounds}")
        try:
            for i in order if number % 2 == 0 else reversed(order):
                if device == "cpu":
                    time.sleep(min(PAUSE_S, seconds))
                processes[i].send(str(seconds))
                replies[i] = processes[i].reply(deadline)
        except TimeLimit:
            if number == 0:
                raise
            break
        for i, reply in replies.items():
            turns[i].append(reply)
            if "reason" in reply:
                setups[i] = reply
    return turns


def _name(case: Case) -> str:
    setting = f"{case.setting}, {case.shown_precision}" if case.work != "product" else case.precision
    return f"{case.library} ({setting})"
