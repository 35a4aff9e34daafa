"""Bodies of the Open Inference Protocol: Triton's client encodes requests and decodes responses; hostile bodies."""

from __future__ import annotations

import base64
import io
import json
import math
from typing import Any

import numpy as np
import pytest
from conftest import import_peer
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from serving import photo

from vitrail.serve.http_errors import RequestError
from vitrail.serve.image_headers import is_quick_header
from vitrail.serve.limits import Limits
from vitrail.serve.tensor_codec import (
    InferenceRequest,
    OutputTensor,
    RequestedOutput,
    decode_request,
    encode_response,
)

triton = import_peer("tritonclient.http")
LIMITS = Limits(max_images=4)


def triton_request(
    array: np.ndarray[Any, Any], datatype: str, binary: bool, **options: Any
) -> tuple[bytes, int | None]:
    """Body and header length of a request, as Triton's client writes them."""
    tensor = triton.InferInput("images", list(array.shape), datatype)
    tensor.set_data_from_numpy(array, binary_data=binary)
    return triton.InferenceServerClient.generate_request_body([tensor], **options)


def byte_tensor(elements: list[bytes], column: bool = False) -> np.ndarray[Any, Any]:
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array[:, None] if column else array


def pixels_of(image: bytes | str) -> np.ndarray[Any, Any]:
    assert isinstance(image, bytes)
    return np.atleast_3d(np.asarray(Image.open(io.BytesIO(image))))


@settings(max_examples=100)
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=4), st.booleans())
def test_binary_elements_are_those_that_tritons_client_encoded(elements: list[bytes], column: bool) -> None:
    body, length = triton_request(byte_tensor(elements, column), "BYTES", binary=True)
    assert decode_request(body, length, LIMITS).images == elements


@pytest.mark.parametrize("column", [False, True])
def test_json_elements_are_base64_text(column: bool) -> None:
    texts = [base64.b64encode(photo(number)) for number in range(3)]
    body, length = triton_request(byte_tensor(texts, column), "BYTES", binary=False)
    assert length is None
    assert decode_request(body, length, LIMITS).images == [text.decode() for text in texts]


@settings(max_examples=100)
@given(st.tuples(*[st.integers(1, n) for n in (4, 9, 9)]), st.sampled_from([1, 3]), st.booleans(), st.randoms())
def test_pixels_stay_the_same(sizes: tuple[int, int, int], channels: int, binary: bool, random: Any) -> None:
    shape = (*sizes, channels)
    array = np.frombuffer(random.randbytes(math.prod(shape)), np.uint8).reshape(shape)
    body, length = triton_request(array, "UINT8", binary)
    images = decode_request(body, length, LIMITS).images
    assert np.array_equal(np.stack([pixels_of(image) for image in images]), array)


def test_pixels_may_be_nested_lists() -> None:
    array = np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3)
    tensor = {"name": "images", "shape": [2, 2, 2, 3], "datatype": "UINT8", "data": array.tolist()}
    images = decode_request(json.dumps({"inputs": [tensor]}).encode(), None, LIMITS).images
    assert np.array_equal(np.stack([pixels_of(image) for image in images]), array)


def test_large_arrays_of_pixels_have_quick_headers() -> None:
    body, length = triton_request(np.zeros((1, 300, 200, 3), np.uint8), "UINT8", True)
    [image] = decode_request(body, length, LIMITS).images
    assert isinstance(image, bytes)
    assert len(image) > 2**16
    assert is_quick_header(image)
    assert not is_quick_header(b"P6 # a comment\n300 200 255\n" + bytes(2**17))


def test_a_header_length_of_zero_means_that_the_body_is_one_image() -> None:
    assert decode_request(photo(), 0, LIMITS) == InferenceRequest(images=[photo()])


def test_parameters_and_outputs_are_read() -> None:
    outputs = [triton.InferRequestedOutput("logits"), triton.InferRequestedOutput("labels", False, class_count=3)]
    options = {"outputs": outputs, "request_id": "7", "timeout": 1500, "priority": 1, "parameters": {"mine": 1}}
    body, length = triton_request(byte_tensor([b"x"]), "BYTES", True, **options)
    assert decode_request(body, length, LIMITS) == InferenceRequest(
        images=[b"x"],
        id="7",
        outputs=(
            RequestedOutput(name="logits", binary=True),
            RequestedOutput(name="labels", binary=False, classification=3),
        ),
        timeout_s=0.0015,
    )
    body, length = triton_request(byte_tensor([b"x"]), "BYTES", True)
    assert decode_request(body, length, LIMITS) == InferenceRequest(images=[b"x"], binary=True)


FLOATS = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=6, max_size=6)


@settings(max_examples=100)
@given(FLOATS, st.lists(st.text(st.characters(codec="utf-8"), max_size=20), min_size=1, max_size=4), st.booleans())
def test_tritons_client_decodes_the_outputs(values: list[float], texts: list[str], binary: bool) -> None:
    logits = np.array(values, np.float32).reshape(2, 3)
    outputs = [
        OutputTensor("logits", (2, 3), logits, binary),
        OutputTensor("labels", (len(texts), 1), texts, binary),
        OutputTensor("features", (3, 2), logits.reshape(3, 2), False),
    ]
    body, length = encode_response("small", "2", "an id", outputs)
    assert (length is not None) == binary
    result = triton.InferResult.from_response_body(body, header_length=length)
    answer = result.get_response()
    assert (answer["model_name"], answer["model_version"], answer["id"]) == ("small", "2", "an id")
    assert np.array_equal(result.as_numpy("logits"), logits)
    assert np.array_equal(result.as_numpy("features"), logits.reshape(3, 2))
    decoded = result.as_numpy("labels")
    assert decoded.shape == (len(texts), 1)
    assert [text.decode() if binary else text for text in decoded.ravel()] == texts


def request(**changes: Any) -> dict[str, Any]:
    """A valid request of two images in JSON, with changes to its tensor."""
    tensor = {"name": "images", "shape": [2], "datatype": "BYTES", "data": ["AAAA", "AAAA"]} | changes
    return {"inputs": [{name: value for name, value in tensor.items() if value is not None}]}


PIXELS: dict[str, Any] = {"datatype": "UINT8", "shape": [1, 1, 2, 3], "data": [0, 1, 2, 3, 4, 255]}
BINARY: dict[str, Any] = {"data": None, "parameters": {"binary_data_size": 10}}
INVALID: dict[str, tuple[Any, str]] = {
    "a list": ([], "expected a JSON object"),
    "no inputs": ({}, "a list with 1 input"),
    "two inputs": ({"inputs": [{}, {}]}, "a list with 1 input"),
    "an input that is a text": ({"inputs": ["images"]}, "a list with 1 input"),
    "another name": (request(name="input_1"), 'got input "input_1", expected images'),
    "floats": (request(datatype="FP32"), 'got datatype "FP32", expected BYTES'),
    "no datatype": (request(datatype=None), "got datatype null"),
    "no shape": (request(shape=None), "the shape must be a list of positive integers"),
    "a negative side": (request(shape=[-2]), "positive integers"),
    "a side of zero": (request(**PIXELS | {"shape": [1, 0, 2, 3]}), "positive integers"),
    "a fractional side": (request(shape=[2.0]), "positive integers"),
    "a side that is true": (request(shape=[True]), "positive integers"),
    "a product over 64 bits": (request(**PIXELS | {"shape": [1, 2**40, 2**40, 3]}), "got 6 bytes"),
    "four columns": (request(shape=[2, 4]), "got shape [2, 4], expected [N] or [N, 1]"),
    "a hundred dimensions": (request(shape=[1] * 100), "got shape a list of 100"),
    "two channels": (request(**PIXELS | {"shape": [1, 1, 3, 2]}), "1 or 3 channels"),
    "too few pixels": (
        request(**PIXELS | {"shape": [2, 1, 2, 3]}),
        "got 6 bytes, expected those of shape [2, 1, 2, 3]",
    ),
    "too few images": (request(shape=[3]), "one base64 string for each of the 3 images"),
    "numbers as images": (request(data=[1, 2]), "one base64 string"),
    "a text as data": (request(data="AAAA"), "data must be a list"),
    "ragged pixels": (request(**PIXELS | {"data": [[[[0, 1, 2], [3, 4]]]]}), "do not have the shape"),
    "deep pixels": (request(**PIXELS | {"data": [[[[[0], [1], [2]], [[3], [4], [5]]]]]}), "do not have the shape"),
    "a pixel of 256": (request(**PIXELS | {"data": [0, 1, 2, 3, 4, 256]}), "integers, 0 to 255"),
    "a negative pixel": (request(**PIXELS | {"data": [0, 1, 2, 3, 4, -1]}), "integers, 0 to 255"),
    "a huge pixel": (request(**PIXELS | {"data": [0, 1, 2, 3, 4, 10**400]}), "integers, 0 to 255"),
    "a fractional pixel": (request(**PIXELS | {"data": [0, 1, 2, 3, 4, 0.5]}), "integers, 0 to 255"),
    "a pixel that is true": (request(**PIXELS | {"data": [0, 1, 2, 3, 4, True]}), "integers, 0 to 255"),
    "no pixels": (request(**PIXELS | {"data": []}), "integers, 0 to 255"),
    "a URL": (request(data=["AAAA", "https://example.org/a.jpg"]), "image 2 of 2: this is a URL"),
    "another encoding": (request(parameters={"content_type": "hex"}), 'got content_type "hex", expected base64'),
    "shared memory": (request(parameters={"shared_memory_region": "a"}), "shared memory is not supported"),
    "parameters that are a list": (request(parameters=[]), "parameters of images must be an object"),
    "neither data nor a size": (request(data=None), "binary_data_size is null, but 10 bytes follow"),
    "data and a size": (request(parameters={"binary_data_size": 10}), "both data and binary data"),
    "data and bytes after the JSON": (request(), "both data and binary data"),
    "a size too large": (request(**BINARY | {"parameters": {"binary_data_size": 11}}), "is 11, but 10 bytes follow"),
    "a size too small": (request(**BINARY | {"parameters": {"binary_data_size": 9}}), "is 9, but 10 bytes follow"),
    "a negative size": (request(**BINARY | {"parameters": {"binary_data_size": -1}}), "is -1, but 10 bytes"),
    "a size that is a text": (request(**BINARY | {"parameters": {"binary_data_size": "10"}}), 'is "10", but 10 bytes'),
    "an element longer than the body": (request(**BINARY, shape=[1]), "ends within element 1 of 1"),
    "pixels other than the shape": (request(**PIXELS | BINARY), "got 10 bytes, expected those of shape"),
    "an id that is a number": (request() | {"id": 7}, "id must be a text"),
    "a long id": (request() | {"id": "a" * 1001}, "id must be a text"),
    "a sequence": (request() | {"parameters": {"sequence_id": 3}}, "no sequences"),
    "a timeout that is a text": (request() | {"parameters": {"timeout": "1"}}, "expected microseconds"),
    "a negative timeout": (request() | {"parameters": {"timeout": -1}}, "expected microseconds"),
    "binary output that is 1": (request() | {"parameters": {"binary_data_output": 1}}, "expected true or false"),
}
FOLLOWING = b"\xff\xff\xff\xff123456"
OUTPUTS: dict[str, tuple[Any, str]] = {
    "an object": ({"name": "logits"}, "outputs must be a list"),
    "names": (["logits"], "outputs must be a list"),
    "no name": ([{}], "must have a name"),
    "twice": ([{"name": "logits"}, {"name": "logits"}], "more than once"),
    "many": ([{"name": str(i)} for i in range(17)], "at most 16"),
    "a fraction of classes": ([{"name": "logits", "parameters": {"classification": 1.5}}], "expected an integer"),
    "shared memory": ([{"name": "logits", "parameters": {"shared_memory_region": "a"}}], "shared memory"),
}


@pytest.mark.parametrize("name", sorted(INVALID))
def test_an_invalid_request_is_rejected_in_one_sentence(name: str) -> None:
    values, message = INVALID[name]
    header = json.dumps(values).encode()
    takes_binary = "bytes" in name or "size" in name or "element" in name or "other than" in name
    with pytest.raises(RequestError) as caught:
        decode_request(header + FOLLOWING * takes_binary, len(header) if takes_binary else None, LIMITS)
    assert caught.value.status == 400
    assert message in caught.value.message
    assert caught.value.message.endswith(".")


@pytest.mark.parametrize("name", sorted(OUTPUTS))
def test_invalid_outputs_are_rejected(name: str) -> None:
    outputs, message = OUTPUTS[name]
    with pytest.raises(RequestError, match=message) as caught:
        decode_request(json.dumps(request() | {"outputs": outputs}).encode(), None, LIMITS)
    assert caught.value.status == 400


@pytest.mark.parametrize(("shape", "count"), [([5], 5), ([10**18, 1], 1), ([10**400], 1)])
def test_too_many_images_are_rejected_before_they_are_read(shape: list[int], count: int) -> None:
    with pytest.raises(RequestError, match="at most 4 are allowed") as caught:
        decode_request(json.dumps(request(shape=shape, data=["AAAA"] * count)).encode(), None, LIMITS)
    assert caught.value.status == 413


def test_large_json_arrays_are_rejected_before_they_are_parsed() -> None:
    body = b'{"inputs": [' + b"[" * 20_000
    with pytest.raises(RequestError, match="send arrays as binary data") as caught:
        decode_request(body, None, LIMITS)
    assert caught.value.status == 413


def test_a_header_longer_than_the_body_is_rejected() -> None:
    with pytest.raises(RequestError, match="is 100, but the body has 2 bytes"):
        decode_request(b"{}", 100, LIMITS)


VALID, VALID_LENGTH = triton_request(byte_tensor([photo(), photo(1)]), "BYTES", True, request_id="id")
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["name", "shape", "datatype", "data", "parameters", "images"]), inner)
    ),
    max_leaves=12,
)


def decode_or_refuse(body: bytes, length: int | None) -> None:
    """Decode a body; any error must be a RequestError with a sentence."""
    refused = None
    try:
        decode_request(body, length, LIMITS)
    except RequestError as error:
        refused = error
    if refused is not None:
        assert refused.status in (400, 413)
        assert refused.message.endswith(".")
        refused.body().decode("ascii")


@settings(max_examples=300)
@given(st.binary(max_size=200), st.none() | st.integers(0, 300))
def test_arbitrary_bytes_never_crash_the_decoder(body: bytes, length: int | None) -> None:
    decode_or_refuse(body, length)


@settings(max_examples=300)
@given(st.integers(0, len(VALID)), st.binary(max_size=8), st.integers(-5, 5))
def test_a_damaged_request_never_crashes_the_decoder(at: int, inserted: bytes, shift: int) -> None:
    assert VALID_LENGTH is not None
    decode_or_refuse(VALID[:at] + inserted + VALID[at + 4 :], VALID_LENGTH + shift)
    decode_or_refuse(VALID[:at], min(VALID_LENGTH, at))


@settings(max_examples=300)
@given(JSON_VALUES, st.sampled_from(["inputs", "shape", "data", "datatype", "parameters", "outputs", "id"]))
def test_arbitrary_values_never_crash_the_decoder(value: Any, name: str) -> None:
    values = request() | {name: value} if name in ("inputs", "outputs", "id") else request(**{name: value})
    decode_or_refuse(json.dumps(values).encode(), None)
    decode_or_refuse(json.dumps(request(**PIXELS | {name: value})).encode(), None)
