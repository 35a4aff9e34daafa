"""Responses as JSON lines: partial results while the work is in progress, then the complete response."""

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

from vitrail.serve.http_errors import RequestError
from vitrail.serve.prometheus_metrics import Metrics

NDJSON = "application/x-ndjson"

log = logging.getLogger("vitrail.serve")


def accepts_ndjson(request: Request) -> bool:
    """Whether the Accept header names application/x-ndjson. Never for HTTP/1.0, which has no chunked responses."""
    if request.scope.get("http_version") == "1.0":
        return False
    ranges = [part.split(";") for value in request.headers.getlist("accept") for part in value.lower().split(",")]
    rejected = {"q=0", "q=0.0", "q=0.00", "q=0.000"}
    return any(kind.strip() == NDJSON and rejected.isdisjoint(map(str.strip, rest)) for kind, *rest in ranges)


class LatestValue:
    """Holds the latest partial result. A slow client misses some, so nothing accumulates."""

    def __init__(self) -> None:
        self.value: Any = None
        self._there = asyncio.Event()

    def put(self, value: Any) -> None:
        self.value = value
        self._there.set()

    async def next_before(self, task: asyncio.Task[Any]) -> Any:
        """The next partial result; None if the task ends first."""
        wait = asyncio.ensure_future(self._there.wait())
        try:
            await asyncio.wait((wait, task), return_when=asyncio.FIRST_COMPLETED)
        finally:
            wait.cancel()
        if task.done():
            return None
        self._there.clear()
        return self.value


async def stream_ndjson(answer: Coroutine[Any, Any, Response], latest: LatestValue, metrics: Metrics) -> Response:
    """Response that streams the values of `latest` as lines until `answer` is complete.

    An error before the first line keeps its own status.
    """
    task = asyncio.ensure_future(answer)
    try:
        first = await latest.next_before(task)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if first is None and task.result().status_code != 200:
        return task.result()
    return _NDJSONResponse(_ndjson_lines(first, task, latest, metrics))


async def _ndjson_lines(
    partial: Any, task: asyncio.Task[Response], latest: LatestValue, metrics: Metrics
) -> AsyncGenerator[bytes, None]:
    try:
        while partial is not None:
            yield json.dumps({"partial": partial}).encode()
            partial = await latest.next_before(task)
        yield await _final_line(task, metrics)
    finally:
        task.cancel()


async def _final_line(task: asyncio.Task[Response], metrics: Metrics) -> bytes:
    """The complete response, or the error as JSON, because the status has already been sent."""
    try:
        return bytes((await task).body)
    except RequestError as request_error:
        failure = request_error
    except Exception as error:
        log.error("unexpected error in a request after its first line", exc_info=error)
        failure = RequestError(500, "internal_error", "internal error; the server has logged it.")
    metrics.errors.labels(failure.code).inc()
    return failure.body()


class _NDJSONResponse(Response):  # type: ignore[misc]
    """Streams lines with backpressure; the route itself detects a disconnect."""

    media_type = NDJSON

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
