"""One process that serves: listen, say where, drain, stop.

The first SIGTERM or Ctrl-C makes /readyz answer 503, lets a load balancer notice, then closes the door,
answers what is open and ends with status 0. The second one ends everything at once.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import multiprocessing.util
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, NoReturn

import uvicorn

from vitrail.errors import ConfigError
from vitrail.runtime.cores import usable_cores
from vitrail.serve.connections import within
from vitrail.serve.limits import Limits, shares
from vitrail.serve.served import Served

SIGNALS = (signal.SIGINT, signal.SIGTERM)
AGAIN = 0.3
"""Seconds: a signal that comes sooner after the first is the same one, sent to a process and to its group."""
SLOWEST = 15.0
"""Seconds after which a server that listens says so, also where the engine has not answered yet."""
SWITCH = 0.0005
"""Seconds for which a thread may keep the interpreter from an engine's, whose core stands still meanwhile."""
BACKLOG = 2048
"""Connections that may wait to be accepted, at most: uvicorn's default."""
TURNS = 4
"""Turns of the event loop between accepting a connection and closing it; each may accept a backlog of them."""
SPARE = 64
"""Descriptors beside those that are open when the model is loaded: files that are read for a moment."""
Opener = Callable[[], Served]
"""What loads the model; every worker calls it, so it must be something that can be sent to a process."""
Started = Callable[[str, str], None]
"""Is told the model's name and how it runs."""

log = logging.getLogger("vitrail.serve")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to serve."""

    limits: Limits = field(default_factory=Limits)
    work: dict[str, Any] = field(default_factory=dict)
    """Fields of `Work`; those that are left out follow from the engine and the cores."""
    cores: int = field(default_factory=usable_cores)
    """For each worker."""
    token: str | None = None
    hosts: tuple[str, ...] | None = None
    """Names a request may call the server by, beside those of loopback; None: any."""
    notice: float = 0.5
    """Seconds for which /readyz says 503 before the door closes."""
    patience: int = 30
    """Seconds for open requests to be answered after that."""


class Server(uvicorn.Server):  # type: ignore[misc]
    """uvicorn's, with a drain that ends in status 0; as a worker it is only ever drained, however often it is told."""

    def __init__(
        self,
        config: uvicorn.Config,
        settings: Settings,
        started: Callable[[], None],
        stopping: Callable[[], None] | None = None,
        worker: bool = False,
    ) -> None:
        super().__init__(config)
        self.settings, self.tell_started, self.tell_stopping, self.worker = settings, started, stopping, worker
        self.told: float | None = None
        """When it was told to stop."""
        self.begun = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.begun = time.monotonic()

    async def on_tick(self, counter: int) -> bool:
        now = time.monotonic()
        if self.begun and (self.config.app.state.service.batcher.warm or now > self.begun + SLOWEST):
            self.begun = 0.0
            self.tell_started()
        if self.told is not None:
            if self.tell_stopping is not None:
                self.tell_stopping()
                self.tell_stopping = None
            self.should_exit = now >= self.told + self.settings.notice
        return bool(await super().on_tick(counter))

    def drain(self) -> None:
        """Say that it is not ready, and soon close the door; from any thread."""
        self.config.app.state.service.draining = True
        self.told = self.told or time.monotonic()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.told is not None and not self.worker and time.monotonic() > self.told + AGAIN:
            os._exit(128 + sig)
        self.drain()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn would raise the signal again when all is done, and so end in its status."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        own = (signal.SIGTERM,) if self.worker else SIGNALS
        before = {sig: signal.signal(sig, self.handle_exit) for sig in own}
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
            raise ConfigError(f"cannot listen at {host} port {port}: {reason}; {_remedy(error)}.") from None
        closing.pop_all()  # it stays open
    sock.set_inheritable(True)
    return sock


def _remedy(error: Exception) -> str:
    number = getattr(error, "errno", None)
    if number in (errno.EACCES, errno.EPERM):
        return "try a --port of 1024 or more, or 0 for any"
    if number == errno.EADDRINUSE:
        return "try another --port, or 0 for any"
    return "try --host 127.0.0.1 for this machine alone, or 0.0.0.0 for all that can reach it"


def address(sock: socket.socket) -> str:
    """Where a browser on this machine finds it."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def leave(status: int) -> NoReturn:
    """End the process without taking apart what it has loaded, which takes seconds; what tidies up is run."""
    atexit._run_exitfuncs()
    multiprocessing.util._exit_function()  # type: ignore[attr-defined] # a worker's own are not among them
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def within_descriptors(limits: Limits) -> tuple[Limits, int]:
    """Limits whose connections fit into the descriptors this process may have, and the backlog beside them.

    The soft limit (`ulimit -n`) is raised as far as is needed and the hard limit allows.
    """
    if os.name != "posix":
        return limits, BACKLOG
    import resource

    own = len(os.listdir("/dev/fd")) + SPARE
    wanted = own + limits.connections + TURNS * BACKLOG
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < wanted:  # no limit is -1, or very large
        raised = min(wanted, hard) if hard >= 0 else wanted
        with contextlib.suppress(OSError, ValueError):  # macOS has another limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    if not 0 <= soft < wanted:
        return limits, BACKLOG
    free = soft - own
    backlog = min(BACKLOG, free // (3 * TURNS))
    if backlog < 1:
        raise ConfigError(
            f"ulimit -n allows {soft} open files, and {own + 3 * TURNS} are needed; try ulimit -n {2 * own} or more."
        )
    connections = min(limits.connections, free - TURNS * backlog)
    return replace(limits, connections=connections), backlog


def serve_here(
    opener: Opener,
    sock: socket.socket,
    settings: Settings,
    started: Started,
    stopping: Callable[[], None] | None = None,
    made: Callable[[Server], None] | None = None,
) -> None:
    """In this process, until told to stop; as a worker where somebody wants to have the server that is `made`."""
    from vitrail.serve.app import create_app
    from vitrail.serve.images import bound_pillow

    bound_pillow(settings.limits.pixels)
    sys.setswitchinterval(SWITCH)
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # it has a line for every damaged form
    served = opener()
    limits, backlog = within_descriptors(settings.limits)
    work = shares(settings.cores, served.alone, **settings.work)
    app = create_app(served, limits, work, settings.token, settings.hosts)

    def tell() -> None:
        started(served.name, f"{served.how(settings.cores)}, batches of up to {app.state.service.batcher.batch}")

    config = configured(app, backlog=backlog, timeout_graceful_shutdown=settings.patience)
    server = Server(config, settings, tell, stopping, worker=made is not None)
    if made is not None:
        made(server)
    server.run([sock])


def configured(app: Any, **options: Any) -> uvicorn.Config:
    """uvicorn, told to say little, also about itself, and not to wait for ever."""
    return uvicorn.Config(
        app,
        http=within(app.state.service.limits),
        lifespan="on",
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,  # a load balancer's connections are closed by it, not here
        **options,
    )
