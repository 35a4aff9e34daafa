"""What is known about a request: its id, its client, and how long each stage took.

Logs, spans and error responses read it. `current_record` finds it in everything that runs on behalf of the request.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from vitrail.serve.rate_limit import RateLimit

REQUEST_ID = re.compile(rb"[A-Za-z0-9._~:@/+=-]{1,128}")
"""A request id that is taken over from a client."""
MAX_STAGES = 64
"""Stages kept per request; one with many images or steps has no more."""


@dataclass(frozen=True)
class Stage:
    """A part of a request, with its start and end on the clock of `time.perf_counter`."""

    name: str
    start: float
    end: float
    batch_size: int | None = None


class RequestRecord:
    """One request. The stages are added by the threads that run them."""

    def __init__(self, request_id: str = "", address: str = "") -> None:
        self.id, self.address = request_id, address
        self.client = address
        """Identity for limits: the address, or the token if it has a name."""
        self.token: str | None = None
        """Name of the token."""
        self.trace_id: str | None = None
        self.span: Any = None
        self.started, self.started_at = time.perf_counter(), time.time()
        self.bytes_in = self.bytes_out = self.images = 0
        self.error: str | None = None
        """Code of the error response."""
        self.headers: list[tuple[bytes, bytes]] = [(b"x-request-id", request_id.encode())]
        """Headers of the response."""
        self.rate_limit: RateLimit | None = None
        self.on_images: Callable[[int], None] | None = None
        """Called with the number of images as soon as it is known."""
        self.stages: list[Stage] = []
        self.engine_seconds = 0.0
        self.queue_seconds: float | None = None
        """The longest time that an image waited for an engine thread after it was decoded."""
        self._decoded_at: dict[int, float] = {}
        self._last_batch = -1.0

    def count_images(self, count: int) -> None:
        """Count images that have been accepted for processing; called on the event loop."""
        self.images += count
        if self.on_images is not None:
            self.on_images(count)

    def decoded(self, index: int, start: float) -> None:
        """Record that an image of the request has just been decoded."""
        now = time.perf_counter()
        self._decoded_at[index] = now
        self._add(Stage("decode", start, now))

    def ran_batch(self, index: int, start: float, end: float, size: int) -> None:
        """Record a batch with an image of the request."""
        queued_at = self._decoded_at.pop(index, start)
        self.queue_seconds = max(self.queue_seconds or 0.0, start - queued_at)
        if start == self._last_batch:  # with another image of this request
            return
        self._last_batch = start
        self.engine_seconds += end - start
        self._add(Stage("queue", queued_at, start))
        self._add(Stage("engine", start, end, size))

    def ran_step(self, start: float) -> None:
        """Record a step of an explanation that has just ended."""
        now = time.perf_counter()
        if self.queue_seconds is None:
            queued_at = self._decoded_at.pop(0, start)
            self.queue_seconds = start - queued_at
            self._add(Stage("queue", queued_at, start))
        self.engine_seconds += now - start
        self._add(Stage("engine", start, now))

    def _add(self, stage: Stage) -> None:
        if len(self.stages) < MAX_STAGES:
            self.stages.append(stage)

    @property
    def seconds(self) -> float:
        """Seconds since the request headers arrived."""
        return time.perf_counter() - self.started


current: ContextVar[RequestRecord | None] = ContextVar("vitrail_request", default=None)


def current_record() -> RequestRecord:
    """The record of the request that this code runs for; outside of requests, one that nobody reads."""
    return current.get() or RequestRecord()


def choose_request_id(given: Iterable[bytes]) -> str:
    """The id sent by the client if there is exactly one and it is well-formed, otherwise a new one."""
    values = list(given)
    if len(values) == 1 and REQUEST_ID.fullmatch(values[0]):
        return values[0].decode()
    return secrets.token_hex(16)


def join_ids(records: Iterable[RequestRecord]) -> str:
    """The ids of requests for a log line, each once."""
    return ", ".join(dict.fromkeys(record.id for record in records if record.id)) or "none"


class RequestIdFilter(logging.Filter):
    """Adds ` request=ID` to log records of a request, as `%(request)s`."""

    def filter(self, record: logging.LogRecord) -> bool:
        found = current.get()
        record.request = f" request={found.id}" if found is not None and found.id else ""
        return True
