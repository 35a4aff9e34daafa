"""Connections that do not wait for ever: for a request's headers, for an answer to be read, for room.

uvicorn has a limit for connections that are silent between two requests and none for these: a client that
sends a byte now and then, or opens many connections, could hold them all, and one that sends thousands of
requests without waiting for answers would have them all kept.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections import deque
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from vitrail.serve.limits import Limits
from vitrail.serve.problems import Problem
from vitrail.serve.quota import client_of, share_of

HEADERS = 64 * 2**10
"""Bytes of a request's headers; one of uvicorn's two protocols would take any number."""
AHEAD = 64
"""Requests that may wait for the answer to one before them on the same connection."""


UNSENT = 64 * 2**10
"""Bytes that the system keeps unsent: with more, megabytes, it would be long before a slow client is seen to read."""


class Bounded(asyncio.Protocol):
    """What stands before uvicorn's own protocol, whichever that is."""

    client: tuple[str, int] | None
    cycle: Any
    connections: set[Any]
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport

    limits = Limits()
    address = ""
    """Whom it is counted for."""
    began = False
    """Whether anything has been sent."""
    since = 0.0
    """When it began to have nothing to do, on the loop's clock."""
    overfull = False
    """Whether it sent too many requests at once; it is closed after the answer to the one that runs."""
    heard = 0
    """Bytes of headers that are not complete."""
    _headers: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None
    _unread = 0

    @property
    def idle(self) -> bool:
        """Whether no request of it is being answered."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            own = transport.get_extra_info("socket")
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)
        self._wait()
        self.address = client_of({"client": self.client})
        most, share = self.limits.connections, share_of(self.limits.connections)
        own = [one for one in self.connections if one.address == self.address]
        if len(own) > share:  # whatever others have
            what = f"{len(own) - 1:,} connections are open for your address, which may have {share:,}"
            self._make_room(own, 429, what)
        elif len(self.connections) > most:
            self._make_room(self.connections, 503, f"{most:,} connections are open already")

    def data_received(self, data: bytes) -> None:
        before, self.began = self.cycle, True
        body = before is not None and before.more_body
        super().data_received(data)
        if self.cycle is not before:  # the headers are complete
            self._stop_waiting()
            self.heard = 0
        elif not body and self._too_much(len(data)):
            return
        elif self._headers is None and self.idle:  # the first bytes of another request, or the rest of a refused one
            self._wait()
        if len(self._ahead) > AHEAD:
            self._answer_and_close()

    @property
    def _ahead(self) -> deque[Any]:
        """Requests that wait for the answer to another; h11 reads no further than the next one."""
        return getattr(self, "pipeline", deque())

    def _answer_and_close(self) -> None:
        """Answer the request that is being answered, and no other."""
        self._ahead.clear()
        self.overfull = True
        self.transport.pause_reading()

    def send_400_response(self, msg: str) -> None:
        """In place of uvicorn's plain text, which could also be taken for the answer to an earlier request."""
        running = self.cycle
        in_body = not self.idle and running.more_body and not running.response_started and not self._ahead
        if not self.idle and not in_body:
            self._answer_and_close()
            return
        hint = getattr(sys.exception(), "error_status_hint", 400)  # of h11, which counts the headers itself
        if hint == 431 or len(getattr(self, "url", b"")) >= HEADERS - 1:  # httptools parses no address as long as this
            self._refuse(_headers_too_large())
        else:
            self._refuse(Problem(400, "bad_request", "this is not a valid HTTP/1.1 request."))
        self.transport.close()

    def _too_much(self, count: int) -> bool:
        """Whether headers that are still not complete have become too long; then the connection is closed."""
        self.heard += count
        if self.heard <= HEADERS or self.transport.is_closing() or not hasattr(self, "pipeline"):  # h11 has its own
            return False
        if self.idle:
            self._refuse(_headers_too_large())
        self.transport.close()
        return True

    def on_response_complete(self) -> None:
        self.since = self.loop.time()
        if self.overfull:
            self.transport.close()
        else:
            super().on_response_complete()  # type: ignore[misc]

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_watching()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self.since = self.loop.time()
        self._headers = self.loop.call_later(self.limits.headers, self._too_slow)

    def _stop_waiting(self) -> None:
        if self._headers is not None:
            self._headers.cancel()
            self._headers = None

    def _watch(self) -> None:
        self._unread = self.transport.get_write_buffer_size()
        self._reading = self.loop.call_later(self.limits.seconds, self._check_reading)

    def _check_reading(self) -> None:
        """Leave a client that has read nothing since it was last looked at; a slow one goes on."""
        if self.transport.get_write_buffer_size() < self._unread:
            self._watch()
        else:
            self.transport.abort()

    def _stop_watching(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _too_slow(self) -> None:
        if self.began and self.cycle is None:
            seconds = f"{self.limits.headers:g} seconds"
            self._refuse(Problem(408, "too_slow", f"the headers did not arrive within {seconds}."))
        self.transport.close()

    def _make_room(self, connections: Iterable[Any], status: int, what: str) -> None:
        """Close that of them which has been idle for longest; where none is, this one."""
        others = [one for one in connections if one is not self and one.idle and not one.transport.is_closing()]
        if others:
            min(others, key=lambda one: one.since).transport.abort()
            return
        self._refuse(Problem(status, "too_many_connections", f"{what}; try again in 1 s.", {"Retry-After": "1"}))
        self.transport.close()

    def _refuse(self, problem: Problem) -> None:
        """Written here, since there is no request that could be answered."""
        body = problem.body()
        lines = [f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}", "content-type: application/json"]
        lines += [f"{name.lower()}: {value}" for name, value in problem.headers.items()]
        lines += [f"content-length: {len(body)}", "connection: close", "", ""]
        self.transport.write("\r\n".join(lines).encode() + body)


def _headers_too_large() -> Problem:
    return Problem(431, "headers_too_large", f"the headers have more than {HEADERS:,} bytes.")


def within(limits: Limits) -> type[Any]:
    """The protocol with these limits, as uvicorn takes it."""
    return type("Protocol", (Bounded, AutoHTTPProtocol), {"limits": limits})
