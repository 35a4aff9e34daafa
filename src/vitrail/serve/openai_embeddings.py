"""/v1/embeddings in the shape of OpenAI's API: images as data URIs in, embeddings as lists or base64 out."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from vitrail.serve.http_errors import RequestError
from vitrail.serve.limits import Limits
from vitrail.serve.request_parsing import check_no_url, parse_json, too_many_images
from vitrail.serve.served_model import Floats

EncodingFormat = Literal["float", "base64"]
FIELDS = ("model", "input", "messages", "encoding_format", "dimensions", "user")
DATA_URI = re.compile(r"data:image/[\w.+-]{1,40};base64,", re.I)
EXPECTED_IMAGE = "expected a data URI such as data:image/jpeg;base64,..."


@dataclass(frozen=True, kw_only=True)
class EmbeddingsRequest:
    """A parsed request."""

    model: str
    images: list[bytes | str]
    """Data URIs."""
    encoding_format: EncodingFormat = "float"
    dimensions: int | None = None


def parse_request(body: bytes, limits: Limits) -> EmbeddingsRequest:
    values = parse_json(body)
    if not isinstance(values, dict):
        raise _invalid('expected a JSON object such as {"model": "...", "input": ["data:image/jpeg;base64,..."]}.')
    for name in values:
        if name not in FIELDS:
            raise _invalid(f"unknown parameter {name[:40]!r}, expected one of {', '.join(FIELDS)}.")
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
    return EmbeddingsRequest(model=model, images=images, encoding_format=encoding, dimensions=dimensions)


def encode_response(request: EmbeddingsRequest, model: str, rows: Sequence[Floats]) -> dict[str, Any]:
    """The response for the features of each image. Images have no text tokens, so the usage is 0."""
    as_base64 = request.encoding_format == "base64"
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(row.astype("<f4").tobytes()).decode() if as_base64 else row.tolist(),
        }
        for index, row in enumerate(rows)
    ]
    return {"object": "list", "data": data, "model": model, "usage": {"prompt_tokens": 0, "total_tokens": 0}}


def check_dimensions(request: EmbeddingsRequest, dimension: int) -> None:
    """Raise RequestError if the request wants other embeddings than those of `dimension` values."""
    if request.dimensions not in (None, dimension):
        raise _invalid(
            f"got dimensions={request.dimensions}, but the embeddings of this model have {dimension} and are not "
            "trained to be shortened; leave dimensions out."
        )


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
