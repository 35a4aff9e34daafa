"""Who may ask, and what a browser is told it may do with the answers."""

from __future__ import annotations

import hmac
import logging
import os
import re
import time
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitrail.errors import ConfigError
from vitrail.serve.metrics import Metrics
from vitrail.serve.problems import Problem

HEADERS = {
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
"""On every answer: nothing from elsewhere, nothing inline, nobody's frame."""
RAW = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
CLOSED = ("/v1/", "/metrics")
"""What needs the token, where there is one."""
TOKEN = re.compile(r"[\x21-\x7e]+")

log = logging.getLogger("vitrail.serve")


class Guard:
    """Around the routes: the token, the headers, the count, and a plain 500 for what nobody foresaw."""

    def __init__(self, app: ASGIApp, metrics: Metrics, token: str | None = None) -> None:
        self.app, self.metrics = app, metrics
        self.wanted = None if token is None else b"Bearer " + token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.perf_counter(), 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *RAW]
            await send(message)

        try:
            self.check(scope)
            await self.app(scope, receive, sending)
        except Exception as error:
            if status:
                raise
            await _answer(error, sending)
        finally:
            route = _route(scope)
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.latency.labels(route).observe(time.perf_counter() - start)

    def check(self, scope: Scope) -> None:
        """Raise Problem unless the token is there, where one is needed."""
        if self.wanted is None or not scope["path"].startswith(CLOSED):
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if not hmac.compare_digest(given, self.wanted):
            message = "this needs a token: send Authorization: Bearer TOKEN."
            raise Problem(401, "token_wanted", message, {"WWW-Authenticate": "Bearer"})


async def _answer(error: Exception, send: Send) -> None:
    if not isinstance(error, Problem):
        log.error("a request failed in a way nobody foresaw", exc_info=error)
        error = Problem(500, "internal_error", "something went wrong here; it has been written down.")
    headers = {"Content-Type": "application/json", **error.headers}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    body = error.body()
    raw.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def _route(scope: Scope) -> str:
    """As it was declared, so that no client can make up names for the metrics."""
    found: Any = scope.get("route")
    return getattr(found, "path", "other")


def read_token(where: str) -> str:
    """The token in a file, or in an environment variable of this name."""
    path = Path(where)
    if path.is_file():
        token = path.read_text(encoding="utf-8").strip()
    elif where in os.environ:
        token = os.environ[where].strip()
    else:
        raise ConfigError(
            f"--token {where}: there is no such file and no environment variable of that name; the token itself "
            "is not given here, where everyone on this machine could read it."
        )
    if not TOKEN.fullmatch(token):
        raise ConfigError(f"the token in {where} is empty or has spaces in it; try one made by: openssl rand -hex 32")
    return token
