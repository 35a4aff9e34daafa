"""The two routes that Amazon SageMaker requires of a container: GET /ping and POST /invocations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import Request
from fastapi.responses import Response

from vitrail.serve.http_errors import RequestError

IMAGE_TYPE = b"application/x-image"
"""SageMaker's content type of an image in any format."""
JSON_TYPES = ("*/*", "application/*", "application/json")

Route = Callable[[Request], Awaitable[Response]]


async def invoke(request: Request, answer: Route) -> Response:
    """Answer a request to /invocations like `answer` (/v1/predict or /v1/embed)."""
    _check_accept(request)
    _ = request.state  # created here, because both requests share it
    headers = [
        (name, _content_type(value) if name == b"content-type" else value) for name, value in request.scope["headers"]
    ]
    return await answer(Request({**request.scope, "headers": headers}, request.receive))


def _check_accept(request: Request) -> None:
    """Raise RequestError unless the client accepts JSON."""
    accepted = ",".join(request.headers.getlist("accept")).lower()
    types = {part.partition(";")[0].strip() for part in accepted.split(",")}
    if accepted and types.isdisjoint(JSON_TYPES):
        message = f"got Accept {accepted[:80]!r}, expected application/json, the only type of a response."
        raise RequestError(406, "not_acceptable", message)


def _content_type(value: bytes) -> bytes:
    return b"application/octet-stream" if value.partition(b";")[0].strip().lower() == IMAGE_TYPE else value
