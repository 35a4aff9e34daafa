"""Several processes at one socket: started, watched, replaced when they die, told to stop.

The parent tells the workers through a pipe when to stop. Of signals, a worker that serves heeds SIGTERM alone,
and drains as at the parent's word, so that a signal to the whole group of processes, as systemd and
`timeout` send it, means no more than one to the parent.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType

from prometheus_client.multiprocess import mark_process_dead

from vitrail.errors import ConfigError, VitrailError
from vitrail.serve.metrics import FOLDER
from vitrail.serve.served import Served
from vitrail.serve.server import AGAIN, SIGNALS, Opener, Server, Settings, Started, leave, serve_here

TRIES = 5
"""Workers in a row that may fail to start before all is given up."""

log = logging.getLogger("vitrail.serve")


def serve(
    opener: Opener,
    sock: socket.socket,
    settings: Settings,
    workers: int,
    started: Started,
    stopping: Callable[[], None],
) -> None:
    """Serve until told to stop; `started` is told when requests are answered. Afterwards the process is over."""
    if workers > 1:
        Workers(opener, sock, settings, workers, started, stopping).run()
    else:
        serve_here(opener, sock, settings, started, stopping)
    leave(0)


@dataclass
class Worker:
    """One of several processes, and the pipe to it."""

    process: SpawnProcess
    pipe: Connection
    serves: bool = False
    """Whether it has said that it listens."""
    error: str = ""
    """Why it does not."""

    def hear(self) -> tuple[str, str] | None:
        """What it has said of late: its model's name and how that runs, when it begins to listen."""
        found = None
        with contextlib.suppress(EOFError, OSError):
            while self.pipe.poll():
                kind, *words = self.pipe.recv()
                if kind == "error":
                    self.error = words[0]
                else:
                    self.serves, found = True, (words[0], words[1])
        return found

    def tell_to_stop(self) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send("stop")

    def end(self) -> str:
        """How it ended."""
        code = self.process.exitcode or 0
        how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return f"{how}: {self.error}" if self.error else how


class Workers:
    """Several processes at one socket: started together, replaced when they die, stopped together."""

    def __init__(
        self,
        opener: Opener,
        sock: socket.socket,
        settings: Settings,
        count: int,
        started: Started,
        stopping: Callable[[], None],
    ) -> None:
        self.opener, self.sock, self.settings, self.count = opener, sock, settings, count
        self.started, self.stopping = started, stopping
        self.context = multiprocessing.get_context("spawn")
        self.workers: dict[int, Worker] = {}
        self.due: dict[int, float] = {}
        """When those that have died are started again."""
        self.failures = 0
        """Workers in a row that did not come to serve."""
        self.signals = 0
        self.signaled = 0.0

    def run(self) -> None:
        for sig in SIGNALS:
            signal.signal(sig, self._signaled)
        with tempfile.TemporaryDirectory(prefix="vitrail-metrics-") as folder:
            os.environ[FOLDER] = folder  # inherited; prometheus_client looks for it when it is imported
            try:
                self._start()
                self._keep()
            finally:
                if self.signals:
                    self.stopping()
                for worker in self.workers.values():
                    worker.tell_to_stop()
                for worker in self.workers.values():
                    worker.process.join()
                del os.environ[FOLDER]

    def _start(self) -> None:
        """All of them, until each says that it listens; the first one alone, so that what is made once it makes."""
        self._begin(0, quiet=False)
        said: list[tuple[str, str]] = []
        while len(said) < self.count and not self.signals:
            if said and len(self.workers) == 1:
                for number in range(1, self.count):
                    self._begin(number)
            self._wait()
            for worker in self.workers.values():
                alive, found = worker.process.is_alive(), worker.hear()
                if found is not None:
                    said.append(found)
                elif worker.error:
                    raise ConfigError(worker.error)
                elif not alive and not worker.serves and not self._stops_soon():
                    raise ConfigError(f"a worker {worker.end()} before it could serve; see what it wrote.")
        if not self.signals:
            self.started(*said[0])

    def _begin(self, number: int, quiet: bool = True) -> None:
        opener = partial(_quietly, self.opener) if quiet else self.opener
        here, there = self.context.Pipe()
        process = self.context.Process(target=_work, args=(opener, self.sock, self.settings, there))
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # inherited: none interrupts what it imports
        process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        there.close()
        self.workers[number] = Worker(process, here)

    def _wait(self) -> None:
        """Until a worker ends, or a moment has passed."""
        wait([w.process.sentinel for n, w in self.workers.items() if n not in self.due], timeout=0.2)

    def _stops_soon(self) -> bool:
        """Whether a worker's end is no surprise: a signal to all processes may reach it first."""
        until = time.monotonic() + AGAIN
        while not self.signals and time.monotonic() < until:
            time.sleep(0.02)
        return self.signals > 0

    def _keep(self) -> None:
        """Start another for each that ends; raise ConfigError when that fails time and again."""
        while not self.signals:
            self._wait()
            for number, worker in list(self.workers.items()):
                if worker.hear() is not None:
                    self.failures = 0
                if number in self.due:
                    if time.monotonic() >= self.due[number]:
                        del self.due[number]
                        self._begin(number)
                elif not worker.process.is_alive() and not self._stops_soon():
                    self._bury(number, worker)

    def _bury(self, number: int, worker: Worker) -> None:
        worker.hear()
        worker.process.join()
        mark_process_dead(worker.process.pid)  # type: ignore[no-untyped-call]
        self.failures += not worker.serves
        told = f"worker {number + 1} (process {worker.process.pid}) {worker.end()}"
        if self.failures >= TRIES:
            raise ConfigError(f"{TRIES} workers in a row could not start; the last, {told}")
        seconds = 2 ** max(self.failures - 1, 0)
        log.error("%s; another is started in %d s", told.rstrip("."), seconds)
        self.due[number] = time.monotonic() + seconds

    def _signaled(self, sig: int, frame: FrameType | None) -> None:
        if not self.signals:
            self.signals, self.signaled = 1, time.monotonic()
        elif time.monotonic() > self.signaled + AGAIN:
            for worker in self.workers.values():
                worker.process.kill()
            os._exit(128 + sig)


def _work(opener: Opener, sock: socket.socket, settings: Settings, pipe: Connection) -> None:
    """A worker: it stops when its parent says so, or is no more."""
    for sig in SIGNALS:
        signal.signal(sig, signal.SIG_IGN)  # what is sent to all reaches the parent, which passes it on
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    made: list[Server] = []
    threading.Thread(target=_obey, args=(pipe, made), daemon=True).start()

    def tell(*words: str) -> None:
        with contextlib.suppress(OSError):
            pipe.send(words)

    try:
        serve_here(opener, sock, settings, partial(tell, "started"), made=made.append)
    except VitrailError as error:
        tell("error", str(error))
        leave(1)
    leave(0)


def _obey(pipe: Connection, made: list[Server]) -> None:
    """Wait for the parent's word, or for its end; what does not serve yet has nothing to finish."""
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    if not made:
        os._exit(0)
    made[0].drain()


def _quietly(opener: Opener) -> Served:
    """What the first worker says about the model is not said again; an error is raised, and so told."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        return opener()
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
