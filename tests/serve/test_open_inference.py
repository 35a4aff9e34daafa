"""Open Inference Protocol v2 on a real server, with Triton's HTTP client."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any, get_args

import httpx
import numpy as np
import pytest
from conftest import import_peer
from serving import BusyServer, photo, run_server, served, wait_until
from small_models import LABELS, gradient, model, small

import vitrail
from vitrail.serve.app import Service, create_app
from vitrail.serve.limits import Limits
from vitrail.serve.open_inference import STATES
from vitrail.serve.protocol_schema import IndexedVersion
from vitrail.serve.response_types import VersionState

triton = import_peer("tritonclient.http")
from tritonclient.utils import InferenceServerException  # noqa: E402

INFER = "/v2/models/small/infer"
PHOTOS = [photo(0), photo(1, "PNG"), photo(2)]


@pytest.fixture(scope="module")
def running_server(vit: vitrail.Model) -> Iterator[tuple[httpx.Client, Service]]:
    with run_server(served(vit), Limits(max_images=4)) as client_and_service:
        yield client_and_service


@pytest.fixture
def http(running_server: tuple[httpx.Client, Service]) -> httpx.Client:
    return running_server[0]


def open_client(http: httpx.Client) -> Any:
    return triton.InferenceServerClient(f"{http.base_url.host}:{http.base_url.port}")


@pytest.fixture
def client(http: httpx.Client) -> Iterator[Any]:
    with open_client(http) as client:
        yield client


def encoded_images(files: list[bytes], binary: bool = True) -> Any:
    """The input of a request, with images as BYTES."""
    elements = files if binary else [base64.b64encode(data) for data in files]
    tensor = triton.InferInput("images", [len(files)], "BYTES")
    return tensor.set_data_from_numpy(np.array(elements, np.object_), binary_data=binary)


def pixel_images(array: np.ndarray[Any, Any], binary: bool = True) -> Any:
    return triton.InferInput("images", list(array.shape), "UINT8").set_data_from_numpy(array, binary_data=binary)


def json_request(files: list[bytes], **values: Any) -> dict[str, Any]:
    data = [base64.b64encode(data).decode() for data in files]
    return {"inputs": [{"name": "images", "shape": [len(files)], "datatype": "BYTES", "data": data}], **values}


def probabilities(vit: vitrail.Model, images: list[Any]) -> np.ndarray[Any, Any]:
    scores = [{p.index: p.score for p in ranked} for ranked in vit.predict(images, top=len(LABELS))]
    return np.array([[row[index] for index in range(len(LABELS))] for row in scores])


def test_the_server_and_its_model_describe_themselves(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("small")
    assert client.is_model_ready("small", "1")
    assert not client.is_model_ready("small", "2")
    assert not client.is_model_ready("large")
    server = client.get_server_metadata()
    assert (server["name"], server["version"]) == ("vitrail", vitrail.__version__)
    metadata = client.get_model_metadata("small")
    assert metadata == client.get_model_metadata("small", "1")
    assert (metadata["name"], metadata["versions"], metadata["platform"]) == ("small", ["1"], "vitrail_torch")
    assert metadata["inputs"] == [{"name": "images", "datatype": "BYTES", "shape": [-1]}]
    assert {one["name"]: (one["datatype"], one["shape"]) for one in metadata["outputs"]} == {
        "logits": ("FP32", [-1, 5]),
        "probabilities": ("FP32", [-1, 5]),
        "labels": ("BYTES", [-1]),
        "features": ("FP32", [-1, 128]),
    }
    index = client.get_model_repository_index()
    assert index == [{"name": "small", "version": "1", "state": "READY", "reason": ""}]


@pytest.mark.parametrize("binary", [True, False])
def test_encoded_images_get_the_outputs_of_the_model(client: Any, vit: vitrail.Model, binary: bool) -> None:
    names = ("logits", "probabilities", "labels", "features")
    outputs = [triton.InferRequestedOutput(name, binary_data=binary) for name in names]
    result = client.infer("small", [encoded_images(PHOTOS, binary)], outputs=outputs, request_id="a7")
    answer = result.get_response()
    assert (answer["model_name"], answer["model_version"], answer["id"]) == ("small", "1", "a7")
    assert [output["name"] for output in answer["outputs"]] == list(names)
    assert all(("data" in output) == (not binary) for output in answer["outputs"])
    expected = probabilities(vit, PHOTOS)
    assert np.allclose(result.as_numpy("probabilities"), expected, atol=1e-6)
    logits = result.as_numpy("logits")
    assert (logits.shape, logits.dtype) == ((3, 5), np.float32)
    softmax = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert np.allclose(softmax, expected, atol=1e-6)
    assert np.allclose(result.as_numpy("features"), vit.embed(PHOTOS), atol=1e-5)
    labels = [text.decode() if binary else text for text in result.as_numpy("labels")]
    assert labels == [ranked[0].label for ranked in vit.predict(PHOTOS)]


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("size", [(50, 40), (32, 32), (31, 90)])
def test_pixels_are_preprocessed_like_images(
    client: Any, vit: vitrail.Model, size: tuple[int, int], binary: bool
) -> None:
    array = np.stack([np.asarray(gradient(*size)), np.asarray(gradient(*size))[::-1]])[: 2 if binary else 1]
    result = client.infer("small", [pixel_images(array, binary)])
    assert np.allclose(result.as_numpy("probabilities"), probabilities(vit, list(array)), atol=1e-6)


def test_large_and_gray_pixels_are_accepted(client: Any, vit: vitrail.Model) -> None:
    array = np.asarray(gradient(700, 600))[None]
    assert np.allclose(
        client.infer("small", [pixel_images(array)]).as_numpy("probabilities"),
        probabilities(vit, list(array)),
        atol=1e-6,
    )
    gray = np.asarray(gradient().convert("L"))[None, :, :, None]
    assert np.allclose(
        client.infer("small", [pixel_images(gray)]).as_numpy("probabilities"), probabilities(vit, list(gray)), atol=1e-6
    )


def test_without_outputs_the_class_outputs_are_returned(client: Any, http: httpx.Client) -> None:
    result = client.infer("small", [encoded_images(PHOTOS[:1])])
    assert [one["name"] for one in result.get_response()["outputs"]] == ["logits", "probabilities", "labels"]
    response = http.post(INFER, json=json_request(PHOTOS[:1]))
    assert response.headers["content-type"] == "application/json"
    assert "inference-header-content-length" not in response.headers
    assert [one["shape"] for one in response.json()["outputs"]] == [[1, 5], [1, 5], [1]]
    assert "id" not in response.json()
    assert set(response.json()) == {"model_name", "model_version", "outputs"}


@pytest.mark.parametrize("name", ["logits", "probabilities", "labels"])
@pytest.mark.parametrize("count", [1, 3, 5, 1000])
def test_classification_returns_the_best_classes_as_text(
    client: Any, vit: vitrail.Model, name: str, count: int
) -> None:
    outputs = [triton.InferRequestedOutput(name, class_count=count)]
    texts = client.infer("small", [encoded_images(PHOTOS)], outputs=outputs).as_numpy(name)
    assert texts.shape == (3, min(count, 5))
    for row, expected in zip(texts, vit.predict(PHOTOS, top=min(count, 5)), strict=True):
        parts = [text.decode().split(":") for text in row]
        assert [(int(index), label) for _, index, label in parts] == [(p.index, p.label) for p in expected]
        values = [float(value) for value, _, _ in parts]
        assert values == sorted(values, reverse=True)
        if name != "logits":
            assert values == pytest.approx([p.score for p in expected], abs=1e-5)


def test_binary_and_json_outputs_can_be_mixed(client: Any) -> None:
    outputs = [triton.InferRequestedOutput("labels", binary_data=False), triton.InferRequestedOutput("logits")]
    result = client.infer("small", [encoded_images(PHOTOS)], outputs=outputs)
    assert result.as_numpy("labels").shape == (3,)
    assert result.as_numpy("logits").shape == (3, 5)
    assert ["data" in one for one in result.get_response()["outputs"]] == [True, False]


def test_the_body_may_be_one_image(http: httpx.Client, vit: vitrail.Model) -> None:
    headers = {"inference-header-content-length": "0", "content-type": "application/octet-stream"}
    outputs = http.post(INFER, content=PHOTOS[0], headers=headers).json()["outputs"]
    assert outputs[2] == {
        "name": "labels",
        "datatype": "BYTES",
        "shape": [1],
        "data": [vit.predict(PHOTOS[0])[0].label],
    }


def test_a_version_is_selected_by_the_path(http: httpx.Client) -> None:
    request = json_request(PHOTOS[:1])
    assert http.post("/v2/models/small/versions/1/infer", json=request).json()["model_version"] == "1"
    refused = http.post("/v2/models/small/versions/2/infer", json=request)
    assert (refused.status_code, refused.json()) == (
        404,
        {"error": "model 'small' has no version '2'; there is 1."},
    )


def test_model_names_may_contain_slashes_and_spaces(vit: vitrail.Model) -> None:
    one = served(vit)
    one.name = "org/my model@2"
    with run_server(one) as (http, _), open_client(http) as client:
        assert client.is_model_ready(one.name, "1")
        assert client.get_model_metadata(one.name)["name"] == one.name
        answer = client.infer(one.name, [encoded_images(PHOTOS)], model_version="1").get_response()
        assert answer["model_name"] == one.name


def test_a_model_without_classes_returns_features() -> None:
    encoder = model(small(num_classes=0))
    with run_server(served(encoder)) as (http, _), open_client(http) as client:
        metadata = client.get_model_metadata("small")["outputs"]
        assert metadata == [{"name": "features", "datatype": "FP32", "shape": [-1, 128]}]
        result = client.infer("small", [encoded_images(PHOTOS)])
        assert np.allclose(result.as_numpy("features"), encoder.embed(PHOTOS), atol=1e-5)
        outputs = [triton.InferRequestedOutput("labels")]
        with pytest.raises(InferenceServerException, match="got output 'labels', expected one of features"):
            client.infer("small", [encoded_images(PHOTOS)], outputs=outputs)


def test_probabilities_of_a_multi_label_model_are_independent() -> None:
    vit = model(small(), multi_label=True)
    with run_server(served(vit)) as (http, _), open_client(http) as client:
        result = client.infer("small", [encoded_images(PHOTOS)])
        sigmoid = 1 / (1 + np.exp(-result.as_numpy("logits").astype(np.float64)))
        assert np.allclose(result.as_numpy("probabilities"), sigmoid, atol=1e-6)


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "an unknown model": ({"path": "/v2/models/large/infer"}, 404, "there is no model 'large'"),
    "an unknown path": ({"path": "/v2/models"}, 404, "unknown path"),
    "a compressed body": ({"headers": {"content-encoding": "gzip"}}, 415, "send it uncompressed"),
    "a form": ({"headers": {"content-type": "multipart/form-data; boundary=x"}}, 415, "expected application/json or"),
    "a damaged image": ({"json": json_request([b"no image"])}, 400, "this is not a supported image"),
    "no base64": (
        {"json": json_request([]) | {"inputs": [{**json_request([b""])["inputs"][0], "data": ["!"]}]}},
        400,
        "not valid base64",
    ),
    "too many images": ({"json": json_request([b"x"] * 5)}, 413, "at most 4 are allowed"),
    "a large body": ({"content": bytes(17 * 2**20)}, 413, "larger than the limit"),
    "an invalid header length": ({"headers": {"inference-header-content-length": "-1"}}, 400, "must be the number"),
    "a header length beyond the body": ({"headers": {"inference-header-content-length": "99999"}}, 400, "but the body"),
    "an unknown output": ({"json": json_request(PHOTOS[:1], outputs=[{"name": "boxes"}])}, 400, "got output 'boxes'"),
    "classes of features": (
        {"json": json_request(PHOTOS[:1], outputs=[{"name": "features", "parameters": {"classification": 1}}])},
        400,
        "features have no classes",
    ),
    "a short timeout": ({"json": json_request(PHOTOS[:1], parameters={"timeout": 1})}, 504, "the deadline passed"),
    "an invalid deadline": ({"headers": {"x-deadline-ms": "0"}}, 400, "X-Deadline-Ms"),
    "a page of another site": ({"headers": {"origin": "https://example.org"}}, 403, "another site"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_errors_are_one_sentence_in_the_shape_of_the_protocol(http: httpx.Client, name: str) -> None:
    options, status, message = REFUSED[name]
    path, body = options.get("path", INFER), {k: v for k, v in options.items() if k in ("json", "content", "headers")}
    if "json" not in body and "content" not in body:
        body["content"] = json.dumps(json_request(PHOTOS[:1]))
    response = http.post(path, **body)
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    assert message in response.json()["error"]
    assert response.json()["error"].endswith(".")


def test_tritons_client_reports_the_errors(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="image 2 of 2: this is not a supported image") as caught:
        client.infer("small", [encoded_images([PHOTOS[0], b"no image"])])
    assert caught.value.status() == "400"
    with pytest.raises(InferenceServerException, match="expected identity"):
        client.infer("small", [encoded_images(PHOTOS)], request_compression_algorithm="gzip")
    floats = np.zeros((1, 3, 32, 32), np.float32)
    tensor = triton.InferInput("images", list(floats.shape), "FP32").set_data_from_numpy(floats)
    with pytest.raises(InferenceServerException, match="got datatype"):
        client.infer("small", [tensor])
    assert client.infer("small", [encoded_images(PHOTOS)], response_compression_algorithm="gzip").as_numpy(
        "logits"
    ).shape == (3, 5)  # answered uncompressed


def test_inference_needs_the_token_and_health_does_not() -> None:
    with run_server(served(), token="secret") as (http, _), open_client(http) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        with pytest.raises(InferenceServerException, match=r"\[401\] a token is required"):
            client.infer("small", [encoded_images(PHOTOS)])
        headers = {"Authorization": "Bearer secret"}
        assert client.infer("small", [encoded_images(PHOTOS)], headers=headers).as_numpy("labels").shape == (3,)


def test_requests_share_the_batches_and_the_queue_of_the_service(request_pool: Any) -> None:
    with run_server(served()) as (client, service):
        busy = BusyServer(client, service, request_pool)
        answers = [request_pool.submit(client.post, INFER, json=json_request([photo(n)])) for n in range(2)]
        answers.append(busy.send(3))
        busy.wait_until_queued(3)
        busy.engine.go.set()
        assert [answer.result().status_code for answer in answers] == [200, 200, 200]
        assert busy.engine.batches == [1, 3]
        wait_until(lambda: service.body_bytes.used == 0)


def test_a_server_that_is_not_ready_says_so() -> None:
    with run_server(served()) as (http, service), open_client(http) as client:
        service.draining = True
        assert client.is_server_live()
        assert not client.is_server_ready()
        service.draining = False
        service.default.batcher.ready = False
        assert not client.is_server_ready()
        assert not client.is_model_ready("small")
        assert http.get("/v2/models/small/ready").json() == {"error": "the model is warming up."}
        assert client.get_model_repository_index()[0]["state"] == "LOADING"


def test_every_state_of_a_version_has_a_name_in_the_protocol() -> None:
    assert set(STATES) == set(get_args(VersionState.model_fields["state"].annotation))
    named = get_args(IndexedVersion.model_fields["state"].annotation)
    assert set(STATES.values()) == set(named)


def test_metrics_name_the_route_as_declared(http: httpx.Client) -> None:
    http.post(INFER, json=json_request(PHOTOS[:1]))
    lines = http.get("/metrics").text.splitlines()
    sample = 'vitrail_requests_total{model="small",route="/v2/models/{name:path}/infer",status="200",version="1"}'
    assert any(line.startswith(sample) for line in lines)


def test_the_schema_lists_the_routes_of_the_protocol() -> None:
    paths = create_app(served()).openapi()["paths"]
    for path in ("/v2/models/{name}/infer", "/v2/models/{name}/versions/{version}/infer"):
        operation = paths[path]["post"]
        named = [one["name"] for one in operation["parameters"] if one["in"] == "path"]
        assert named == [part[1:-1] for part in path.split("/") if part.startswith("{")]
        error = operation["responses"]["400"]["content"]["application/json"]["schema"]["$ref"]
        assert error.endswith("/PlainError")
