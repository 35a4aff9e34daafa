"""Parses a request body into images and parameters, within limits on size, count and time."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from vitrail.serve.batching import deadline_error
from vitrail.serve.http_errors import ClientDisconnected, RequestError
from vitrail.serve.limits import Limits
from vitrail.serve.quota import Lease

IMAGE_FIELDS = ("images", "image", "file")
"""Form fields that hold images."""
TEXT_PARAMETERS = ("target", "fill", "methods", "model", "version")
"""Parameters that are text, and need no JSON quotes in a form or query string."""
LIST_PARAMETERS = ("hide", "layers", "methods")
"""Parameters that are lists: one JSON list, or one field per element."""
MAX_FORM_FIELDS = 5000
"""Fields of a form, which may have one per hidden patch."""
MAX_VALUES = 20_000
"""Parameter values in one request. They are counted before they are parsed, because parsing blocks the event loop."""
CHARACTERS_PER_ESCAPE = 32
"""A JSON body may have one escape in this many characters. Some clients escape the / of base64, which is one in 64."""
UNDECLARED_TYPES = ("", "application/x-www-form-urlencoded")
"""Content types of clients that do not set one, such as curl: the body is an image if its first bytes say so."""
IMAGE_SIGNATURE = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|GIF8[79]a|RIFF....WEBP|BM.{4}\0\0\0\0|II\*\0|MM\0\*|P[56]\s|....ftypavi[fs]", re.S
)
URL_PATTERN = re.compile(r"\s*[a-z][a-z0-9+.-]{0,20}://", re.I)
DEADLINE_PATTERN = re.compile(r"[1-9]\d{0,8}")
Chunks = AsyncGenerator[bytes, None]
"""A request body, in pieces."""


@dataclass
class RequestBody:
    """Parsed request body."""

    images: list[bytes | str] = field(default_factory=list)
    """Encoded images: bytes, or base64 text if the body is JSON."""
    parameters: dict[str, Any] = field(default_factory=dict)
    client: str = ""
    """Key of the client, for quotas."""

    @property
    def size(self) -> int:
        return sum(map(len, self.images))


class _FormParser(MultiPartParser):
    """Starlette's form parser, but keeps files in memory (bodies are limited) and detects a missing end."""

    spool_max_size = 2**62
    complete = False

    def on_headers_finished(self) -> None:
        """Treat an image field without a file name as a file."""
        part = self._current_part
        _, options = parse_options_header(part.content_disposition)
        if b"filename" not in options and options.get(b"name", b"").decode("latin-1") in IMAGE_FIELDS:
            part.content_disposition = (part.content_disposition or b"") + b'; filename="image"'
        super().on_headers_finished()

    def on_end(self) -> None:
        self.complete = True

    def close(self) -> None:
        for file in self._files_to_close_on_error:
            file.close()


BodyParser = Callable[[Request, Chunks, Limits], Awaitable[RequestBody]]
"""Parses a body of one route."""


async def parse_body(request: Request, chunks: Chunks, limits: Limits) -> RequestBody:
    """Parse a body according to its content type: one image, a form, or JSON, with parameters."""
    content_type = request_type(request)
    supported = ("multipart/form-data", "application/json", "application/octet-stream", *UNDECLARED_TYPES)
    if content_type not in supported and not _is_image_type(content_type):
        raise _unsupported_type(content_type)
    if content_type == "multipart/form-data":
        body = await _parse_form(request.headers, chunks, limits)
    elif content_type == "application/json":
        body = _body_from_json(await join_chunks(chunks))
    else:
        image = await _read_image(content_type, chunks)
        body = RequestBody([image] if image else [])
    body.parameters = (
        _parse_parameters(request.query_params.multi_items()) | body.parameters
    )  # the body takes precedence
    return body


async def read_body(
    request: Request,
    limits: Limits,
    lease: Lease,
    deadline: float | None = None,
    parse: BodyParser = parse_body,
) -> RequestBody:
    """Receive and parse the body. `deadline` is on the clock of `time.monotonic`."""
    _check_content_encoding(", ".join(request.headers.getlist("content-encoding")))
    remaining = limits.body_timeout if deadline is None else max(deadline - time.monotonic(), 0)
    try:
        async with asyncio.timeout(min(limits.body_timeout, remaining)):
            body = await parse(request, _receive_chunks(request, limits, lease), limits)
    except TimeoutError:
        if remaining < limits.body_timeout:
            problem = deadline_error()
            problem.headers["Connection"] = "close"
            raise problem from None
        message = f"the body did not arrive within {limits.body_timeout:g} seconds."
        raise RequestError(408, "request_timeout", message, {"Connection": "close"}) from None
    if not body.images:
        raise RequestError(400, "no_image", "the request has no image; expected 1 or more.")
    if len(body.images) > limits.max_images:
        raise too_many_images(limits)
    body.client = lease.client
    return body


def request_type(request: Request) -> str:
    """Content type in lower case without its options; empty if there is none."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def join_chunks(chunks: Chunks) -> bytes:
    return b"".join([chunk async for chunk in chunks])


async def _read_image(content_type: str, chunks: Chunks) -> bytes:
    """Read a body that is one image. If the content type is not set, check the first bytes."""
    data, unchecked = bytearray(), content_type in UNDECLARED_TYPES
    async for chunk in chunks:
        data += chunk
        if unchecked and len(data) >= 16:
            unchecked = False
            if not IMAGE_SIGNATURE.match(data):
                raise _unsupported_type(content_type)
    if unchecked:
        raise _unsupported_type(content_type)
    return bytes(data)


async def _receive_chunks(request: Request, limits: Limits, lease: Lease) -> Chunks:
    """Receive the body in chunks, within the size limit and the quota."""
    content_length = request.headers.get("content-length", "")
    if content_length.isdecimal() and int(content_length) > limits.max_bytes:
        raise _body_too_large(limits)
    got = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk = message.get("body", b"")
        got += len(chunk)
        request.state.whole, request.state.received = not message.get("more_body"), got
        if got > limits.max_bytes:
            raise _body_too_large(limits)
        if chunk:
            lease.acquire(len(chunk))
        if chunk:
            yield chunk
        if request.state.whole:
            return


async def discard_body(request: Request, limit: int) -> None:
    """Receive and drop the rest of a rejected body, because many clients read the response only after sending."""
    got = 0
    while got < limit and not getattr(request.state, "whole", False):
        message = await request.receive()
        got += len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            return


async def _parse_form(headers: Headers, chunks: Chunks, limits: Limits) -> RequestBody:
    limit = MAX_FORM_FIELDS + limits.max_images + 1
    parser = _FormParser(
        headers, _limit_parts(headers, chunks, limit), max_files=limits.max_images, max_fields=MAX_FORM_FIELDS
    )
    try:
        return _body_from_form(await parser.parse(), parser.complete)
    except MultiPartException as error:
        if "Too many files" in error.message:
            raise too_many_images(limits) from None
        raise RequestError(400, "bad_form", f"the form cannot be read: {error.message.rstrip('.').lower()}.") from None
    except (ValueError, LookupError):  # undecodable headers of a part
        raise RequestError(400, "bad_form", "the form cannot be read: a part's headers are damaged.") from None
    finally:
        parser.close()


async def _limit_parts(headers: Headers, chunks: Chunks, limit: int) -> Chunks:
    """Pass chunks on; raise RequestError if there are too many part boundaries, which are expensive to parse."""
    _, options = parse_options_header(headers["content-type"])
    boundary, count = b"\r\n--" + options.get(b"boundary", b""), 0
    async for chunk in chunks:
        count += chunk.count(boundary)
        if count > limit:
            raise RequestError(400, "bad_form", "the form cannot be read: it has too many parts.")
        yield chunk


def _body_from_form(form: FormData, complete: bool) -> RequestBody:
    if not complete:
        raise RequestError(400, "bad_form", "the form cannot be read: its end is missing.")
    body, fields = RequestBody(), []
    for name, value in form.multi_items():
        if isinstance(value, UploadFile):
            if name not in IMAGE_FIELDS:
                raise RequestError(400, "bad_form", f"got a file in the field {_shorten(name)}, expected it in images.")
            body.images.append(value.file.read())
        else:
            fields.append((name, value))
    body.parameters = _parse_parameters(fields)
    return body


def parse_json(data: bytes, advice: str = "send fewer") -> Any:
    """Parse untrusted JSON, with a limit on the values and escapes in it; advice: what to do about too many values."""
    _check_value_count(sum(map(data.count, (b",", b"[", b"{"))), advice)
    if data.count(b"\\") > len(data) // CHARACTERS_PER_ESCAPE + MAX_VALUES:
        raise RequestError(400, "bad_json", "the body has too many escapes; expected images as plain base64.")
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise RequestError(400, "bad_json", "the body is not JSON.") from None


def _body_from_json(data: bytes) -> RequestBody:
    values = parse_json(data)
    if not isinstance(values, dict):
        raise RequestError(400, "bad_json", 'expected a JSON object such as {"images": ["<base64>"]}.')
    if "image" in values and "images" in values:
        raise RequestError(400, "bad_json", "got both image and images, expected one of them.")
    images = [values.pop("image")] if "image" in values else values.pop("images", [])
    if not isinstance(images, list) or not all(isinstance(text, str) for text in images):
        raise RequestError(400, "bad_json", "images must be a list of base64 strings.")
    for number, text in enumerate(images):
        check_no_url(text, number, len(images))
    return RequestBody(images, values)


def check_no_url(text: str, number: int, count: int) -> None:
    """Raise RequestError if image `number` of `count` is a URL."""
    if URL_PATTERN.match(text):
        message = "this is a URL, and URLs are never opened; send the image itself, as base64."
        raise RequestError(400, "not_base64", message).for_image(number, count)


def _check_value_count(count: int, advice: str = "send fewer") -> None:
    if count > MAX_VALUES:
        message = f"too many parameter values; at most {MAX_VALUES:,} are allowed in a request"
        raise RequestError(413, "too_many_values", f"{message}; {advice}.")


def read_deadline(request: Request, now: float) -> float | None:
    """Deadline from the X-Deadline-Ms header, in seconds on the clock of `now`; None if there is none."""
    text = request.headers.get("x-deadline-ms")
    if text is None:
        return None
    if not DEADLINE_PATTERN.fullmatch(text):
        raise RequestError(400, "invalid_parameter", "X-Deadline-Ms must be milliseconds, 1 to 999999999.")
    return now + int(text) / 1000


def _parse_parameters(items: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Parameters of a form or query string: text, numbers, and lists of them."""
    entries_by_name: dict[str, list[Any]] = {}
    _check_value_count(sum(text.count(",") + text.count("[") + text.count("{") for _, text in items))
    for name, text in items:
        entries_by_name.setdefault(name, []).append(_parse_parameter(name, text))
    values = {}
    for name, entries in entries_by_name.items():
        if name in LIST_PARAMETERS and not (len(entries) == 1 and isinstance(entries[0], list)):
            values[name] = entries
        elif len(entries) > 1:
            raise RequestError(400, "invalid_parameter", f"{_shorten(name)} is given more than once.")
        else:
            values[name] = entries[0]
    return values


def _parse_parameter(name: str, text: str) -> Any:
    """Parse the value as JSON unless the parameter is text."""
    if name in TEXT_PARAMETERS and not text.startswith("["):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise RequestError(
            400, "invalid_parameter", f"{_shorten(name)} is not valid JSON; expected a number, or a list such as [1,2]."
        ) from None


def _check_content_encoding(coding: str) -> None:
    """Raise RequestError if the body is compressed."""
    if {part.strip().lower() for part in coding.split(",")} - {"", "identity"}:
        message = f"got a body with Content-Encoding {coding[:80]!r}, expected identity; send it uncompressed."
        raise RequestError(415, "unsupported_encoding", message, {"Accept-Encoding": "identity"})


def _is_image_type(content_type: str) -> bool:
    return content_type.startswith("image/") and len(content_type) > len("image/")


def _shorten(name: str) -> str:
    return repr(name if len(name) <= 40 else f"{name[:40]}...")


def _unsupported_type(content_type: str) -> RequestError:
    return RequestError(
        415,
        "unsupported_body",
        f"got a body of type {content_type[:80] or 'none'!r}, expected multipart/form-data, application/json, image/* "
        "or application/octet-stream; for an image, send Content-Type: image/jpeg.",
    )


def _body_too_large(limits: Limits) -> RequestError:
    return RequestError(
        413,
        "body_too_large",
        f"the body is larger than the limit of {limits.max_bytes:,} bytes.",
        {"Connection": "close"},
    )


def too_many_images(limits: Limits) -> RequestError:
    return RequestError(
        413, "too_many_images", f"too many images; at most {limits.max_images} are allowed in a request."
    )
