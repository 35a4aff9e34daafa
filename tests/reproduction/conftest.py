"""Fixtures of the reproduction tests: the small experiment, processes that reproduce it, and runs in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import torch
from reproduction.small_experiment import SMALL
from training.commands import Commands

from vitrail.reproduction import worker
from vitrail.reproduction.experiments import EXPERIMENTS
from vitrail.reproduction.pool import Reply
from vitrail.reproduction.reproduce import Reproduction, reproduce
from vitrail.reproduction.worker import Task


class InlinePool:
    """A WorkerPool that runs each task in this process when its reply is asked for."""

    has_room = True

    def __init__(self, jobs: int, threads: int, log: Path) -> None:
        self.tasks: list[Task] = []

    def __enter__(self) -> Self:
        self.threads = torch.get_num_threads()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.set_num_threads(self.threads)

    def submit(self, task: Task) -> None:
        self.tasks.append({**task, "threads": 1})
        self.has_room = False

    def next_reply(self, timeout_s: float) -> Reply:
        assert threading.current_thread() is threading.main_thread()
        task = self.tasks.pop()
        self.has_room = True
        return {"key": task["key"], **worker._run(task)}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the small experiment."""
    monkeypatch.setitem(EXPERIMENTS, "small", SMALL)


def run_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the small experiment, and run trials in this process, one at a time."""
    monkeypatch.setitem(EXPERIMENTS, "small", SMALL)
    monkeypatch.setattr("vitrail.reproduction.reproduce.WorkerPool", InlinePool)
    monkeypatch.setattr("vitrail.runtime.peak_flops.MEASUREMENT_S", 0.0)
    monkeypatch.setattr("vitrail.storage.atomic_write.fsync", lambda path: None)


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    run_inline(monkeypatch)


@pytest.fixture
def reproduce_small(inline: None, tmp_path: Path) -> Callable[..., Reproduction]:
    """`reproduce_small("folder", seeds=1)`: the small experiment in this process."""

    def run(out: str, **options: Any) -> Reproduction:
        return reproduce("small", out=tmp_path / out, **{"scale": "tiny", "device": "cpu"} | options)

    return run


@pytest.fixture(scope="session")
def commands() -> Iterator[Commands]:
    """The server from which main processes are forked, started once because the imports take seconds."""
    with Commands() as server:
        yield server
