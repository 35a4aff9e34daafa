"""Answers as JSON lines: partial results while the work goes on, the whole answer last."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from vitrail.serve.metrics import Metrics
from vitrail.serve.problems import Problem

LINES = "application/x-ndjson"

log = logging.getLogger("vitrail.serve")


def wants_lines(request: Request) -> bool:
    """Whether an Accept header names JSON lines; `*/*` does not. A client of HTTP/1.0 could not tell where they end."""
    if request.scope.get("http_version") == "1.0":
        return False
    ranges = [part.split(";") for value in request.headers.getlist("accept") for part in value.lower().split(",")]
    refused = {"q=0", "q=0.0", "q=0.00", "q=0.000"}
    return any(kind.strip() == LINES and refused.isdisjoint(map(str.strip, rest)) for kind, *rest in ranges)


class Newest:
    """Holds the last partial result that is not sent yet: a slow client misses some and nothing piles up."""

    def __init__(self) -> None:
        self.value: Any = None
        self._there = asyncio.Event()

    def put(self, value: Any) -> None:
        self.value = value
        self._there.set()

    async def before(self, task: asyncio.Task[Any]) -> Any:
        """The next partial result, or None when the task ends first."""
        wait = asyncio.ensure_future(self._there.wait())
        try:
            await asyncio.wait((wait, task), return_when=asyncio.FIRST_COMPLETED)
        finally:
            wait.cancel()
        if task.done():
            return None
        self._there.clear()
        return self.value


async def in_lines(answer: Coroutine[Any, Any, Response], newest: Newest, metrics: Metrics) -> Response:
    """The response of a route, with lines for what `newest` is given before it is there.

    What fails before the first line is answered with its own status, as without lines.
    """
    task = asyncio.ensure_future(answer)
    try:
        first = await newest.before(task)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if first is None and task.result().status_code != 200:
        return task.result()
    return _Lines(_written(first, task, newest, metrics))


async def _written(
    partial: Any, task: asyncio.Task[Response], newest: Newest, metrics: Metrics
) -> AsyncGenerator[bytes, None]:
    try:
        while partial is not None:
            yield json.dumps({"partial": partial}).encode()
            partial = await newest.before(task)
        yield await _last(task, metrics)
    finally:
        task.cancel()


async def _last(task: asyncio.Task[Response], metrics: Metrics) -> bytes:
    """The answer, or what went wrong: the status has been sent already."""
    try:
        return bytes((await task).body)
    except Problem as found:
        problem = found
    except Exception as error:
        log.error("a request failed unexpectedly after its first line", exc_info=error)
        problem = Problem(500, "internal_error", "something went wrong here; it has been written down.")
    metrics.refused.labels(problem.code).inc()
    return problem.body()


class _Lines(Response):  # type: ignore[misc]
    """Sends each line when the client has room for it; the route itself notices a client that hangs up."""

    media_type = LINES

    def __init__(self, lines: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.lines = lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with contextlib.aclosing(self.lines):
            async for line in self.lines:
                await send({"type": "http.response.body", "body": line + b"\n", "more_body": True})
        await send({"type": "http.response.body", "body": b""})
