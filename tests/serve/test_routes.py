"""All routes of a real server, with all types of request body."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
import torch
from serving import photo, run_server, served
from small_models import LABELS, model, small

import vitrail
from vitrail.config import BiTConfig
from vitrail.explain.masking import mask_patches, replacement_pixels
from vitrail.serve.app import Service


@pytest.fixture(scope="module")
def running_server(vit: vitrail.Model) -> Iterator[tuple[httpx.Client, Service]]:
    with run_server(served(vit)) as client_and_service:
        yield client_and_service


@pytest.fixture
def client(running_server: tuple[httpx.Client, Service]) -> httpx.Client:
    return running_server[0]


def as_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def bodies(images: list[bytes], **values: object) -> dict[str, dict[str, object]]:
    """The same request with each type of body."""
    form = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    requests: dict[str, dict[str, object]] = {
        "form": {"files": [("images", ("a.jpg", data)) for data in images], "data": form},
        "json": {"json": {"images": [as_base64(data) for data in images], **values}},
    }
    if len(images) == 1:
        raw = {"content": images[0], "params": form}
        requests["raw"] = {**raw, "headers": {"content-type": "image/jpeg"}}
        requests["bytes"] = {**raw, "headers": {"content-type": "application/octet-stream"}}
        requests["form without a name"] = {"files": {"image": (None, images[0])}, "data": form}
        requests["form of one"] = {"files": {"file": images[0]}, "data": form}
        requests["json of one"] = {"json": {"image": f"data:image/jpeg;base64,{as_base64(images[0])}", **values}}
        requests["in pieces"] = {**requests["raw"], "content": iter([images[0][:100], images[0][100:]])}
    return requests


@pytest.mark.parametrize(
    "kind", ["form", "json", "raw", "bytes", "form of one", "form without a name", "json of one", "in pieces"]
)
def test_one_image_gets_the_predictions_of_predict(client: httpx.Client, vit: vitrail.Model, kind: str) -> None:
    data = photo()
    response = client.post("/v1/predict", **bodies([data], top=3)[kind])
    assert response.status_code == 200
    result = response.json()
    assert (result["model"], result["engine"]) == ("small", "torch")
    assert result["ms"] > 0
    [result] = result["results"]
    expected = vit.predict(data, top=3)
    assert [(p["label"], p["index"]) for p in result["predictions"]] == [(p.label, p.index) for p in expected]
    assert [p["score"] for p in result["predictions"]] == pytest.approx([p.score for p in expected], abs=1e-6)


@pytest.mark.parametrize("kind", ["form", "json"])
def test_several_images_are_answered_in_order(client: httpx.Client, vit: vitrail.Model, kind: str) -> None:
    images = [photo(i, "PNG" if i % 2 else "JPEG") for i in range(11)]
    results = client.post("/v1/predict", **bodies(images)[kind]).json()["results"]
    for result, expected in zip(results, vit.predict(images), strict=True):
        assert [p["index"] for p in result["predictions"]] == [p.index for p in expected]
        assert [p["score"] for p in result["predictions"]] == pytest.approx([p.score for p in expected], abs=1e-6)


def test_features_equal_those_of_embed(client: httpx.Client, vit: vitrail.Model) -> None:
    images = [photo(i) for i in range(3)]
    result = client.post("/v1/embed", **bodies(images)["form"]).json()
    assert result["dimension"] == 128
    assert np.allclose([r["embedding"] for r in result["results"]], vit.embed(images), atol=1e-5)


@pytest.mark.parametrize("fill", ["mean", "zero", "blur"])
def test_hidden_patches_are_hidden_from_the_network(client: httpx.Client, vit: vitrail.Model, fill: str) -> None:
    data = photo()
    result = client.post("/v1/predict", **bodies([data], hide=[0, 5, 15], fill=fill)["raw"]).json()
    image = vit.preprocess.prepare(data)
    mask = torch.zeros(16, dtype=torch.bool)
    mask[[0, 5, 15]] = True
    masked = mask_patches(image, replacement_pixels(image[None], fill)[0], mask.view(1, 4, 4))
    with torch.no_grad():
        expected = vit.net(masked).softmax(1)[0]
    scores = {p["index"]: p["score"] for p in result["results"][0]["predictions"]}
    assert [scores[i] for i in range(5)] == pytest.approx(expected.tolist(), abs=0.01)  # pixels are rounded to bytes
    original = {p.index: p.score for p in vit.predict(data)}
    assert max(abs(scores[i] - original[i]) for i in range(5)) > 0.001


@pytest.mark.parametrize("fill", ["mean", "zero", "blur"])
@pytest.mark.parametrize("kind", ["raw", "form", "json"])
def test_features_are_computed_without_the_hidden_patches(
    client: httpx.Client, vit: vitrail.Model, kind: str, fill: str
) -> None:
    images = [photo(i) for i in range(1 if kind == "raw" else 3)]
    result = client.post("/v1/embed", **bodies(images, hide=[0, 5, 15], fill=fill)[kind]).json()["results"]
    original = vit.embed(images).numpy()
    for number, data in enumerate(images):
        pixels = torch.from_numpy(vit.preprocess.pixels(data)).permute(2, 0, 1)
        image = vit.preprocess.normalize(pixels)
        replacement = replacement_pixels(image[None], fill)[0]
        for patch_center in (0, 5, 15):  # by hand: rows and columns of 8 pixels
            row, column = 8 * (patch_center // 4), 8 * (patch_center % 4)
            image[:, row : row + 8, column : column + 8] = replacement[:, row : row + 8, column : column + 8]
        with torch.no_grad():
            expected = vit.net.features(image[None], outputs="pooled").pooled[0].numpy()
        embedding = np.array(result[number]["embedding"])
        assert (
            np.abs(embedding - expected).max() < 0.25 * np.abs(original[number] - expected).max()
        )  # pixels are rounded to bytes
        assert np.abs(embedding - expected).max() < 0.01


def test_hiding_a_patch_outside_the_grid_is_rejected(client: httpx.Client) -> None:
    refused = client.post("/v1/embed", **bodies([photo()], hide=[16])["raw"])
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "patch_out_of_range")


def test_a_parameter_in_the_body_overrides_the_query_string(client: httpx.Client) -> None:
    result = client.post("/v1/predict", params={"top": 5}, **bodies([photo()], top=2)["json"]).json()
    assert len(result["results"][0]["predictions"]) == 2


def test_a_list_is_json_or_a_repeated_field(client: httpx.Client) -> None:
    data, encodings = photo(), [{"hide": "[1,2,5]"}, {"hide": ["1", "2", "5"]}]
    responses = [client.post("/v1/predict", files={"image": data}, data=parameters) for parameters in encodings]
    responses += [client.post("/v1/predict", files={"image": data}, params=parameters) for parameters in encodings]
    assert len({json.dumps(a.json()["results"]) for a in responses}) == 1
    methods = client.post("/v1/explain", files={"image": data}, data={"methods": ["gradient", "rollout"]})
    assert list(methods.json()["maps"]) == ["gradient", "rollout"]


def test_the_model_route_describes_the_model(client: httpx.Client) -> None:
    result = client.get("/v1/model").json()
    assert result["name"] == "small"
    assert result["labels"] == list(LABELS)
    assert (result["image_size"], result["channels"]) == ({"height": 32, "width": 32}, 3)
    assert result["grid"] == {"rows": 4, "columns": 4}
    assert (result["depth"], result["num_heads"], result["prefix_tokens"], result["pool"]) == (2, 2, ["class"], "token")
    assert result["methods"] == ["rollout", "gradient", "attention", "occlusion"]
    assert result["has_attention"] is True
    assert result["limits"] == {
        "max_bytes": 16 * 2**20,
        "max_pixels": 50_000_000,
        "max_total_pixels": 200_000_000,
        "max_images": 16,
    }


def test_samples_are_listed_with_credits_and_are_images(client: httpx.Client, vit: vitrail.Model) -> None:
    listed = client.get("/v1/samples").json()
    assert len(listed) == 8
    for sample in listed:
        file = client.get(sample["url"])
        assert file.headers["content-type"] == "image/jpeg"
        assert len(file.content) < 35_000
        assert vit.predict(file.content)
        assert sample["alt"]
        assert sample["credit"].endswith(("CC0", "CC BY 2.0", "public domain"))


def test_metrics_count_requests_batches_and_seconds(running_server: tuple[httpx.Client, Service]) -> None:
    client, _ = running_server
    before = _numbers(client)
    client.post("/v1/predict", **bodies([photo(i) for i in range(3)])["form"])
    client.post("/v1/predict", content=b"no")
    after = _numbers(client)

    def increase(name: str) -> float:
        return after[name] - before.get(name, 0)

    small, none = 'model="small"', 'model=""'
    assert increase(f'vitrail_requests_total{{{small},route="/v1/predict",status="200",version="1"}}') == 1
    assert increase(f'vitrail_requests_total{{{none},route="/v1/predict",status="415",version=""}}') == 1
    assert increase(f'vitrail_batch_size_sum{{{small},version="1"}}') == 3
    assert increase(f'vitrail_decode_seconds_count{{{small},version="1"}}') == 3
    assert increase(f'vitrail_engine_seconds_count{{{small},version="1"}}') >= 1
    assert increase(f'vitrail_request_seconds_count{{{small},route="/v1/predict",version="1"}}') == 1
    assert after[f'vitrail_queue_images{{{small},version="1"}}'] == 0


def test_metrics_include_build_errors_and_process(client: httpx.Client) -> None:
    before = _numbers(client).get('vitrail_errors_total{code="image_unreadable"}', 0)
    client.post("/v1/predict", content=b"no", headers={"content-type": "image/png"})
    after = _numbers(client)
    assert after['vitrail_errors_total{code="image_unreadable"}'] == before + 1
    assert after[f'vitrail_build_info{{version="{vitrail.__version__}"}}'] == 1
    assert after['vitrail_model_info{engine="torch",model="small",precision="float32",version="1"}'] == 1
    assert after["process_resident_memory_bytes"] > 1e7
    assert after["process_open_fds"] > 3


def _numbers(client: httpx.Client) -> dict[str, float]:
    lines = client.get("/metrics").text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def test_unknown_paths_do_not_appear_in_the_metrics(client: httpx.Client) -> None:
    for number in range(5):
        assert client.get(f"/nothing/{number}").status_code == 404
        assert client.get(f"/static/nothing-{number}.js").status_code == 404
    assert "nothing" not in client.get("/metrics").text


def test_a_model_without_classes_returns_features_only() -> None:
    vit = model(small(num_classes=0), task="embed")
    with run_server(served(vit)) as (client, _):
        refused = client.post("/v1/predict", **bodies([photo()])["raw"])
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "no_classes"
        result = client.post("/v1/embed", **bodies([photo()])["raw"]).json()
        assert np.allclose(result["results"][0]["embedding"], vit.embed(photo())[0], atol=1e-5)
        assert client.get("/v1/model").json()["task"] == "embed"


def test_a_network_without_attention_is_served() -> None:
    vit = model(BiTConfig(image_size=32, num_classes=5, layers=(1, 1, 1, 1), width_factor=0.5))
    with run_server(served(vit)) as (client, _):
        model_info = client.get("/v1/model").json()
        assert (model_info["has_attention"], model_info["methods"]) == (False, ["occlusion"])
        assert model_info["depth"] is None
        result = client.post("/v1/explain", **bodies([photo()])["raw"]).json()
        assert (list(result["maps"]), result["attention"], result["layers"]) == (["occlusion"], [], [])
        missing = client.get("/v1/positions")
        assert missing.status_code == 404
        assert "no position embeddings" in missing.json()["error"]["message"]


def test_connections_are_reused(running_server: tuple[httpx.Client, Service]) -> None:
    client, _ = running_server
    responses = [client.get("/healthz") for _ in range(3)]
    streams = {id(a.extensions["network_stream"]) for a in responses}
    assert len(streams) == 1
