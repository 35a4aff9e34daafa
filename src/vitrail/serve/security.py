"""Access checks (host, origin, token) and security headers."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitrail.errors import ConfigError
from vitrail.serve.access import Access
from vitrail.serve.http_errors import RequestError
from vitrail.serve.prometheus_metrics import Metrics
from vitrail.serve.request_record import RequestRecord, current

SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "media-src 'self' blob:; connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(self), microphone=(), geolocation=()",
}
"""Headers of every response: no content from other sites, no inline scripts, no framing."""
RAW_SECURITY_HEADERS = [(name.lower().encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
PUBLIC_PATHS = ("/", "/docs", "/healthz", "/readyz", "/v2/health/live", "/v2/health/ready", "/ping")
PUBLIC_PREFIXES = ("/static/", "/samples/", "/admin/")
"""Paths that need no token: the probes, the pages, which ask the user for it, and /admin, which has its own."""
UNLIMITED_PREFIXES = ("/admin/", "/v2/repository/")
"""Paths of POST routes that compute nothing, so that rate limits do not apply to them."""
TOKEN_PATTERN = re.compile(r"[\x21-\x7e]+")
LOOPBACK_HOST = re.compile(r"localhost|127(\.\d{1,3}){3}|\[::1\]")
"""Host names of loopback, which DNS rebinding cannot use."""
CLIENT_CLOSED = 499
"""Status in the log of a request whose client disconnected before the response."""
PORT = re.compile(r":\d*$")
DEFAULT_PORT = re.compile(r":(80|443)$")

log = logging.getLogger("vitrail.serve")


class SecurityMiddleware:
    """ASGI middleware: checks access and rate limits, adds headers, counts and logs requests, handles errors.

    It turns HEAD into GET; the server does not send the body of the response.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        access: Access,
        hosts: Sequence[str] | None = None,
        routes: Sequence[BaseRoute] = (),
    ) -> None:
        """hosts: accepted host names besides loopback; None: all."""
        self.app, self.metrics, self.access, self.routes = app, metrics, access, routes
        self.hosts = None if hosts is None else {name.lower() for name in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, method = 0, scope["method"]
        if method == "HEAD":
            scope = {**scope, "method": "GET"}
        record = self.access.start(scope)
        context = current.set(record)

        async def counting_receive() -> Message:
            message = await receive()
            record.bytes_in += len(message.get("body", b""))
            return message

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *RAW_SECURITY_HEADERS, *record.headers]
            elif method != "HEAD":
                record.bytes_out += len(message.get("body", b""))
            await send(message)

        try:
            self.check_host(scope)
            self.check_origin(scope)
            await self.check_token(scope, record)
            if not scope["path"].startswith(UNLIMITED_PREFIXES):
                await self.access.limit(scope["method"], record)
            await self.app(scope, counting_receive, send_with_headers)
        except Exception as error:
            if status:
                raise
            await self._send_error(error, scope["path"], send_with_headers)
        finally:
            route = _route_path(scope, self.routes)
            model = scope.get("state", {}).get("model", ("", ""))
            self.metrics.record_request(route, status or CLIENT_CLOSED, record.seconds, model)
            self.access.finish(record, scope, method, route, status or CLIENT_CLOSED)
            current.reset(context)

    async def check_token(self, scope: Scope, record: RequestRecord) -> None:
        """Raise RequestError unless the token is correct or not needed."""
        if not self.access.tokens or scope["path"] in PUBLIC_PATHS or scope["path"].startswith(PUBLIC_PREFIXES):
            return
        scheme, _, given = next(iter(_header_values(scope, b"authorization")), b"").partition(b" ")
        given = given.strip()
        if scheme.lower() != b"bearer" or not given:
            self.access.reject_missing()
        await self.access.authenticate(given, record, scope)

    def check_host(self, scope: Scope) -> None:
        """Raise RequestError unless there is exactly one Host header (RFC 9112) with an accepted name.

        This prevents DNS rebinding, where a page makes its own host name resolve to this server.
        """
        names = _header_values(scope, b"host")
        if len(names) > 1 or (not names and scope["http_version"] != "1.0"):
            raise RequestError(400, "bad_request", f"got {len(names)} Host headers, expected 1.")
        for raw in names if self.hosts is not None else ():
            name = PORT.sub("", raw.decode("latin-1").lower()).rstrip(".")
            if not LOOPBACK_HOST.fullmatch(name) and name not in (self.hosts or ()):
                message = (
                    f"got host {name[:80]!r}, which is not allowed; start the server with --allow-host to allow it."
                )
                raise RequestError(421, "wrong_host", message)

    def check_origin(self, scope: Scope) -> None:
        """Raise RequestError if a page of another site made the browser send this request."""
        if scope["method"] in ("GET", "OPTIONS"):
            return
        site, origin, host = (
            b"".join(_header_values(scope, name)).lower() for name in (b"sec-fetch-site", b"origin", b"host")
        )
        if site:
            same_site = site in (b"same-origin", b"none")
        else:
            sender = origin.decode("latin-1").partition("://")[2]
            same_site = not origin or DEFAULT_PORT.sub("", sender) == DEFAULT_PORT.sub("", host.decode("latin-1"))
        if not same_site:
            raise RequestError(
                403, "cross_site_request", "the request comes from a page of another site, which is not allowed."
            )

    async def _send_error(self, error: Exception, path: str, send: Send) -> None:
        if not isinstance(error, RequestError):
            log.error("unexpected error in a request", exc_info=error)
            error = RequestError(500, "internal_error", "internal error; the server has logged it.")
        self.metrics.errors.labels(error.code).inc()
        headers = {"Content-Type": "application/json", **error.headers}
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        body = error.body(path)
        raw.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": error.status, "headers": raw})
        await send({"type": "http.response.body", "body": body})


def _header_values(scope: Scope, header: bytes) -> list[bytes]:
    """All values of a header."""
    return [value for name, value in scope["headers"] if name == header]


def _route_path(scope: Scope, routes: Sequence[BaseRoute]) -> str:
    """Path of the route as declared, so that clients cannot create metric labels; "other" if there is none."""
    matched: Any = scope.get("route")
    if matched is None:
        matched = next((route for route in routes if route.matches(scope)[0] is not Match.NONE), None)
    return getattr(matched, "path", "other")


def read_token(where: str) -> str:
    """Read the token from a file or an environment variable."""
    path = Path(where)
    if path.is_file():
        token = path.read_text(encoding="utf-8").strip()
    elif where in os.environ:
        token = os.environ[where].strip()
    else:
        raise ConfigError(
            f"--token {where}: there is no such file and no environment variable of that name; do not pass the token "
            "itself, because every user of this machine could read it."
        )
    if not TOKEN_PATTERN.fullmatch(token):
        raise ConfigError(f"the token in {where} is empty or contains spaces; try one made by: openssl rand -hex 32")
    return token
