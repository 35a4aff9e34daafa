"""uvicorn's HTTP protocol with timeouts for request headers and reading, and limits on connections and pipelining.

uvicorn itself only limits idle keep-alive connections. Without these limits a client could hold all connections by
sending slowly or opening many, or fill the memory with pipelined requests.
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

from vitrail.serve.access import Access
from vitrail.serve.client_address import address_key
from vitrail.serve.http_errors import RequestError
from vitrail.serve.limits import Limits
from vitrail.serve.quota import default_client_limit
from vitrail.serve.request_record import choose_request_id

MAX_HEADER_BYTES = 64 * 2**10
"""Size of the request headers; the httptools protocol of uvicorn has no limit."""
MAX_PIPELINED = 64
"""Pipelined requests on one connection."""


MAX_UNSENT_BYTES = 64 * 2**10
"""Unsent bytes in the send buffer of the kernel. With megabytes, a client that stops reading is noticed late."""


class LimitedProtocol(asyncio.Protocol):
    """Mixin for uvicorn's protocol (httptools or h11) that enforces `Limits`."""

    client: tuple[str, int] | None
    cycle: Any
    connections: set[Any]
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport

    limits = Limits()
    access: Access | None = None
    """Knows the trusted proxies, and writes the access log."""
    client_key = ""
    """Identifies the client for the limit per client."""
    received_data = False
    """Whether the client has sent anything."""
    idle_since = 0.0
    """When the connection became idle, on the loop's clock."""
    closing = False
    """Whether the connection is closed after the current response, because of too many pipelined requests."""
    header_bytes = 0
    """Bytes received of incomplete headers."""
    _header_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _unread_bytes = 0

    @property
    def host(self) -> str:
        """Address of the other end; empty for a Unix socket."""
        return (self.client or ("",))[0]

    @property
    def idle(self) -> bool:
        """Whether no request is in progress."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        own = transport.get_extra_info("socket")
        if hasattr(socket, "TCP_NOTSENT_LOWAT") and own.family in (socket.AF_INET, socket.AF_INET6):
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
        self._start_header_timer()
        self.client_key = address_key(self.host)
        max_connections, client_limit = self.limits.max_connections, default_client_limit(self.limits.max_connections)
        same_client = [connection for connection in self.connections if connection.client_key == self.client_key]
        behind_proxy = self.access is not None and self.access.config.proxies.trusts(self.host)
        if len(same_client) > client_limit and not behind_proxy:  # independent of other clients
            what = (
                f"{len(same_client) - 1:,} connections are open for your address, at most {client_limit:,} are allowed"
            )
            self._evict_idle(same_client, 429, what)
        elif len(self.connections) > max_connections:
            self._evict_idle(self.connections, 503, f"{max_connections:,} connections are open already")

    def data_received(self, data: bytes) -> None:
        before, self.received_data = self.cycle, True
        body = before is not None and before.more_body
        super().data_received(data)
        if self.cycle is not before:  # headers complete
            self._cancel_header_timer()
            self.header_bytes = 0
        elif not body and self._headers_exceed_limit(len(data)):
            return
        elif self._header_timer is None and self.idle:  # first bytes of the next request, or rest of a rejected one
            self._start_header_timer()
        if len(self._pipelined) > MAX_PIPELINED:
            self._answer_and_close()

    @property
    def _pipelined(self) -> deque[Any]:
        """Pipelined requests that wait for their turn; h11 reads only one request ahead."""
        return getattr(self, "pipeline", deque())

    def _answer_and_close(self) -> None:
        """Drop all pipelined requests and close the connection after the current response."""
        self._pipelined.clear()
        self.closing = True
        self.transport.pause_reading()

    def send_400_response(self, msg: str) -> None:
        """Replaces uvicorn's plain-text response, which a client could take for the response to an earlier request."""
        running = self.cycle
        in_body = not self.idle and running.more_body and not running.response_started and not self._pipelined
        if not self.idle and not in_body:
            self._answer_and_close()
            return
        hint = getattr(sys.exception(), "error_status_hint", 400)  # set by h11 if the headers are too long
        if hint == 431 or len(getattr(self, "url", b"")) >= MAX_HEADER_BYTES - 1:  # httptools rejects such long URLs
            self._refuse(_headers_too_large())
        else:
            self._refuse(RequestError(400, "bad_request", "this is not a valid HTTP/1.1 request."))
        self.transport.close()

    def _headers_exceed_limit(self, count: int) -> bool:
        """Count bytes of incomplete headers; close the connection and return True if they are too long."""
        self.header_bytes += count
        if (
            self.header_bytes <= MAX_HEADER_BYTES or self.transport.is_closing() or not hasattr(self, "pipeline")
        ):  # h11 has its own limit
            return False
        if self.idle:
            self._refuse(_headers_too_large())
        self.transport.close()
        return True

    def on_response_complete(self) -> None:
        self.idle_since = self.loop.time()
        if self.closing:
            self.transport.close()
        else:
            super().on_response_complete()  # type: ignore[misc]

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_write_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_write_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_header_timer()
        self._cancel_write_timer()
        super().connection_lost(exc)

    def _start_header_timer(self) -> None:
        self.idle_since = self.loop.time()
        self._header_timer = self.loop.call_later(self.limits.header_timeout, self._on_header_timeout)

    def _cancel_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _start_write_timer(self) -> None:
        self._unread_bytes = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(self.limits.body_timeout, self._check_write_progress)

    def _check_write_progress(self) -> None:
        """Abort if the client has read nothing since the last check; a slow client may continue."""
        if self.transport.get_write_buffer_size() < self._unread_bytes:
            self._start_write_timer()
        else:
            self.transport.abort()

    def _cancel_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _on_header_timeout(self) -> None:
        if self.received_data and self.cycle is None:
            seconds = f"{self.limits.header_timeout:g} seconds"
            self._refuse(RequestError(408, "request_timeout", f"the headers did not arrive within {seconds}."))
        self.transport.close()

    def _evict_idle(self, connections: Iterable[Any], status: int, what: str) -> None:
        """Close the connection that has been idle longest; if none is idle, reject this one."""
        idle = [
            connection
            for connection in connections
            if connection is not self and connection.idle and not connection.transport.is_closing()
        ]
        if idle:
            min(idle, key=lambda connection: connection.idle_since).transport.abort()
            return
        self._refuse(RequestError(status, "too_many_connections", f"{what}; try again in 1 s.", {"Retry-After": "1"}))
        self.transport.close()

    def _refuse(self, problem: RequestError) -> None:
        """Write an error response directly to the transport, because there is no request for the app."""
        request_id = choose_request_id(())
        body = problem.body(request_id=request_id)
        lines = [f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}", "content-type: application/json"]
        lines += [f"{name.lower()}: {value}" for name, value in problem.headers.items()]
        lines += [f"x-request-id: {request_id}", f"content-length: {len(body)}", "connection: close", "", ""]
        if self.access is not None:
            self.access.refused(self.host, request_id, problem.status, problem.code)
        self.transport.write("\r\n".join(lines).encode() + body)


def _headers_too_large() -> RequestError:
    return RequestError(431, "headers_too_large", f"the headers have more than {MAX_HEADER_BYTES:,} bytes.")


def limited_protocol(limits: Limits, access: Access | None = None) -> type[Any]:
    """Protocol class with these limits, for uvicorn's `http` option."""
    return type("Protocol", (LimitedProtocol, AutoHTTPProtocol), {"limits": limits, "access": access})
