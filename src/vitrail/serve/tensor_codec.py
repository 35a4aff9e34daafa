"""Bodies of the Open Inference Protocol v2: JSON, optionally followed by the binary data of its tensors.

A request has one input, `images`: encoded images (BYTES) or pixels (UINT8). BYTES are base64 text in JSON, because JSON
cannot hold bytes; in binary data each element follows its length, a little-endian uint32.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from vitrail.serve.http_errors import RequestError
from vitrail.serve.limits import Limits
from vitrail.serve.request_parsing import check_no_url, parse_json, too_many_images

# N images, H W C pixels

Datatype = Literal["BYTES", "UINT8", "FP32"]
INPUT = "images"
LENGTH_BYTES = 4
"""Bytes of the length before each element of a BYTES tensor in binary data."""
MAX_ID = 1000
"""Characters in the id of a request, which the response repeats."""
MAX_OUTPUTS = 16
"""Requested outputs in one request."""
MAX_TIMEOUT_US = 10**12
"""Upper bound of the timeout parameter, in microseconds."""
SHARED_MEMORY = "shared_memory_region"
SEQUENCE = "sequence_id"


@dataclass(frozen=True, kw_only=True)
class RequestedOutput:
    """An output as the client wants it."""

    name: str
    binary: bool
    """Whether its values are sent as binary data instead of JSON."""
    classification: int | None = None
    """Send this many classes of each image as text, best first, instead of the values."""


@dataclass(frozen=True, kw_only=True)
class InferenceRequest:
    """A decoded inference request."""

    images: list[bytes | str]
    """Encoded images: bytes, or base64 text."""
    id: str | None = None
    outputs: tuple[RequestedOutput, ...] | None = None
    """None: the outputs of the model by default."""
    binary: bool = False
    """Whether outputs that do not say otherwise are sent as binary data."""
    timeout_s: float | None = None


@dataclass(frozen=True)
class OutputTensor:
    """An output: float32 values or texts, flattened in row-major order."""

    name: str
    shape: tuple[int, ...]
    values: npt.NDArray[np.float32] | list[str]
    binary: bool

    @property
    def datatype(self) -> Datatype:
        return "BYTES" if isinstance(self.values, list) else "FP32"


def decode_request(body: bytes, header_length: int | None, limits: Limits) -> InferenceRequest:
    """Decode a request. header_length: bytes of JSON before the binary data; None: all; 0: the body is one image."""
    if header_length == 0:
        return InferenceRequest(images=[body])
    if header_length is not None and header_length > len(body):
        raise _invalid(f"Inference-Header-Content-Length is {header_length}, but the body has {len(body)} bytes.")
    header = _parse_header(body if header_length is None else body[:header_length])
    inputs = header.get("inputs")
    if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
        raise _invalid(f"expected a list with 1 input, {INPUT}, in inputs.")
    request_id, parameters = header.get("id"), _parameters(header, "the request")
    if request_id is not None and not (isinstance(request_id, str) and len(request_id) <= MAX_ID):
        raise _invalid(f"id must be a text of at most {MAX_ID:,} characters.")
    if parameters.get(SEQUENCE):
        raise _invalid("got sequence_id, but this model has no sequences; send requests without it.")
    binary = _boolean(parameters, "binary_data_output", False)
    start = len(body) if header_length is None else header_length
    return InferenceRequest(
        images=_decode_images(inputs[0], memoryview(body)[start:], limits),
        id=request_id or None,
        outputs=_requested_outputs(header.get("outputs"), binary),
        binary=binary,
        timeout_s=_timeout(parameters),
    )


def encode_response(
    model: str, version: str, request_id: str | None, outputs: Sequence[OutputTensor]
) -> tuple[bytes, int | None]:
    """Body of the response, and the length of its JSON if binary data follow."""
    described: list[dict[str, Any]] = []
    binary: list[bytes] = []
    for tensor in outputs:
        entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        if tensor.binary:
            binary.append(_to_binary(tensor.values))
            entry["parameters"] = {"binary_data_size": len(binary[-1])}
        else:
            entry["data"] = tensor.values if isinstance(tensor.values, list) else tensor.values.ravel().tolist()
        described.append(entry)
    answer = {"model_name": model, "model_version": version, "outputs": described}
    header = json.dumps(answer if request_id is None else answer | {"id": request_id}).encode()
    return b"".join([header, *binary]), len(header) if binary else None


def _to_binary(values: npt.NDArray[np.float32] | list[str]) -> bytes:
    if not isinstance(values, list):
        return values.astype("<f4").tobytes()
    return b"".join(struct.pack("<I", len(text)) + text for text in map(str.encode, values))


def _parse_header(data: bytes) -> dict[str, Any]:
    header = parse_json(data, "send arrays as binary data")
    if not isinstance(header, dict):
        raise _invalid('expected a JSON object such as {"inputs": [...]}.')
    return header


def _decode_images(tensor: dict[str, Any], binary: memoryview, limits: Limits) -> list[bytes | str]:
    """The images of an input tensor. `binary` is what follows the JSON."""
    name, datatype, parameters = tensor.get("name"), tensor.get("datatype"), _parameters(tensor, INPUT)
    if name != INPUT:
        raise _invalid(f"got input {_shorten(name)}, expected {INPUT}.")
    if SHARED_MEMORY in parameters:
        raise _invalid("shared memory is not supported; send the images in the request.")
    if datatype not in ("BYTES", "UINT8"):
        message = "expected BYTES (encoded images) or UINT8 (pixels, N H W C)."
        raise _invalid(f"{INPUT}: got datatype {_shorten(datatype)}, {message}")
    shape = _image_shape(tensor.get("shape"), datatype, limits)
    if "data" in tensor:
        if binary or "binary_data_size" in parameters:
            raise _invalid(f"{INPUT}: got both data and binary data, expected one of them.")
        values = _flatten(tensor["data"], shape)
        if datatype == "UINT8":
            return _split_pixels(_pixel_bytes(values), shape)
        return _base64_texts(values, shape[0], parameters.get("content_type"))
    size = parameters.get("binary_data_size")
    if type(size) is not int or size != len(binary):
        message = f"binary_data_size is {_shorten(size)}, but {len(binary)} bytes follow the JSON"
        raise _invalid(f"{INPUT}: {message}; send data, or binary data with its size.")
    return _split_pixels(binary, shape) if datatype == "UINT8" else _split_elements(binary, shape[0])


def _image_shape(shape: Any, datatype: Datatype, limits: Limits) -> tuple[int, ...]:
    """Check the shape: N or N 1 encoded images, N H W C pixels with 1 or 3 channels."""
    wanted = "[N] or [N, 1]" if datatype == "BYTES" else "[N, H, W, C] with 1 or 3 channels"
    if not isinstance(shape, list) or not all(type(side) is int and side > 0 for side in shape):
        raise _invalid(f"{INPUT}: the shape must be a list of positive integers, {wanted}.")
    fits = len(shape) == 1 or (len(shape) == 2 and shape[1] == 1)
    if not (fits if datatype == "BYTES" else len(shape) == 4 and shape[3] in (1, 3)):
        raise _invalid(f"{INPUT}: got shape {_shorten(shape)}, expected {wanted}.")
    if shape[0] > limits.max_images:
        raise too_many_images(limits)
    return tuple(shape)


def _split_elements(binary: memoryview, count: int) -> list[bytes | str]:
    """Elements of a BYTES tensor: each follows its length."""
    elements: list[bytes | str] = []
    at = 0
    for number in range(count):
        length = int.from_bytes(binary[at : at + LENGTH_BYTES], "little")
        start, at = at + LENGTH_BYTES, at + LENGTH_BYTES + length
        if at > len(binary):
            raise _invalid(f"{INPUT}: the binary data ends within element {number + 1} of {count}.")
        elements.append(bytes(binary[start:at]))
    if at != len(binary):
        raise _invalid(f"{INPUT}: {len(binary) - at} bytes follow the last of {count} elements.")
    return elements


def _split_pixels(pixels: memoryview | bytes, shape: tuple[int, ...]) -> list[bytes | str]:
    """N H W C pixels -> N image files: binary PPM, or PGM for 1 channel, which hold the pixels unchanged."""
    count, height, width, channels = shape
    if len(pixels) != math.prod(shape):
        raise _invalid(f"{INPUT}: got {len(pixels)} bytes, expected those of shape {_shorten(list(shape))}.")
    header, size = b"P%d %d %d 255\n" % (6 if channels == 3 else 5, width, height), height * width * channels
    return [header + pixels[i * size : (i + 1) * size] for i in range(count)]


def _pixel_bytes(values: list[Any]) -> bytes:
    try:
        if set(map(type, values)) == {int}:
            return bytes(values)
    except ValueError:
        pass
    raise _invalid(f"{INPUT}: data of UINT8 must be integers, 0 to 255.")


def _base64_texts(texts: list[Any], count: int, content_type: Any) -> list[bytes | str]:
    if content_type not in (None, "base64"):
        raise _invalid(f"{INPUT}: got content_type {_shorten(content_type)}, expected base64.")
    if len(texts) != count or not all(isinstance(text, str) for text in texts):
        raise _invalid(f"{INPUT}: data must have one base64 string for each of the {count} images of the shape.")
    for number, text in enumerate(texts):
        check_no_url(text, number, count)
    return texts


def _flatten(data: Any, shape: tuple[int, ...]) -> list[Any]:
    """Values in row-major order of `data`, which is flat, or nested as in the shape."""
    if not isinstance(data, list):
        raise _invalid(f"{INPUT}: data must be a list.")
    values: list[Any] = data
    for side in (*shape[1:], None):
        if not values or not isinstance(values[0], list):
            break
        if not all(isinstance(row, list) and len(row) == side for row in values):
            raise _invalid(f"{INPUT}: the lists in data do not have the shape {_shorten(list(shape))}.")
        values = [value for row in values for value in row]
    return values


def _requested_outputs(outputs: Any, binary: bool) -> tuple[RequestedOutput, ...] | None:
    if outputs is None or outputs == []:
        return None
    if not isinstance(outputs, list) or not all(isinstance(entry, dict) for entry in outputs):
        raise _invalid('outputs must be a list of objects such as {"name": "labels"}.')
    if len(outputs) > MAX_OUTPUTS:
        raise _invalid(f"got {len(outputs)} outputs, expected at most {MAX_OUTPUTS}.")
    requested = tuple(_requested_output(entry, binary) for entry in outputs)
    if len({output.name for output in requested}) < len(requested):
        raise _invalid("an output is requested more than once.")
    return requested


def _requested_output(entry: dict[str, Any], binary: bool) -> RequestedOutput:
    name, parameters = entry.get("name"), _parameters(entry, "an output")
    if not isinstance(name, str):
        raise _invalid("every output must have a name.")
    if SHARED_MEMORY in parameters:
        raise _invalid("shared memory is not supported; request the output without it.")
    count = parameters.get("classification", 0)
    if type(count) is not int or count < 0:
        raise _invalid(f"classification: got {_shorten(count)}, expected an integer, 0 or more.")
    binary = _boolean(parameters, "binary_data", binary)
    return RequestedOutput(name=name, binary=binary, classification=count or None)


def _parameters(owner: dict[str, Any], what: str) -> dict[str, Any]:
    parameters = owner.get("parameters", {})
    if not isinstance(parameters, dict):
        raise _invalid(f"parameters of {what} must be an object.")
    return parameters


def _boolean(parameters: dict[str, Any], name: str, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise _invalid(f"{name}: got {_shorten(value)}, expected true or false.")
    return value


def _timeout(parameters: dict[str, Any]) -> float | None:
    """Seconds of the parameter `timeout`, which is in microseconds; 0: none."""
    value = parameters.get("timeout", 0)
    if type(value) is not int or not 0 <= value <= MAX_TIMEOUT_US:
        raise _invalid(f"timeout: got {_shorten(value)}, expected microseconds, 1 to {MAX_TIMEOUT_US}.")
    return value / 1e6 or None


def _invalid(message: str) -> RequestError:
    return RequestError(400, "invalid_tensor", message)


def _shorten(value: Any) -> str:
    """A value as JSON, shortened."""
    if isinstance(value, list) and len(value) > 8:
        return f"a list of {len(value)}"
    try:
        text = json.dumps(value)
    except ValueError:  # an integer of thousands of digits
        return "a large number"
    return text if len(text) <= 60 else f"{text[:60]}..."
