"""/v1/embeddings in the shape of OpenAI's API: images as data URIs in, embeddings as lists or base64 out."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from vitrail.serve.call import Call
from vitrail.serve.http_errors import RequestError
from vitrail.serve.limits import Limits
from vitrail.serve.request_parsing import (
    Chunks,
    RequestBody,
    check_no_url,
    join_chunks,
    parse_json,
    request_type,
    too_many_images,
)
from vitrail.serve.schema import ModelParameters
from vitrail.serve.served_model import Floats

EncodingFormat = Literal["float", "base64"]
FIELDS = ("model", "version", "input", "messages", "encoding_format", "dimensions", "user")
DATA_URI = re.compile(r"data:image/[\w.+-]{1,40};base64,", re.I)
EXPECTED_IMAGE = "expected a data URI such as data:image/jpeg;base64,..."


@dataclass
class EmbeddingsBody(RequestBody):
    """A parsed body, whose images are data URIs."""

    encoding_format: EncodingFormat = "float"
    dimensions: int | None = None


async def parse_body(request: Request, chunks: Chunks, limits: Limits) -> RequestBody:
    """Parse the body of a request."""
    if request_type(request) != "application/json":
        message = f"got a body of type {request_type(request)[:80] or 'none'!r}, expected application/json."
        raise RequestError(415, "unsupported_body", message)
    return parse_values(parse_json(await join_chunks(chunks)), limits)


async def answer(call: Call, parameters: ModelParameters) -> Response:
    """The embeddings of the images of a request."""
    body = call.body
    assert isinstance(body, EmbeddingsBody)
    rows = await call.infer("features")
    dimension = len(rows[0])
    if body.dimensions not in (None, dimension):
        raise _invalid(
            f"got dimensions={body.dimensions}, but the embeddings of this model have {dimension} and are not trained "
            "to be shortened; leave dimensions out."
        )
    described = describe_embeddings(body.encoding_format, call.version.name, rows)
    return JSONResponse(described | {"version": call.version.version})


def parse_values(values: Any, limits: Limits) -> EmbeddingsBody:
    """JSON -> images and parameters."""
    if not isinstance(values, dict):
        raise _invalid('expected a JSON object such as {"model": "...", "input": ["data:image/jpeg;base64,..."]}.')
    for name in values:
        if name not in FIELDS:
            raise _invalid(f"unknown parameter {name[:40]!r}, expected one of {', '.join(FIELDS)}.")
    values = {name: value for name, value in values.items() if value is not None}  # some clients send null
    model, encoding = values.get("model"), values.get("encoding_format", "float")
    dimensions = values.get("dimensions")
    if not isinstance(model, str):
        raise _invalid("model must be the name of a served model; GET /v1/models lists them.")
    if encoding not in get_args(EncodingFormat):
        raise _invalid("encoding_format must be float or base64.")
    if dimensions is not None and type(dimensions) is not int:
        raise _invalid("dimensions must be an integer.")
    if ("input" in values) == ("messages" in values):
        raise _invalid("expected either input or messages.")
    items = _listed(values["input"]) if "input" in values else _message_parts(values["messages"])
    if not items:
        raise RequestError(400, "no_image", "the request has no image; expected 1 or more.")
    if len(items) > limits.max_images:
        raise too_many_images(limits)
    images: list[bytes | str] = [_image(item, number, len(items)) for number, item in enumerate(items)]
    chosen = {name: values[name] for name in ("model", "version") if name in values}
    return EmbeddingsBody(images, chosen, encoding_format=encoding, dimensions=dimensions)


def describe_embeddings(encoding: EncodingFormat, model: str, rows: Sequence[Floats]) -> dict[str, Any]:
    """The response for the features of each image. Images have no text tokens, so the usage is 0."""
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": row.tolist()
            if encoding == "float"
            else base64.b64encode(row.astype("<f4").tobytes()).decode(),
        }
        for index, row in enumerate(rows)
    ]
    return {"object": "list", "data": data, "model": model, "usage": {"prompt_tokens": 0, "total_tokens": 0}}


def _listed(items: Any) -> list[Any]:
    return items if isinstance(items, list) else [items]


def _message_parts(messages: Any) -> list[Any]:
    """The parts of chat messages, which together make one embedding: one image."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise _invalid("messages must be a list of objects with role and content.")
    parts = [part for message in messages for part in _listed(message.get("content"))]
    if len(parts) > 1:
        raise _invalid(f"got {len(parts)} parts in messages, expected 1 image; send several images in input.")
    return parts


def _image(item: Any, number: int, count: int) -> str:
    """A data URI: by itself, or in a content part {"type": "image_url", "image_url": {"url": ...}}."""
    if isinstance(item, dict):
        url = item.get("image_url")
        item = url.get("url") if isinstance(url, dict) else url
    if not isinstance(item, str):
        raise RequestError(400, "not_an_image", f"this is not an image; {EXPECTED_IMAGE}.").for_image(number, count)
    if DATA_URI.match(item) is None:
        check_no_url(item, number, count)
        message = f"this is text, and the model embeds only images; {EXPECTED_IMAGE}."
        raise RequestError(400, "text_input", message).for_image(number, count)
    return item


def _invalid(message: str) -> RequestError:
    return RequestError(400, "invalid_parameter", message)
