"""One server process: listen, serve, drain, stop.

On the first SIGTERM or Ctrl-C, /readyz returns 503 so that a load balancer notices. Then the server stops accepting
connections, answers open requests and exits with status 0. A second signal ends it immediately.
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
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import uvicorn

from vitrail.errors import ConfigError
from vitrail.runtime.cores import usable_cores
from vitrail.serve.access import AccessConfig
from vitrail.serve.connections import limited_protocol
from vitrail.serve.limits import BatchingConfig, Limits, divide_cores
from vitrail.serve.served_model import ServedModel
from vitrail.serve.version_loader import ModelsConfig

SIGNALS = (signal.SIGINT, signal.SIGTERM)
DUPLICATE_SIGNAL_S = 0.3
"""A second signal within this time is a duplicate of the first, sent to the process and to its group."""
WARM_UP_TIMEOUT_S = 15.0
"""Time after which the server reports that it listens even if the engine has not finished its warm-up."""
SWITCH_INTERVAL_S = 0.0005
"""Python's thread switch interval, short so that engine threads do not wait for the interpreter lock."""
BACKLOG = 2048
"""Maximum number of connections waiting to be accepted: uvicorn's default."""
ACCEPT_ROUNDS = 4
"""Iterations of the event loop between accepting and closing a connection; each can accept a full backlog."""
SPARE_DESCRIPTORS = 64
"""File descriptors reserved for files that are opened briefly."""
ModelLoader = Callable[[], ServedModel]
"""Loads the model. Every worker calls it, so it must be picklable."""
StartedCallback = Callable[[str, str], None]
"""Called with the name of the model and a description of its engine."""

log = logging.getLogger("vitrail.serve")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Configuration of a server process."""

    limits: Limits = field(default_factory=Limits)
    batching: dict[str, Any] = field(default_factory=dict)
    """Fields of `BatchingConfig`; the others are derived from the engine and the cores."""
    cores: int = field(default_factory=usable_cores)
    """Cores per worker."""
    token: str | None = None
    hosts: tuple[str, ...] | None = None
    """Accepted host names besides loopback; None: all."""
    access: AccessConfig = field(default_factory=AccessConfig)
    drain_delay: float = 0.5
    """Seconds between /readyz returning 503 and closing the socket."""
    models: ModelsConfig | None = None
    """Folder of models to watch, instead of one model."""
    shutdown_timeout: int = 30
    """Seconds for open requests to finish after that."""


class Server(uvicorn.Server):  # type: ignore[misc]
    """uvicorn's server with draining that ends in status 0. A worker only drains, however many signals arrive."""

    def __init__(
        self,
        config: uvicorn.Config,
        settings: ServerConfig,
        started: Callable[[], None],
        stopping: Callable[[], None] | None = None,
        worker: bool = False,
    ) -> None:
        super().__init__(config)
        self.settings, self.on_started, self.on_stopping, self.worker = settings, started, stopping, worker
        self.drain_requested_at: float | None = None
        """When draining was requested."""
        self.started_at = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.started_at = time.monotonic()

    async def on_tick(self, counter: int) -> bool:
        now = time.monotonic()
        started = self.config.app.state.service.startup_complete
        if self.started_at and (started or now > self.started_at + WARM_UP_TIMEOUT_S):
            self.started_at = 0.0
            self.on_started()
        if self.drain_requested_at is not None:
            if self.on_stopping is not None:
                self.on_stopping()
                self.on_stopping = None
            self.should_exit = now >= self.drain_requested_at + self.settings.drain_delay
        return bool(await super().on_tick(counter))

    def drain(self) -> None:
        """Start draining: /readyz returns 503, then the socket is closed. Callable from any thread."""
        self.config.app.state.service.draining = True
        self.drain_requested_at = self.drain_requested_at or time.monotonic()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if (
            self.drain_requested_at is not None
            and not self.worker
            and time.monotonic() > self.drain_requested_at + DUPLICATE_SIGNAL_S
        ):
            os._exit(128 + sig)
        self.drain()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replaces uvicorn's version, which raises the signal again at the end and so determines the exit status."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGTERM,) if self.worker else SIGNALS
        before = {sig: signal.signal(sig, self.handle_exit) for sig in signals}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)


def bind_socket(host: str, port: int) -> socket.socket:
    """Bind a socket, before anything slow happens."""
    with contextlib.ExitStack() as closing:
        try:
            addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            sock = closing.enter_context(socket.socket(addresses[0][0], socket.SOCK_STREAM))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(addresses[0][4])
        except (OSError, UnicodeError) as error:
            reason = (getattr(error, "strerror", None) or str(error)).lower()
            raise ConfigError(f"cannot listen on {host}, port {port}: {reason}; {_bind_advice(error)}.") from None
        closing.pop_all()  # keep the socket open
    sock.set_inheritable(True)
    return sock


def _bind_advice(error: Exception) -> str:
    number = getattr(error, "errno", None)
    if number in (errno.EACCES, errno.EPERM):
        return "try a --port of 1024 or more, or --port 0 for any free port"
    if number == errno.EADDRINUSE:
        return "try another --port, or --port 0 for any free port"
    return "try --host 127.0.0.1 for this machine only, or 0.0.0.0 for all interfaces"


def url_of(sock: socket.socket) -> str:
    """URL for a browser on this machine."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def exit_process(status: int) -> NoReturn:
    """Run exit handlers and end the process, without freeing the model, which takes seconds."""
    atexit._run_exitfuncs()
    multiprocessing.util._exit_function()  # type: ignore[attr-defined] # multiprocessing's handlers
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def fit_open_files(limits: Limits) -> tuple[Limits, int]:
    """Reduce `max_connections` and the backlog to the number of files the process may open; returns both.

    The soft limit (`ulimit -n`) is raised as far as needed and the hard limit allows.
    """
    if os.name != "posix":
        return limits, BACKLOG
    import resource

    own = len(os.listdir("/dev/fd")) + SPARE_DESCRIPTORS
    expected = own + limits.max_connections + ACCEPT_ROUNDS * BACKLOG
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < expected:  # unlimited is -1 or very large
        raised = min(expected, hard) if hard >= 0 else expected
        with contextlib.suppress(OSError, ValueError):  # macOS has a lower limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    if not 0 <= soft < expected:
        return limits, BACKLOG
    free = soft - own
    backlog = min(BACKLOG, free // (3 * ACCEPT_ROUNDS))
    if backlog < 1:
        raise ConfigError(
            f"ulimit -n allows {soft} open files, and {own + 3 * ACCEPT_ROUNDS} are needed; try ulimit -n {2 * own}."
        )
    connections = min(limits.max_connections, free - ACCEPT_ROUNDS * backlog)
    return replace(limits, max_connections=connections), backlog


def serve_in_process(
    loader: ModelLoader,
    sock: socket.socket,
    settings: ServerConfig,
    started: StartedCallback,
    stopping: Callable[[], None] | None = None,
    on_created: Callable[[Server], None] | None = None,
) -> None:
    """Serve in this process until stopped. With `on_created`, which receives the server, it runs as a worker."""
    from vitrail.serve.app import create_app
    from vitrail.serve.image_decoder import limit_pillow_pixels

    limit_pillow_pixels(settings.limits.max_pixels)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # it logs every damaged form
    limits, backlog = fit_open_files(settings.limits)
    batching_for = partial(_batching_for, settings)
    served = loader() if settings.models is None else ()
    app = create_app(
        served,
        limits,
        batching_for(served or None),
        settings.token,
        settings.hosts,
        settings.models,
        batching_for,
        settings.access,
    )
    service = app.state.service

    def report_started() -> None:
        if settings.models is not None:
            names = ", ".join(f"{version.name} {version.version}" for version in service.registry)
            started(names or "no model yet", f"{settings.cores} cores, models of {settings.models.folder}")
            return
        engine = service.default.served.describe_engine(settings.cores)
        started(service.default.name, f"{engine}, batches of up to {service.default.batcher.batch_size}")

    config = uvicorn_config(app, backlog=backlog, timeout_graceful_shutdown=settings.shutdown_timeout)
    server = Server(config, settings, report_started, stopping, worker=on_created is not None)
    if on_created is not None:
        on_created(server)
    server.run([sock])


def _batching_for(settings: ServerConfig, served: ServedModel | None) -> BatchingConfig:
    """Queues and threads of a model; None: of the service itself."""
    return divide_cores(settings.cores, served is None or served.parallel_batches, **settings.batching)


def uvicorn_config(app: Any, **options: Any) -> uvicorn.Config:
    """uvicorn's configuration: little logging, no server header, our protocol limits."""
    return uvicorn.Config(
        app,
        http=limited_protocol(app.state.service.limits, app.state.access),
        lifespan="on",
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,  # longer than usual load balancers, which should close idle connections themselves
        **options,
    )
