"""Who may ask, and what a browser is told it may do with the answers."""

from __future__ import annotations

import hmac
import logging
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.routing import BaseRoute, Match
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
OPEN = ("/", "/docs", "/healthz", "/readyz")
OPEN_FOLDERS = ("/static/", "/samples/")
"""What needs no token, where there is one: the probes, and the pages that ask for it. All else needs it."""
TOKEN = re.compile(r"[\x21-\x7e]+")
LOCAL = re.compile(r"localhost|127(\.\d{1,3}){3}|\[::1\]")
"""What a machine calls itself: names that no stranger can let point here."""
PORT = re.compile(r":\d*$")
USUAL = re.compile(r":(80|443)$")

log = logging.getLogger("vitrail.serve")


class Guard:
    """Around the routes: names, tokens, the headers, the count, and a plain 500 for what nobody foresaw.

    It turns HEAD into GET, of whose answer the server sends no body.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        token: str | None = None,
        hosts: Sequence[str] | None = None,
        routes: Sequence[BaseRoute] = (),
    ) -> None:
        """`hosts`: names it is asked by, beside those of loopback; None: any."""
        self.app, self.metrics, self.routes = app, metrics, routes
        self.wanted = None if token is None else token.encode()
        self.hosts = None if hosts is None else {name.lower() for name in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.perf_counter(), 0
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *RAW]
            await send(message)

        try:
            self.check_host(scope)
            self.check_site(scope)
            self.check(scope)
            await self.app(scope, receive, sending)
        except Exception as error:
            if status:
                raise
            await self._answer(error, sending)
        finally:
            route = _route(scope, self.routes)
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.latency.labels(route).observe(time.perf_counter() - start)

    def check(self, scope: Scope) -> None:
        """Raise Problem unless the token is there and right, where one is needed."""
        if self.wanted is None or scope["path"] in OPEN or scope["path"].startswith(OPEN_FOLDERS):
            return
        scheme, _, given = next(iter(_all(scope, b"authorization")), b"").partition(b" ")
        given = given.strip()
        if scheme.lower() != b"bearer" or not given:
            message = "this needs a token: send Authorization: Bearer TOKEN."
            raise Problem(401, "token_wanted", message, {"WWW-Authenticate": "Bearer"})
        if not hmac.compare_digest(given, self.wanted):
            message = "this token is wrong: send the one that whoever runs this server has given to it."
            raise Problem(401, "token_wrong", message, {"WWW-Authenticate": 'Bearer error="invalid_token"'})

    def check_host(self, scope: Scope) -> None:
        """Raise Problem without exactly one Host, as RFC 9112 has it, or where it is another's name.

        A page's owner could let that name point here.
        """
        names = _all(scope, b"host")
        if len(names) > 1 or (not names and scope["http_version"] != "1.0"):
            raise Problem(400, "bad_request", f"got {len(names)} Host headers, wanted one.")
        for raw in names if self.hosts is not None else ():
            name = PORT.sub("", raw.decode("latin-1").lower()).rstrip(".")
            if not LOCAL.fullmatch(name) and name not in (self.hosts or ()):
                message = f"this server is not called {name[:80]!r}; whoever runs it can pass --allow-host with a name."
                raise Problem(421, "wrong_host", message)

    def check_site(self, scope: Scope) -> None:
        """Raise Problem where a page from elsewhere makes somebody's browser send something here."""
        if scope["method"] in ("GET", "OPTIONS"):
            return
        site, origin, host = (b"".join(_all(scope, name)).lower() for name in (b"sec-fetch-site", b"origin", b"host"))
        if site:
            own = site in (b"same-origin", b"none")
        else:
            sender = origin.decode("latin-1").partition("://")[2]
            own = not origin or USUAL.sub("", sender) == USUAL.sub("", host.decode("latin-1"))
        if not own:
            raise Problem(403, "other_site", "this was sent by a page from another site; only its own are answered.")

    async def _answer(self, error: Exception, send: Send) -> None:
        if not isinstance(error, Problem):
            log.error("a request failed in a way nobody foresaw", exc_info=error)
            error = Problem(500, "internal_error", "something went wrong here; it has been written down.")
        self.metrics.refused.labels(error.code).inc()
        headers = {"Content-Type": "application/json", **error.headers}
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        body = error.body()
        raw.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": error.status, "headers": raw})
        await send({"type": "http.response.body", "body": body})


def _all(scope: Scope, wanted: bytes) -> list[bytes]:
    """The values of a header."""
    return [value for name, value in scope["headers"] if name == wanted]


def _route(scope: Scope, routes: Sequence[BaseRoute]) -> str:
    """As it was declared, so that no client can make up names for the metrics; also where no route was asked."""
    found: Any = scope.get("route")
    if found is None:
        found = next((route for route in routes if route.matches(scope)[0] is not Match.NONE), None)
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
