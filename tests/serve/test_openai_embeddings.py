"""/v1/embeddings and /v1/models on a real server, with OpenAI's client."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from conftest import import_peer
from serving import photo, run_server, served

import vitrail
from vitrail.serve.limits import Limits

openai = import_peer("openai")
PHOTOS = [photo(0), photo(1, "PNG"), photo(2, "WEBP")]


def data_uri(data: bytes, kind: str = "jpeg") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


URIS = [data_uri(data, kind) for data, kind in zip(PHOTOS, ("jpeg", "png", "webp"), strict=True)]


@pytest.fixture(scope="module")
def http(vit: vitrail.Model) -> Iterator[httpx.Client]:
    with run_server(served(vit), Limits(max_images=4), token="a-token") as (client, _):
        client.headers["authorization"] = "Bearer a-token"
        yield client


@pytest.fixture
def api(http: httpx.Client) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="a-token", max_retries=0) as api:
        yield api


@pytest.mark.parametrize("options", [{}, {"encoding_format": "float"}])
def test_embeddings_are_the_features_of_the_images(api: Any, vit: vitrail.Model, options: dict[str, str]) -> None:
    answer = api.embeddings.create(model="small", input=URIS, **options)
    assert (answer.object, answer.model, answer.version) == ("list", "small", "1")
    assert [(one.object, one.index) for one in answer.data] == [("embedding", index) for index in range(3)]
    assert np.allclose([one.embedding for one in answer.data], vit.embed(PHOTOS), atol=1e-5)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (0, 0)


def test_base64_holds_little_endian_floats(api: Any, vit: vitrail.Model) -> None:
    [one] = api.embeddings.create(model="small", input=URIS[0], encoding_format="base64").data
    assert np.allclose(np.frombuffer(base64.b64decode(one.embedding), "<f4"), vit.embed(PHOTOS[0])[0], atol=1e-5)


def test_the_models_are_listed(api: Any) -> None:
    [listed] = api.models.list().data
    assert (listed.id, listed.object, listed.owned_by) == ("small", "model", "vitrail")
    assert listed.default == "1"
    assert listed.versions == [{"version": "1", "state": "ready"}]


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def test_images_may_be_content_parts_and_messages(http: httpx.Client, vit: vitrail.Model) -> None:
    expected = vit.embed(PHOTOS[:2]).numpy()
    requests: list[dict[str, Any]] = [
        {"input": [part(URIS[0]), URIS[1]]},
        {"input": part(URIS[0])},
        {"messages": [{"role": "user", "content": [part(URIS[0])]}]},
        {"input": URIS[0], "encoding_format": None, "dimensions": None, "user": None, "messages": None},
    ]
    for request in requests:
        data = http.post("/v1/embeddings", json={"model": "small", "version": "1"} | request).json()["data"]
        assert np.allclose([one["embedding"] for one in data], expected[: len(data)], atol=1e-5)


def test_dimensions_may_be_the_number_of_features(api: Any) -> None:
    assert len(api.embeddings.create(model="small", input=URIS[0], dimensions=128).data[0].embedding) == 128
    with pytest.raises(openai.BadRequestError, match="got dimensions=64, but the embeddings of this model have 128"):
        api.embeddings.create(model="small", input=URIS[0], dimensions=64)


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "text": ({"input": "a photograph of a cat"}, "text_input", "this is text, and the model embeds only images"),
    "one text of two": ({"input": [URIS[0], "cat"]}, "text_input", "image 2 of 2: this is text"),
    "base64 without a prefix": ({"input": "AAAA"}, "text_input", "expected a data URI"),
    "another data URI": ({"input": "data:text/plain;base64,AAAA"}, "text_input", "expected a data URI"),
    "no base64": ({"input": "data:image/png;base64,!"}, "not_base64", "not valid base64"),
    "a URL": ({"input": "https://example.org/a.jpg"}, "not_base64", "URLs are never opened"),
    "a URL in a part": ({"input": [part("http://127.0.0.1/a.jpg")]}, "not_base64", "URLs are never opened"),
    "tokens": ({"input": [1, 2, 3]}, "not_an_image", "image 1 of 3: this is not an image"),
    "lists of tokens": ({"input": [[1], [2]]}, "not_an_image", "this is not an image"),
    "an empty part": ({"input": [{}]}, "not_an_image", "this is not an image"),
    "a part of text": ({"input": [{"type": "text", "text": "a"}]}, "not_an_image", "this is not an image"),
    "nothing": ({"input": []}, "no_image", "expected 1 or more"),
    "neither input nor messages": ({}, "invalid_parameter", "expected either input or messages"),
    "messages with two parts": (
        {"messages": [{"role": "user", "content": [part(URIS[0]), {"type": "text", "text": "cat"}]}]},
        "invalid_parameter",
        "got 2 parts in messages",
    ),
    "messages that are a text": ({"messages": "cat"}, "invalid_parameter", "messages must be a list"),
    "a damaged image": ({"input": data_uri(b"no image")}, "image_unreadable", "this is not a supported image"),
    "another encoding": ({"input": URIS[0], "encoding_format": "int8"}, "invalid_parameter", "float or base64"),
    "a list as encoding": ({"input": URIS[0], "encoding_format": []}, "invalid_parameter", "float or base64"),
    "fractional dimensions": ({"input": URIS[0], "dimensions": 1.5}, "invalid_parameter", "must be an integer"),
    "a model that is a number": ({"input": URIS[0], "model": 3}, "invalid_parameter", "name of a served model"),
    "an unknown parameter": ({"input": URIS[0], "top": 3}, "invalid_parameter", "unknown parameter 'top'"),
    "a version that is a list": ({"input": URIS[0], "version": []}, "invalid_parameter", "a version of the model"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_other_inputs_are_refused_in_one_sentence(http: httpx.Client, name: str) -> None:
    values, code, message = REFUSED[name]
    response = http.post("/v1/embeddings", json={"model": "small"} | values)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] == code
    assert message in response.json()["error"]["message"]
    assert response.json()["error"]["message"].endswith(".")


def test_openais_client_reports_the_errors(api: Any, http: httpx.Client) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model 'text-embedding-3-small'") as caught:
        api.embeddings.create(model="text-embedding-3-small", input=URIS)
    assert caught.value.code == "unknown_model"
    with pytest.raises(openai.APIStatusError, match="at most 4 are allowed") as too_many:
        api.embeddings.create(model="small", input=URIS[:1] * 5)
    assert too_many.value.status_code == 413
    with (
        openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError, match="the token is wrong"),
    ):
        stranger.embeddings.create(model="small", input=URIS)


@pytest.mark.parametrize("kind", ["text/plain", "image/jpeg", "application/octet-stream"])
def test_other_content_types_are_refused(http: httpx.Client, kind: str) -> None:
    response = http.post("/v1/embeddings", content=PHOTOS[0], headers={"content-type": kind})
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_body")
