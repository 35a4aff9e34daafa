"""/ping and /invocations, as Amazon SageMaker calls them."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from serving import photo, run_server, served
from small_models import model, small

import vitrail
from vitrail.serve.app import Service


@pytest.fixture(scope="module")
def running_server(vit: vitrail.Model) -> Iterator[tuple[httpx.Client, Service]]:
    with run_server(served(vit)) as client_and_service:
        yield client_and_service


@pytest.fixture
def client(running_server: tuple[httpx.Client, Service]) -> httpx.Client:
    return running_server[0]


def test_ping_is_200_only_when_the_model_is_warmed_up(running_server: tuple[httpx.Client, Service]) -> None:
    client, service = running_server
    assert client.get("/ping").status_code == 200
    service.default.batcher.ready = False
    try:
        assert client.get("/ping").status_code == 503
    finally:
        service.default.batcher.ready = True


@pytest.mark.parametrize("kind", ["image/jpeg", "application/x-image", "Application/X-Image; q=1", "application/json"])
@pytest.mark.parametrize("accept", ["application/json", "*/*", "text/csv, application/*;q=0.5", None])
def test_invocations_are_answered_like_predict(client: httpx.Client, kind: str, accept: str | None) -> None:
    headers = {"content-type": kind, "accept": accept or ""}
    if kind == "application/json":
        response = client.post(
            "/invocations", json={"image": base64.b64encode(photo()).decode(), "top": 2}, headers=headers
        )
    else:
        response = client.post("/invocations", content=photo(), headers=headers)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    expected = client.post("/v1/predict", content=photo(), headers={"content-type": "image/jpeg"}).json()["results"]
    [predictions] = (result["predictions"] for result in response.json()["results"])
    assert [p["label"] for p in predictions] == [p["label"] for p in expected[0]["predictions"]][: len(predictions)]
    assert len(predictions) == (2 if kind == "application/json" else 5)


@pytest.mark.parametrize("accept", ["text/csv", "application/x-npy", "image/png, text/plain"])
def test_a_client_that_does_not_accept_json_is_refused(client: httpx.Client, accept: str) -> None:
    response = client.post("/invocations", content=photo(), headers={"content-type": "image/jpeg", "accept": accept})
    assert (response.status_code, response.json()["error"]["code"]) == (406, "not_acceptable")


def test_invalid_invocations_are_refused_like_those_of_predict(client: httpx.Client) -> None:
    damaged = client.post("/invocations", content=b"no image", headers={"content-type": "application/x-image"})
    assert (damaged.status_code, damaged.json()["error"]["code"]) == (400, "image_unreadable")
    text = client.post("/invocations", content=b"1,2,3", headers={"content-type": "text/csv"})
    assert (text.status_code, text.json()["error"]["code"]) == (415, "unsupported_body")


def test_a_model_without_classes_returns_embeddings() -> None:
    encoder = model(small(num_classes=0))
    with run_server(served(encoder)) as (client, _):
        response = client.post("/invocations", content=photo(), headers={"content-type": "application/x-image"})
        assert np.allclose(response.json()["results"][0]["embedding"], encoder.embed(photo())[0], atol=1e-5)
