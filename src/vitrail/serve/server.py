"""Processes and signals: listen, say where, drain, stop.

The first SIGTERM or Ctrl-C makes /readyz answer 503, lets a load balancer notice, then closes the door,
answers what is open and ends with status 0. The second one ends everything at once.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import Any

import uvicorn
from prometheus_client.multiprocess import mark_process_dead

from vitrail.errors import ConfigError, VitrailError
from vitrail.serve.limits import Limits, shares
from vitrail.serve.metrics import FOLDER
from vitrail.serve.served import Served

SIGNALS = (signal.SIGINT, signal.SIGTERM)
Opener = Callable[[], Served]
"""What loads the model; every worker calls it, so it must be something that can be sent to a process."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to serve."""

    limits: Limits = field(default_factory=Limits)
    work: dict[str, Any] = field(default_factory=dict)
    """Fields of `Work`; those that are left out follow from the engine and the cores."""
    cores: int = field(default_factory=lambda: os.cpu_count() or 1)
    """For each worker."""
    token: str | None = None
    notice: float = 0.5
    """Seconds for which /readyz says 503 before the door closes."""
    patience: int = 30
    """Seconds for open requests to be answered after that."""


class Server(uvicorn.Server):  # type: ignore[misc]
    """uvicorn's, with a drain that ends in status 0."""

    def __init__(self, config: uvicorn.Config, settings: Settings, started: Callable[[], None]) -> None:
        super().__init__(config)
        self.settings, self.tell_started = settings, started
        self.closes: float | None = None
        """When the door closes."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.tell_started()

    async def on_tick(self, counter: int) -> bool:
        if self.closes is not None and time.monotonic() >= self.closes:
            self.should_exit = True
        return bool(await super().on_tick(counter))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.closes is not None:
            os._exit(128 + sig)
        self.config.app.state.service.draining = True
        self.closes = time.monotonic() + self.settings.notice

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn would raise the signal again when all is done, and so end in its status."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in SIGNALS}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)


def listening(host: str, port: int) -> socket.socket:
    """A socket with an address of its own, before anything slow happens."""
    with contextlib.ExitStack() as closing:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            sock = closing.enter_context(socket.socket(found[0][0], socket.SOCK_STREAM))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(found[0][4])
        except (OSError, UnicodeError) as error:
            reason = (getattr(error, "strerror", None) or str(error)).lower()
            raise ConfigError(
                f"cannot listen at {host} port {port}: {reason}; try another --port, or 0 for any."
            ) from None
        closing.pop_all()  # it stays open
    sock.set_inheritable(True)
    return sock


def address(sock: socket.socket) -> str:
    """Where a browser finds it."""
    host, port = sock.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def serve(opener: Opener, sock: socket.socket, settings: Settings, workers: int, started: Callable[[str], None]) -> int:
    """Serve until told to stop; `started` is told the model's name when requests are answered. Gives the status."""
    if workers > 1:
        return _Workers(opener, sock, settings, workers, started).run()
    _serve(opener, sock, settings, started)
    return 0


def _serve(opener: Opener, sock: socket.socket, settings: Settings, started: Callable[[str], None]) -> None:
    """In this process."""
    from vitrail.serve.app import create_app
    from vitrail.serve.pictures import bound_pillow

    bound_pillow(settings.limits.pixels)
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # it has a line for every damaged form
    served = opener()
    app = create_app(served, settings.limits, shares(settings.cores, served.alone, **settings.work), settings.token)
    config = configured(app, timeout_graceful_shutdown=settings.patience)
    Server(config, settings, partial(started, served.name)).run([sock])


def configured(app: Any, **options: Any) -> uvicorn.Config:
    """uvicorn, told to say little, also about itself."""
    return uvicorn.Config(
        app,
        lifespan="on",
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,  # a load balancer's connections are closed by it, not here
        **options,
    )


class _Workers:
    """Several processes at one socket: started together, replaced when they die, stopped together."""

    def __init__(
        self, opener: Opener, sock: socket.socket, settings: Settings, count: int, started: Callable[[str], None]
    ) -> None:
        self.opener, self.sock, self.settings, self.count, self.started = opener, sock, settings, count, started
        self.context = multiprocessing.get_context("spawn")
        self.processes: dict[int, SpawnProcess] = {}
        self.pipes: dict[int, Connection] = {}
        """Through which each says that it listens, or why not."""
        self.signals = 0

    def run(self) -> int:
        for sig in SIGNALS:
            signal.signal(sig, self._signalled)
        with tempfile.TemporaryDirectory(prefix="vitrail-metrics-") as folder:
            os.environ[FOLDER] = folder  # inherited; prometheus_client looks for it when it is imported
            try:
                self._start()
                self._keep()
            finally:
                for process in self.processes.values():
                    process.terminate()
                for process in self.processes.values():
                    process.join()
                del os.environ[FOLDER]
        return 0

    def _start(self) -> None:
        """All of them, until each says that it listens."""
        for number in range(self.count):
            self._begin(number)
        pipes = list(self.pipes.values())
        names: list[str] = []
        while len(names) < self.count and not self.signals:
            for pipe in wait(pipes, timeout=0.2):
                assert isinstance(pipe, Connection)
                try:
                    kind, text = pipe.recv()
                except EOFError:
                    raise ConfigError("a worker ended before it could serve; see what it wrote.") from None
                if kind == "error":
                    raise ConfigError(text)
                names.append(text)
                pipes.remove(pipe)
        if not self.signals:
            self.started(names[0])

    def _begin(self, number: int) -> None:
        here, there = self.context.Pipe(duplex=False)
        process = self.context.Process(target=_work, args=(self.opener, self.sock, self.settings, there))
        process.start()
        there.close()
        self.processes[number], self.pipes[number] = process, here

    def _keep(self) -> None:
        while not self.signals:
            time.sleep(0.2)
            for number, process in list(self.processes.items()):
                if not process.is_alive() and not self.signals:
                    mark_process_dead(process.pid)  # type: ignore[no-untyped-call]
                    time.sleep(1)  # not in a circle at full speed
                    self._begin(number)

    def _signalled(self, sig: int, frame: FrameType | None) -> None:
        self.signals += 1
        if self.signals > 1:
            for process in self.processes.values():
                process.kill()
            os._exit(128 + sig)


def _work(opener: Opener, sock: socket.socket, settings: Settings, pipe: Connection) -> None:
    """A worker: it stops when its parent says so, or is no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of them; the parent passes it on
    threading.Thread(target=_follow_parent, daemon=True).start()

    def started(name: str) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with contextlib.suppress(OSError):
            pipe.send(("started", name))
            pipe.close()

    try:
        _serve(opener, sock, settings, started)
    except VitrailError as error:
        with contextlib.suppress(OSError):
            pipe.send(("error", str(error)))


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
