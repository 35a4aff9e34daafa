"""Invalid requests get 4xx with a message that reveals nothing about the machine."""

from __future__ import annotations

import base64
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import malicious_files, photo, png_with_size, run_server, served

from vitrail.errors import ConfigError, ImageError
from vitrail.serve.http_errors import public_message
from vitrail.serve.limits import BatchingConfig, Limits

LIMITS = Limits(max_bytes=200_000, max_pixels=1_000_000, max_images=3, body_timeout=1.0)
JPEG = {"content-type": "image/jpeg"}
PART = b"--x\r\nContent-Disposition: form-data; name=image; filename=a.jpg\r\n\r\n" + photo()
JSON_HEADERS = {"headers": {"content-type": "application/json"}}
TRUNCATED_FORM = PART + b"\r\n" + PART[:-100]
SECRETS = re.compile(
    r"/(srv|usr|home|root|tmp|opt|lib)\b|site-packages|\.py\b|Traceback|0x[0-9a-f]{6,}|[Pp]ython|PIL\b|pip "
)


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with run_server(served(), LIMITS) as (client, _):
        yield client


def error_code(response: httpx.Response, status: int) -> str:
    """Check the form of an error response; returns its code."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"code", "message", "request_id"}
    assert error["request_id"] == response.headers["x-request-id"]
    assert error["message"].endswith(".")
    assert not SECRETS.search(response.text), response.text
    assert str(ROOT) not in response.text
    return error["code"]


@pytest.mark.parametrize("name", sorted(malicious_files()))
def test_a_malicious_file_is_rejected_with_a_reason(client: httpx.Client, name: str) -> None:
    response = client.post("/v1/predict", content=malicious_files()[name], headers=JPEG)
    if "bomb" in name:
        assert error_code(response, 413) == "too_many_pixels"
    else:
        assert error_code(response, 400) == "image_unreadable"


def test_the_error_names_the_invalid_image_of_several(client: httpx.Client) -> None:
    files = [("images", photo()), ("images", b"no image"), ("images", photo(1))]
    response = client.post("/v1/predict", files=files)
    assert error_code(response, 400) == "image_unreadable"
    assert response.json()["error"]["message"].startswith("image 2 of 3: this is not a supported image")


def test_the_number_of_pixels_is_checked_before_decoding(client: httpx.Client) -> None:
    start = time.monotonic()
    assert (
        error_code(client.post("/v1/predict", content=png_with_size(1001, 1000), headers=JPEG), 413)
        == "too_many_pixels"
    )
    assert time.monotonic() - start < 2
    assert (
        error_code(client.post("/v1/predict", content=png_with_size(1000, 1000), headers=JPEG), 400)
        == "image_unreadable"
    )


def test_a_large_body_is_rejected_with_and_without_content_length(client: httpx.Client) -> None:
    body = bytes(LIMITS.max_bytes + 1)
    assert error_code(client.post("/v1/predict", content=body, headers=JPEG), 413) == "body_too_large"
    chunks = iter([body[:100_000], body[100_000:]])
    assert error_code(client.post("/v1/predict", content=chunks, headers=JPEG), 413) == "body_too_large"
    assert error_code(client.post("/v1/predict", files={"image": body}), 413) == "body_too_large"
    assert error_code(client.post("/v1/predict", json={"image": "A" * LIMITS.max_bytes}), 413) == "body_too_large"


def test_too_many_images_are_rejected(client: httpx.Client) -> None:
    four = [photo()] * 4
    assert error_code(client.post("/v1/predict", files=[("images", p) for p in four]), 413) == "too_many_images"
    texts = [base64.b64encode(p).decode() for p in four]
    assert error_code(client.post("/v1/predict", json={"images": texts}), 413) == "too_many_images"


@pytest.mark.parametrize("kind", ["text/plain", "image/", "video/mp4"])
def test_unsupported_content_types_are_rejected(client: httpx.Client, kind: str) -> None:
    response = client.post("/v1/predict", content=photo(), headers={"content-type": kind} if kind else {})
    assert error_code(response, 415) == "unsupported_body"


@pytest.mark.parametrize("coding", ["gzip", "br", "identity, gzip", "x" * 300])
def test_a_compressed_body_is_rejected_with_the_accepted_encoding(client: httpx.Client, coding: str) -> None:
    response = client.post("/v1/predict", content=photo(), headers=JPEG | {"content-encoding": coding})
    assert error_code(response, 415) == "unsupported_encoding"
    assert response.headers["accept-encoding"] == "identity"
    assert "expected identity" in response.json()["error"]["message"]


@pytest.mark.parametrize("coding", ["", "identity", "Identity"])
def test_content_encoding_identity_is_accepted(client: httpx.Client, coding: str) -> None:
    response = client.post("/v1/predict", content=photo(), headers=JPEG | {"content-encoding": coding})
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"content": b"", "headers": JPEG}, "no_image"),
        ({"json": {}}, "no_image"),
        ({"json": {"images": []}}, "no_image"),
        ({"files": {"other": photo()}}, "bad_form"),
        ({"files": {"images": (None, "text")}}, "image_unreadable"),
        ({"content": b"--x\r\n", "headers": {"content-type": "multipart/form-data"}}, "bad_form"),
        ({"content": b"nonsense", "headers": {"content-type": "multipart/form-data; boundary=x"}}, "bad_form"),
        ({"content": TRUNCATED_FORM, "headers": {"content-type": "multipart/form-data; boundary=x"}}, "bad_form"),
        ({"content": b"{", "headers": {"content-type": "application/json"}}, "bad_json"),
        ({"content": b"[" * 19_000, "headers": {"content-type": "application/json"}}, "bad_json"),
        ({"content": b'{"image":' + b"[" * 9000 + b"]" * 9000 + b"}", **JSON_HEADERS}, "bad_json"),
        ({"content": b'{"image": "' + b"\\n" * 90_000 + b'"}', **JSON_HEADERS}, "bad_json"),
        ({"content": b"\xff\xfe\0", "headers": {"content-type": "application/json"}}, "bad_json"),
        ({"json": [1]}, "bad_json"),
        ({"json": {"images": "abc"}}, "bad_json"),
        ({"json": {"images": [3]}}, "bad_json"),
        ({"json": {"image": "a", "images": ["a"]}}, "bad_json"),
        ({"json": {"image": "not base64!"}}, "not_base64"),
        ({"json": {"image": "http://127.0.0.1/cat.jpg"}}, "not_base64"),
        ({"json": {"image": "data:image/png,raw"}}, "not_base64"),
        ({"json": {"image": "AAAA"}}, "image_unreadable"),
    ],
)
def test_an_invalid_body_is_rejected_with_its_error_code(client: httpx.Client, body: dict[str, Any], code: str) -> None:
    assert error_code(client.post("/v1/predict", **body), 400) == code


@pytest.mark.parametrize(
    ("path", "values", "message"),
    [
        ("predict", {"top": "0"}, "top: got 0, expected an integer, 1 or more."),
        ("predict", {"top": "two"}, "'top' is not valid JSON"),
        ("predict", {"top": "true"}, "top: got true, expected an integer, 1 or more."),
        ("predict", {"top": "1.5"}, "got 1.5"),
        ("predict", {"top": "null"}, "got null"),
        ("predict", {"top": "[" * 300 + "]" * 300}, "top: got a list, expected an integer, 1 or more."),
        (
            "predict",
            {"hide": "[" * 300 + "]" * 300},
            "hide: got a list, expected a list of patch numbers, row by row from 0.",
        ),
        ("predict", {"Top": "3"}, "unknown parameter 'Top', expected one of model, version, hide, fill, top"),
        ("predict", {"hide": "[99]"}, "got patch 99, expected 0 to 15"),
        ("predict", {"hide": "[-1]"}, "got patch -1"),
        ("predict", {"hide": '["a"]'}, 'hide: got "a", expected a list of patch numbers, row by row from 0.'),
        ("predict", {"hide": '{"a": 1}'}, "got an object"),
        ("predict", {"hide": ["[1,2]", "5"]}, "hide"),
        ("predict", {"top": ["1", "2"]}, "'top' is given more than once"),
        ("predict", {"hide": "one"}, "'hide' is not valid JSON"),
        ("predict", {"fill": "red"}, 'fill: got "red", expected mean, zero or blur.'),
        ("predict", {"fill": "r" * 500}, "rrr..."),
        ("embed", {"top": "3"}, "unknown parameter 'top'"),
        ("explain", {"layers": "[3]"}, "got layer 3; expected 1 to 2"),
        ("explain", {"layers": "[0]"}, "got layer 0"),
        ("explain", {"methods": '["lime"]'}, "got method 'lime', expected one of rollout, gradient"),
        ("explain", {"methods": "[1]"}, "methods: got 1, expected a list of method names."),
        ("explain", {"layers": str([1] * 1001)}, "layers has 1,001 values, expected at most 1,000."),
        ("explain", {"target": "horse"}, "unknown class 'horse'"),
        ("explain", {"target": "5"}, "there is no class 5"),
        ("explain", {"hide": "[16]"}, "got patch 16"),
    ],
)
def test_the_error_names_the_invalid_parameter(
    client: httpx.Client, path: str, values: dict[str, Any], message: str
) -> None:
    response = client.post(f"/v1/{path}", params=values, content=photo(), headers=JPEG)
    assert error_code(response, 400) in ("invalid_parameter", "patch_out_of_range")
    assert message in response.json()["error"]["message"]


@pytest.mark.parametrize("deadline", ["0", "-5", "soon", "1.5", "9" * 12])
def test_an_invalid_deadline_is_rejected(client: httpx.Client, deadline: str) -> None:
    response = client.post("/v1/predict", content=photo(), headers=JPEG | {"x-deadline-ms": deadline})
    assert error_code(response, 400) == "invalid_parameter"


def test_explain_accepts_only_one_image(client: httpx.Client) -> None:
    response = client.post("/v1/explain", files=[("images", photo()), ("images", photo())])
    assert error_code(response, 400) == "single_image_only"


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/predict"), ("POST", "/v1/model"), ("PUT", "/"), ("DELETE", "/docs")]
)
def test_other_http_methods_are_rejected_with_the_allowed_ones(client: httpx.Client, method: str, path: str) -> None:
    response = client.request(method, path)
    assert error_code(response, 405) == "method_not_allowed"
    assert response.headers["allow"] in ("GET, HEAD", "POST")


@pytest.mark.parametrize(
    "path",
    [
        "/v2/model",
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/samples/../../app.py",
        "/samples/..%2f..%2fapp.py",
        "/static/",
        "/static/.hidden",
        "/samples/none.jpg",
    ],
)
def test_unknown_paths_are_answered_404(client: httpx.Client, path: str) -> None:
    with socket.create_connection((client.base_url.host, client.base_url.port)) as raw:  # httpx normalizes paths
        raw.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        response = b"".join(iter(lambda: raw.recv(65536), b""))
    assert response.startswith(b"HTTP/1.1 404")
    assert b"unknown path; see /docs" in response


def test_a_slow_body_times_out(client: httpx.Client) -> None:
    with socket.create_connection((client.base_url.host, client.base_url.port)) as raw:
        raw.sendall(
            b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/jpeg\r\nContent-Length: 1000\r\n\r\nabc"
        )
        raw.settimeout(10)
        response = b"".join(iter(lambda: raw.recv(65536), b""))
    assert response.startswith(b"HTTP/1.1 408")


def test_a_deadline_counts_while_the_body_arrives(client: httpx.Client) -> None:
    head = b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/jpeg\r\nContent-Length: 1000\r\n"
    with socket.create_connection((client.base_url.host, client.base_url.port)) as raw:
        start = time.monotonic()
        raw.sendall(head + b"X-Deadline-Ms: 200\r\n\r\nabc")
        raw.settimeout(10)
        response = b"".join(iter(lambda: raw.recv(65536), b""))
        seconds = time.monotonic() - start
    assert response.startswith(b"HTTP/1.1 504")
    assert 0.15 < seconds < 0.9  # the body itself may take a second


@pytest.mark.parametrize("kind", ["", "application/x-www-form-urlencoded"])
@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF"])
def test_an_image_without_a_content_type_is_recognized_by_its_first_bytes(
    client: httpx.Client, kind: str, image_format: str
) -> None:
    headers = {"content-type": kind} if kind else {}
    assert client.post("/v1/predict", content=photo(kind=image_format), headers=headers).status_code == 200
    chunks = iter([photo(kind=image_format)[:3], photo(kind=image_format)[3:]])
    assert client.post("/v1/predict", content=chunks, headers=headers).status_code == 200


@pytest.mark.parametrize("body", [b"", b"image=cat.jpg", b"\xff\xd8\xff", b"image=" + photo()])
@pytest.mark.parametrize("kind", ["", "application/x-www-form-urlencoded"])
def test_other_bodies_without_a_content_type_are_rejected_with_a_hint(
    client: httpx.Client, kind: str, body: bytes
) -> None:
    response = client.post("/v1/predict", content=body, headers={"content-type": kind} if kind else {})
    assert error_code(response, 415) == "unsupported_body"
    assert "for an image, send Content-Type: image/jpeg" in response.json()["error"]["message"]


@pytest.mark.parametrize("address", ["http://127.0.0.1/cat.jpg", "HTTPS://example.org", "file:///etc/passwd"])
def test_a_url_is_never_opened_and_the_error_says_so(client: httpx.Client, address: str) -> None:
    good = base64.b64encode(photo()).decode()
    response = client.post("/v1/predict", json={"images": [good, address]})
    assert error_code(response, 400) == "not_base64"
    message = response.json()["error"]["message"]
    assert message.startswith("image 2 of 2: this is a URL, and URLs are never opened")


def test_base64_with_escaped_slashes_is_read(client: httpx.Client) -> None:
    text = base64.b64encode(photo()).decode()
    assert "/" in text
    body = json.dumps({"image": text}).replace("/", r"\/")
    assert client.post("/v1/predict", content=body, **JSON_HEADERS).status_code == 200


LARGE_JSON = {
    "lists": b'{"image": "AAAA", "top": [' + b"[]," * 3_000_000 + b"1]}",
    "numbers": b'{"image": "AAAA", "hide": [' + b"1," * 4_500_000 + b"1]}",
    "objects": b'{"image": "AAAA", "top": [' + b"{}," * 3_000_000 + b"1]}",
    "images": b'{"images": [' + b'"",' * 3_000_000 + b'""]}',
    "escapes": b'{"image": "' + rb"\/" * 4_500_000 + b'"}',
}


@pytest.mark.parametrize("name", sorted(LARGE_JSON))
def test_a_request_with_millions_of_values_is_rejected_and_blocks_no_other(name: str) -> None:
    with run_server(served()) as (client, _):

        def max_latency() -> float:
            """Send a request with millions of values; returns the longest latency of /healthz meanwhile."""
            responses: list[httpx.Response] = []
            thread = threading.Thread(
                target=lambda: responses.append(
                    httpx.post(f"{client.base_url}/v1/predict", content=LARGE_JSON[name], **JSON_HEADERS)
                )
            )
            thread.start()
            latencies = []
            while thread.is_alive():
                start = time.monotonic()
                assert client.get("/healthz").status_code == 200
                latencies.append(time.monotonic() - start)
            thread.join()
            assert error_code(responses[0], responses[0].status_code) in ("too_many_values", "bad_json")
            return max(latencies)

        assert min(max_latency() for _ in range(3)) < 0.2  # the machine may be busy at times


FORM = {"content-type": "multipart/form-data; boundary=x"}


def form_of(content: bytes) -> bytes:
    return b'--x\r\nContent-Disposition: form-data; name="image"; filename=a\r\n\r\n' + content + b"\r\n--x--\r\n"


def test_a_form_full_of_false_boundaries_is_rejected_early() -> None:
    with run_server(served()) as (client, _):
        start = time.process_time()
        response = client.post("/v1/predict", content=form_of(b"\r\n--xy" * 2_000_000), headers=FORM)
        assert error_code(response, 400) == "bad_form"
        assert time.process_time() - start < 0.6  # without the limit it takes more than a second
        assert "too many parts" in response.json()["error"]["message"]
        accepted = client.post("/v1/predict", content=form_of(photo() + b"\r\n--xy" * 100), headers=FORM)
        assert accepted.status_code == 200


def test_a_form_with_the_maximum_number_of_fields_is_read(client: httpx.Client) -> None:
    fields = b"".join(b'--x\r\nContent-Disposition: form-data; name="hide"\r\n\r\n0\r\n' for _ in range(2000))
    response = client.post("/v1/predict", content=fields + form_of(photo()), headers=FORM)
    assert response.status_code == 200


@settings(max_examples=60)
@given(st.binary(max_size=300), st.sampled_from(["/v1/predict", "/v1/embed", "/v1/explain"]), st.integers(0, 3))
def test_random_bytes_are_rejected_cleanly(client: httpx.Client, data: bytes, path: str, kind: int) -> None:
    kinds = ("image/png", "application/json", "multipart/form-data; boundary=x", "application/octet-stream")
    body = b"--x\r\nContent-Disposition: form-data; name=image; filename=a\r\n\r\n" + data if kind == 2 else data
    response = client.post(path, content=body, headers={"content-type": kinds[kind]})
    assert error_code(response, 400)


def test_damaged_images_are_rejected_or_read_completely(client: httpx.Client) -> None:
    random = np.random.default_rng(1)
    refused = 0
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "TIFF"):
        image = photo(kind=kind)
        for turn in range(12):
            data = bytearray(image[: random.integers(1, len(image))] if turn % 2 else image)
            for place in random.integers(0, min(len(data), 200), size=turn % 5):
                data[place] = random.integers(0, 256)
            response = client.post("/v1/predict", content=bytes(data), headers=JPEG)
            if response.status_code != 200:
                refused += 1
                error_code(response, 413 if "pixels" in response.text and response.status_code == 413 else 400)
    assert refused > 20


def test_details_of_the_machine_are_removed_from_errors() -> None:
    assert public_message(ImageError("image of 3 bytes cannot be read: no /usr/lib/x.so"), "damaged.") == "damaged."
    assert public_message(ImageError("Pillow image RGB 3 x 4 is at 0x7f01"), "damaged.") == "damaged."
    hinted = ImageError("image of 9 bytes is HEIC, which needs a plugin; try pip install pillow-heif.")
    assert public_message(hinted, "") == "the image is HEIC, which needs a plugin."


@pytest.mark.parametrize("options", [{"max_bytes": 0}, {"max_pixels": -1}, {"max_images": 0}])
def test_limits_of_zero_or_less_are_rejected(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="expected more than 0"):
        Limits(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{"max_queue": 0}, {"batch_size": 0}, {"batch_delay": -1}, {"batch_delay": 2}, {"engine_threads": 0}]
)
def test_an_invalid_batching_config_is_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        BatchingConfig(**options)


def test_json_escapes_do_not_hide_a_value(client: httpx.Client) -> None:
    body = json.dumps({"image": base64.b64encode(photo()).decode(), "t\u006fp": 1})
    response = client.post("/v1/predict", content=body, headers={"content-type": "application/json"})
    assert len(response.json()["results"][0]["predictions"]) == 1
