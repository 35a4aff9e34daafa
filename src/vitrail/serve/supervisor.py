"""Runs several worker processes on one socket: starts, monitors, restarts and stops them.

The parent stops workers through a pipe. A worker handles only SIGTERM, by draining, as on a stop request of the parent.
So a signal to the whole process group, as systemd and `timeout` send it, has the same effect as one to the parent.
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
from vitrail.serve.prometheus_metrics import MULTIPROC_DIR
from vitrail.serve.served_model import ServedModel
from vitrail.serve.server import (
    DUPLICATE_SIGNAL_S,
    SIGNALS,
    ModelLoader,
    Server,
    ServerConfig,
    StartedCallback,
    exit_process,
    serve_in_process,
)

MAX_START_FAILURES = 5
"""Consecutive failures of workers to start after which the server exits."""

log = logging.getLogger("vitrail.serve")


def serve(
    loader: ModelLoader,
    sock: socket.socket,
    settings: ServerConfig,
    workers: int,
    started: StartedCallback,
    stopping: Callable[[], None],
) -> None:
    """Serve until stopped, then exit the process. `started` is called when the server is ready."""
    if workers > 1:
        Supervisor(loader, sock, settings, workers, started, stopping).run()
    else:
        serve_in_process(loader, sock, settings, started, stopping)
    exit_process(0)


@dataclass
class Worker:
    """A worker process and the pipe to it."""

    process: SpawnProcess
    pipe: Connection
    started: bool = False
    """Whether it has reported that it serves requests."""
    error: str = ""
    """The error that it has reported."""

    def read_messages(self) -> tuple[str, str] | None:
        """Read messages from the worker; returns model name and engine description if it has just started."""
        description = None
        with contextlib.suppress(EOFError, OSError):
            while self.pipe.poll():
                kind, *words = self.pipe.recv()
                if kind == "error":
                    self.error = words[0]
                else:
                    self.started, description = True, (words[0], words[1])
        return description

    def request_stop(self) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send("stop")

    def describe_exit(self) -> str:
        """How the process ended, for messages."""
        code = self.process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        return f"{how}: {self.error}" if self.error else how


class Supervisor:
    """Several processes at one socket: started together, replaced when they die, stopped together."""

    def __init__(
        self,
        loader: ModelLoader,
        sock: socket.socket,
        settings: ServerConfig,
        count: int,
        started: StartedCallback,
        stopping: Callable[[], None],
    ) -> None:
        self.loader, self.sock, self.settings, self.count = loader, sock, settings, count
        self.started, self.stopping = started, stopping
        self.context = multiprocessing.get_context("spawn")
        self.workers: dict[int, Worker] = {}
        self.restart_at: dict[int, float] = {}
        """When dead workers are restarted, by worker number."""
        self.start_failures = 0
        """Consecutive workers that failed to start."""
        self.signal_count = 0
        self.signaled_at = 0.0

    def run(self) -> None:
        for sig in SIGNALS:
            signal.signal(sig, self._on_signal)
        with tempfile.TemporaryDirectory(prefix="vitrail-metrics-") as folder:
            os.environ[MULTIPROC_DIR] = folder  # inherited; prometheus_client reads it on import
            try:
                self._start_all()
                self._monitor()
            finally:
                if self.signal_count:
                    self.stopping()
                for worker in self.workers.values():
                    worker.request_stop()
                for worker in self.workers.values():
                    worker.process.join()
                del os.environ[MULTIPROC_DIR]

    def _start_all(self) -> None:
        """Start all workers and wait until they serve; the first one starts alone and fills the caches."""
        self._start_worker(0, quiet=False)
        started: list[tuple[str, str]] = []
        while len(started) < self.count and not self.signal_count:
            if started and len(self.workers) == 1:
                for number in range(1, self.count):
                    self._start_worker(number)
            self._wait_for_exit()
            for worker in self.workers.values():
                alive, description = worker.process.is_alive(), worker.read_messages()
                if description is not None:
                    started.append(description)
                elif worker.error:
                    raise ConfigError(worker.error)
                elif not alive and not worker.started and not self._stop_expected():
                    raise ConfigError(f"a worker {worker.describe_exit()} before it could serve; see its output above.")
        if not self.signal_count:
            self.started(*started[0])

    def _start_worker(self, number: int, quiet: bool = True) -> None:
        loader = partial(_load_quietly, self.loader) if quiet else self.loader
        here, there = self.context.Pipe()
        process = self.context.Process(target=_worker_main, args=(loader, self.sock, self.settings, there))
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # inherited: signals do not interrupt its imports
        process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        there.close()
        self.workers[number] = Worker(process, here)

    def _wait_for_exit(self) -> None:
        """Wait until a worker exits, at most 0.2 s."""
        wait([w.process.sentinel for n, w in self.workers.items() if n not in self.restart_at], timeout=0.2)

    def _stop_expected(self) -> bool:
        """Whether the exit of a worker was caused by a signal to the whole group, which may reach the worker first."""
        until = time.monotonic() + DUPLICATE_SIGNAL_S
        while not self.signal_count and time.monotonic() < until:
            time.sleep(0.02)
        return self.signal_count > 0

    def _monitor(self) -> None:
        """Restart workers that exit, until a signal arrives; raise ConfigError after too many failures."""
        while not self.signal_count:
            self._wait_for_exit()
            for number, worker in list(self.workers.items()):
                if worker.read_messages() is not None:
                    self.start_failures = 0
                if number in self.restart_at:
                    if time.monotonic() >= self.restart_at[number]:
                        del self.restart_at[number]
                        self._start_worker(number)
                elif not worker.process.is_alive() and not self._stop_expected():
                    self._schedule_restart(number, worker)

    def _schedule_restart(self, number: int, worker: Worker) -> None:
        worker.read_messages()
        worker.process.join()
        mark_process_dead(worker.process.pid)  # type: ignore[no-untyped-call]
        self.start_failures += not worker.started
        exit_message = f"worker {number + 1} (process {worker.process.pid}) {worker.describe_exit()}"
        if self.start_failures >= MAX_START_FAILURES:
            raise ConfigError(f"{MAX_START_FAILURES} workers in a row could not start; the last, {exit_message}")
        seconds = 2 ** max(self.start_failures - 1, 0)
        log.error("%s; it is restarted in %d s", exit_message.rstrip("."), seconds)
        self.restart_at[number] = time.monotonic() + seconds

    def _on_signal(self, sig: int, frame: FrameType | None) -> None:
        if not self.signal_count:
            self.signal_count, self.signaled_at = 1, time.monotonic()
        elif time.monotonic() > self.signaled_at + DUPLICATE_SIGNAL_S:
            for worker in self.workers.values():
                worker.process.kill()
            os._exit(128 + sig)


def _worker_main(loader: ModelLoader, sock: socket.socket, settings: ServerConfig, pipe: Connection) -> None:
    """Main function of a worker: serves until the parent requests a stop or exits."""
    for sig in SIGNALS:
        signal.signal(sig, signal.SIG_IGN)  # the parent handles signals to the group
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    servers: list[Server] = []
    threading.Thread(target=_wait_for_stop, args=(pipe, servers), daemon=True).start()

    def send(*words: str) -> None:
        with contextlib.suppress(OSError):
            pipe.send(words)

    try:
        serve_in_process(loader, sock, settings, partial(send, "started"), on_created=servers.append)
    except VitrailError as error:
        send("error", str(error))
        exit_process(1)
    exit_process(0)


def _wait_for_stop(pipe: Connection, servers: list[Server]) -> None:
    """Wait until the parent requests a stop or exits, then drain; exit at once if not serving yet."""
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    if not servers:
        os._exit(0)
    servers[0].drain()


def _load_quietly(loader: ModelLoader) -> ServedModel:
    """Load the model with stderr suppressed, because the first worker has printed the same notes."""
    sys.stderr.flush()
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        return loader()
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
