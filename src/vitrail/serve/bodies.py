"""A request's body -> its images and values; no more of it is read than may be."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from vitrail.serve.batching import late
from vitrail.serve.limits import Limits
from vitrail.serve.problems import Gone, Problem
from vitrail.serve.quota import Lease

FILES = ("images", "image", "file")
"""Fields of a form that hold images."""
WORDS = ("target", "fill", "methods")
"""Values that are words, so that they need no quotes in a form or an address."""
LISTS = ("hide", "layers", "methods")
"""Values that are lists: as JSON in one piece, or a field for each."""
FIELDS = 5000
"""Of a form, which may have one for each patch that is hidden."""
MANY = 20_000
"""Values in one request: all that is not an image. They are counted before they are parsed, since nobody else is
answered meanwhile."""
ESCAPES = 32
"""One character in so many of a JSON body may be escaped: some clients write base64's / as \\/, one in 64."""
SNIFFED = ("", "application/x-www-form-urlencoded")
"""What clients say who say nothing, curl among them: such a body is an image if it begins like one."""
BEGINNING = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|GIF8[79]a|RIFF....WEBP|BM.{4}\0\0\0\0|II\*\0|MM\0\*|P[56]\s|....ftypavi[fs]", re.S
)
ADDRESS = re.compile(r"\s*[a-z][a-z0-9+.-]{0,20}://", re.I)
DEADLINE = re.compile(r"[1-9]\d{0,8}")
Chunks = AsyncGenerator[bytes, None]
"""A body as it comes."""


@dataclass
class Body:
    """What a client sent."""

    images: list[bytes | str] = field(default_factory=list)
    """Files, or base64 where the body is JSON."""
    values: dict[str, Any] = field(default_factory=dict)
    client: str = ""
    """Whom it is counted for."""

    @property
    def size(self) -> int:
        return sum(map(len, self.images))


class _Parser(MultiPartParser):
    """Starlette's, which keeps everything in memory (the body has a limit) and knows whether it came to the end."""

    spool_max_size = 2**62
    ended = False

    def on_headers_finished(self) -> None:
        """An image is a file, also where the client gave it no name."""
        part = self._current_part
        _, options = parse_options_header(part.content_disposition)
        if b"filename" not in options and options.get(b"name", b"").decode("latin-1") in FILES:
            part.content_disposition = (part.content_disposition or b"") + b'; filename="image"'
        super().on_headers_finished()

    def on_end(self) -> None:
        self.ended = True

    def close(self) -> None:
        for file in self._files_to_close_on_error:
            file.close()


async def read_body(request: Request, limits: Limits, share: Lease, deadline: float | None = None) -> Body:
    """The whole of it, by its content type; no longer than it is of use, on `time.monotonic`'s clock."""
    _check_coding(", ".join(request.headers.getlist("content-encoding")))
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    known = ("multipart/form-data", "application/json", "application/octet-stream", *SNIFFED)
    if kind not in known and not _is_image(kind):
        raise _unknown(kind)
    left = limits.seconds if deadline is None else max(deadline - time.monotonic(), 0)
    try:
        async with asyncio.timeout(min(limits.seconds, left)):
            body = await _parsed(kind, request, limits, share)
    except TimeoutError:
        if left < limits.seconds:
            problem = late()
            problem.headers["Connection"] = "close"
            raise problem from None
        message = f"the body did not arrive within {limits.seconds:g} seconds."
        raise Problem(408, "too_slow", message, {"Connection": "close"}) from None
    if not body.images:
        raise Problem(400, "no_image", "there is no image in this request; wanted 1 or more.")
    if len(body.images) > limits.images:
        raise _too_many(limits)
    body.client = share.client
    return body


async def _parsed(kind: str, request: Request, limits: Limits, share: Lease) -> Body:
    chunks = _chunks(request, limits, share)
    if kind == "multipart/form-data":
        body = await _form(request.headers, chunks, limits)
    elif kind == "application/json":
        body = _from_json(b"".join([chunk async for chunk in chunks]))
    else:
        whole = await _raw(kind, chunks)
        body = Body([whole] if whole else [])
    body.values = _values(request.query_params.multi_items()) | body.values  # what the body says counts
    return body


async def _raw(kind: str, chunks: Chunks) -> bytes:
    """An image as it is; where nobody says that it is one, its first bytes do."""
    found, unsure = bytearray(), kind in SNIFFED
    async for chunk in chunks:
        found += chunk
        if unsure and len(found) >= 16:
            unsure = False
            if not BEGINNING.match(found):
                raise _unknown(kind)
    if unsure:
        raise _unknown(kind)
    return bytes(found)


async def _chunks(request: Request, limits: Limits, share: Lease) -> Chunks:
    """The body as it comes, up to the limit, and while there is room."""
    promised = request.headers.get("content-length", "")
    if promised.isdecimal() and int(promised) > limits.bytes:
        raise _too_long(limits)
    got = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise Gone
        chunk = message.get("body", b"")
        got += len(chunk)
        request.state.whole, request.state.received = not message.get("more_body"), got
        if got > limits.bytes:
            raise _too_long(limits)
        if chunk:
            share.take(len(chunk))
        if chunk:
            yield chunk
        if request.state.whole:
            return


async def swallow(request: Request, most: int) -> None:
    """Take in the rest of a refused body: who is still sending does not hear the refusal."""
    got = 0
    while got < most and not getattr(request.state, "whole", False):
        message = await request.receive()
        got += len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            return


async def _form(headers: Headers, chunks: Chunks, limits: Limits) -> Body:
    most = FIELDS + limits.images + 1
    parser = _Parser(headers, _parted(headers, chunks, most), max_files=limits.images, max_fields=FIELDS)
    try:
        return _filled(await parser.parse(), parser.ended)
    except MultiPartException as error:
        if "Too many files" in error.message:
            raise _too_many(limits) from None
        raise Problem(400, "bad_form", f"the form cannot be read: {error.message.rstrip('.').lower()}.") from None
    except (ValueError, LookupError):  # headers of a part that cannot be decoded
        raise Problem(400, "bad_form", "the form cannot be read: a part's headers are damaged.") from None
    finally:
        parser.close()


async def _parted(headers: Headers, chunks: Chunks, most: int) -> Chunks:
    """The same, unless it has too much that looks like the end of a part: each costs a hundred times its bytes."""
    _, options = parse_options_header(headers["content-type"])
    edge, found = b"\r\n--" + options.get(b"boundary", b""), 0
    async for chunk in chunks:
        found += chunk.count(edge)
        if found > most:
            raise Problem(400, "bad_form", "the form cannot be read: its boundary is in it too often.")
        yield chunk


def _filled(form: FormData, whole: bool) -> Body:
    if not whole:
        raise Problem(400, "bad_form", "the form cannot be read: its end is missing.")
    body, words = Body(), []
    for name, value in form.multi_items():
        if isinstance(value, UploadFile):
            if name not in FILES:
                raise Problem(400, "bad_form", f"there is a file in the field {_short(name)}; wanted it in images.")
            body.images.append(value.file.read())
        else:
            words.append((name, value))
    body.values = _values(words)
    return body


def _from_json(data: bytes) -> Body:
    _check_many(sum(map(data.count, (b",", b"[", b"{"))))
    if data.count(b"\\") > len(data) // ESCAPES + MANY:
        raise Problem(400, "bad_json", "too much of the body is escaped; wanted images as plain base64.")
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        raise Problem(400, "bad_json", "the body is not JSON.") from None
    if not isinstance(values, dict):
        raise Problem(400, "bad_json", 'wanted an object such as {"images": ["<base64>"]}.')
    if "image" in values and "images" in values:
        raise Problem(400, "bad_json", "both image and images are there; wanted one of them.")
    found = [values.pop("image")] if "image" in values else values.pop("images", [])
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise Problem(400, "bad_json", "images wants a list of images, each as base64.")
    for number, text in enumerate(found):
        if ADDRESS.match(text):
            message = "this is an address, and addresses are never opened; send the image itself, as base64."
            raise Problem(400, "not_base64", message).about(number, len(found))
    return Body(found, values)


def _check_many(count: int) -> None:
    if count > MANY:
        raise Problem(413, "too_many_values", f"more values than a request may have: at most {MANY:,}.")


def deadline_of(request: Request, now: float) -> float | None:
    """When the client will have lost interest, on the clock that says it is `now`; X-Deadline-Ms counts from here."""
    text = request.headers.get("x-deadline-ms")
    if text is None:
        return None
    if not DEADLINE.fullmatch(text):
        raise Problem(400, "bad_value", "X-Deadline-Ms wants milliseconds, 1 to 999999999.")
    return now + int(text) / 1000


def _values(given: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Of a form or an address: words, numbers, and lists of them."""
    found: dict[str, list[Any]] = {}
    _check_many(sum(text.count(",") + text.count("[") + text.count("{") for _, text in given))
    for name, text in given:
        found.setdefault(name, []).append(_value(name, text))
    values = {}
    for name, several in found.items():
        if name in LISTS and not (len(several) == 1 and isinstance(several[0], list)):
            values[name] = several
        elif len(several) > 1:
            raise Problem(400, "bad_value", f"{_short(name)} is given twice.")
        else:
            values[name] = several[0]
    return values


def _value(name: str, text: str) -> Any:
    """As JSON, unless it is a word."""
    if name in WORDS and not text.startswith("["):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Problem(400, "bad_value", f"{_short(name)} is not JSON: a number, or a list such as [1,2].") from None


def _check_coding(coding: str) -> None:
    """Raise Problem where the body is compressed: it is read as it is."""
    if {one.strip().lower() for one in coding.split(",")} - {"", "identity"}:
        message = f"got a body with Content-Encoding {coding[:80]!r}, wanted identity; send it uncompressed."
        raise Problem(415, "unsupported_encoding", message, {"Accept-Encoding": "identity"})


def _is_image(kind: str) -> bool:
    return kind.startswith("image/") and len(kind) > len("image/")


def _short(name: str) -> str:
    return repr(name if len(name) <= 40 else f"{name[:40]}...")


def _unknown(kind: str) -> Problem:
    return Problem(
        415,
        "unsupported_body",
        f"got a body of type {kind[:80] or 'none'!r}, wanted multipart/form-data, application/json, image/* or "
        "application/octet-stream; for an image, send Content-Type: image/jpeg.",
    )


def _too_long(limits: Limits) -> Problem:
    return Problem(
        413, "body_too_large", f"the body is larger than the limit of {limits.bytes:,} bytes.", {"Connection": "close"}
    )


def _too_many(limits: Limits) -> Problem:
    return Problem(413, "too_many_images", f"more images than a request may have: at most {limits.images}.")
