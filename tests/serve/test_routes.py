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
def vit() -> vitrail.Model:
    torch.manual_seed(0)
    return model(small())


@pytest.fixture(scope="module")
def live(vit: vitrail.Model) -> Iterator[tuple[httpx.Client, Service]]:
    with run_server(served(vit)) as found:
        yield found


@pytest.fixture
def client(live: tuple[httpx.Client, Service]) -> httpx.Client:
    return live[0]


def as_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def bodies(images: list[bytes], **values: object) -> dict[str, dict[str, object]]:
    """The same request with each type of body."""
    form = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    found: dict[str, dict[str, object]] = {
        "form": {"files": [("images", ("a.jpg", data)) for data in images], "data": form},
        "json": {"json": {"images": [as_base64(data) for data in images], **values}},
    }
    if len(images) == 1:
        raw = {"content": images[0], "params": form}
        found["raw"] = {**raw, "headers": {"content-type": "image/jpeg"}}
        found["bytes"] = {**raw, "headers": {"content-type": "application/octet-stream"}}
        found["form without a name"] = {"files": {"image": (None, images[0])}, "data": form}
        found["form of one"] = {"files": {"file": images[0]}, "data": form}
        found["json of one"] = {"json": {"image": f"data:image/jpeg;base64,{as_base64(images[0])}", **values}}
        found["in pieces"] = {**found["raw"], "content": iter([images[0][:100], images[0][100:]])}
    return found


@pytest.mark.parametrize(
    "kind", ["form", "json", "raw", "bytes", "form of one", "form without a name", "json of one", "in pieces"]
)
def test_one_image_is_named_as_predict_names_it(client: httpx.Client, vit: vitrail.Model, kind: str) -> None:
    data = photo()
    answer = client.post("/v1/predict", **bodies([data], top=3)[kind])
    assert answer.status_code == 200
    found = answer.json()
    assert (found["model"], found["engine"]) == ("small", "torch")
    assert found["ms"] > 0
    [result] = found["results"]
    expected = vit.predict(data, top=3)
    assert [(p["label"], p["index"]) for p in result["predictions"]] == [(p.label, p.index) for p in expected]
    assert [p["score"] for p in result["predictions"]] == pytest.approx([p.score for p in expected], abs=1e-6)


@pytest.mark.parametrize("kind", ["form", "json"])
def test_several_images_are_answered_in_order(client: httpx.Client, vit: vitrail.Model, kind: str) -> None:
    files = [photo(i, "PNG" if i % 2 else "JPEG") for i in range(11)]
    found = client.post("/v1/predict", **bodies(files)[kind]).json()["results"]
    for result, expected in zip(found, vit.predict(files), strict=True):
        assert [p["index"] for p in result["predictions"]] == [p.index for p in expected]
        assert [p["score"] for p in result["predictions"]] == pytest.approx([p.score for p in expected], abs=1e-6)


def test_features_are_those_of_embed(client: httpx.Client, vit: vitrail.Model) -> None:
    files = [photo(i) for i in range(3)]
    found = client.post("/v1/embed", **bodies(files)["form"]).json()
    assert found["dimension"] == 128
    assert np.allclose([r["embedding"] for r in found["results"]], vit.embed(files), atol=1e-5)


@pytest.mark.parametrize("fill", ["mean", "zero", "blur"])
def test_hidden_patches_are_hidden_from_the_network(client: httpx.Client, vit: vitrail.Model, fill: str) -> None:
    data = photo()
    found = client.post("/v1/predict", **bodies([data], hide=[0, 5, 15], fill=fill)["raw"]).json()
    image = vit.preprocess.prepare(data)
    mask = torch.zeros(16, dtype=torch.bool)
    mask[[0, 5, 15]] = True
    left = mask_patches(image, replacement_pixels(image[None], fill)[0], mask.view(1, 4, 4))
    with torch.no_grad():
        expected = vit.net(left).softmax(1)[0]
    scores = {p["index"]: p["score"] for p in found["results"][0]["predictions"]}
    assert [scores[i] for i in range(5)] == pytest.approx(expected.tolist(), abs=0.01)  # pixels are rounded to bytes
    whole = {p.index: p.score for p in vit.predict(data)}
    assert max(abs(scores[i] - whole[i]) for i in range(5)) > 0.001


@pytest.mark.parametrize("fill", ["mean", "zero", "blur"])
@pytest.mark.parametrize("kind", ["raw", "form", "json"])
def test_features_are_those_of_the_image_without_the_hidden_patches(
    client: httpx.Client, vit: vitrail.Model, kind: str, fill: str
) -> None:
    files = [photo(i) for i in range(1 if kind == "raw" else 3)]
    found = client.post("/v1/embed", **bodies(files, hide=[0, 5, 15], fill=fill)[kind]).json()["results"]
    whole = vit.embed(files).numpy()
    for number, data in enumerate(files):
        pixels = torch.from_numpy(vit.preprocess.pixels(data)).permute(2, 0, 1)
        image = vit.preprocess.normalize(pixels)
        instead = replacement_pixels(image[None], fill)[0]
        for patch in (0, 5, 15):  # by hand: rows and columns of 8 pixels
            row, column = 8 * (patch // 4), 8 * (patch % 4)
            image[:, row : row + 8, column : column + 8] = instead[:, row : row + 8, column : column + 8]
        with torch.no_grad():
            expected = vit.net.features(image[None], outputs="pooled").pooled[0].numpy()
        got = np.array(found[number]["embedding"])
        assert (
            np.abs(got - expected).max() < 0.25 * np.abs(whole[number] - expected).max()
        )  # pixels are rounded to bytes
        assert np.abs(got - expected).max() < 0.01


def test_hiding_a_patch_outside_the_grid_is_rejected(client: httpx.Client) -> None:
    refused = client.post("/v1/embed", **bodies([photo()], hide=[16])["raw"])
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "patch_out_of_range")


def test_a_parameter_in_the_body_overrides_the_query_string(client: httpx.Client) -> None:
    found = client.post("/v1/predict", params={"top": 5}, **bodies([photo()], top=2)["json"]).json()
    assert len(found["results"][0]["predictions"]) == 2


def test_a_list_is_one_piece_of_json_or_a_field_for_each(client: httpx.Client) -> None:
    data, ways = photo(), [{"hide": "[1,2,5]"}, {"hide": ["1", "2", "5"]}]
    answers = [client.post("/v1/predict", files={"image": data}, data=way) for way in ways]
    answers += [client.post("/v1/predict", files={"image": data}, params=way) for way in ways]
    assert len({json.dumps(a.json()["results"]) for a in answers}) == 1
    words = client.post("/v1/explain", files={"image": data}, data={"methods": ["gradient", "rollout"]})
    assert list(words.json()["maps"]) == ["gradient", "rollout"]


def test_the_model_says_what_it_is(client: httpx.Client) -> None:
    found = client.get("/v1/model").json()
    assert found["name"] == "small"
    assert found["labels"] == list(LABELS)
    assert (found["image_size"], found["channels"]) == ({"height": 32, "width": 32}, 3)
    assert found["grid"] == {"rows": 4, "columns": 4}
    assert (found["depth"], found["num_heads"], found["prefix_tokens"], found["pool"]) == (2, 2, ["class"], "token")
    assert found["methods"] == ["rollout", "gradient", "attention", "occlusion"]
    assert found["has_attention"] is True
    assert found["limits"] == {
        "max_bytes": 16 * 2**20,
        "max_pixels": 50_000_000,
        "max_total_pixels": 200_000_000,
        "max_images": 16,
    }


def test_samples_are_listed_and_are_images(client: httpx.Client, vit: vitrail.Model) -> None:
    listed = client.get("/v1/samples").json()
    assert len(listed) == 8
    for one in listed:
        file = client.get(one["url"])
        assert file.headers["content-type"] == "image/jpeg"
        assert len(file.content) < 35_000
        assert vit.predict(file.content)
        assert one["alt"]
        assert one["credit"].endswith(("CC0", "CC BY 2.0", "public domain"))


def test_metrics_count_requests_batches_and_seconds(live: tuple[httpx.Client, Service]) -> None:
    client, _ = live
    before = _numbers(client)
    client.post("/v1/predict", **bodies([photo(i) for i in range(3)])["form"])
    client.post("/v1/predict", content=b"no")
    after = _numbers(client)

    def rose(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert rose('vitrail_requests_total{route="/v1/predict",status="200"}') == 1
    assert rose('vitrail_requests_total{route="/v1/predict",status="415"}') == 1
    assert rose("vitrail_batch_size_sum") == 3
    assert rose("vitrail_decode_seconds_count") == 3
    assert rose("vitrail_engine_seconds_count") >= 1
    assert rose('vitrail_request_seconds_count{route="/v1/predict"}') == 2
    assert after["vitrail_queue_images"] == 0


def test_metrics_have_the_build_the_errors_and_the_process(client: httpx.Client) -> None:
    before = _numbers(client).get('vitrail_errors_total{code="image_unreadable"}', 0)
    client.post("/v1/predict", content=b"no", headers={"content-type": "image/png"})
    after = _numbers(client)
    assert after['vitrail_errors_total{code="image_unreadable"}'] == before + 1
    build = f'engine="torch",model="small",precision="float32",version="{vitrail.__version__}"'
    assert after[f"vitrail_build_info{{{build}}}"] == 1
    assert after["process_resident_memory_bytes"] > 1e7
    assert after["process_open_fds"] > 3


def _numbers(client: httpx.Client) -> dict[str, float]:
    lines = client.get("/metrics").text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def test_no_client_can_make_up_names_for_the_metrics(client: httpx.Client) -> None:
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
        found = client.post("/v1/embed", **bodies([photo()])["raw"]).json()
        assert np.allclose(found["results"][0]["embedding"], vit.embed(photo())[0], atol=1e-5)
        assert client.get("/v1/model").json()["task"] == "embed"


def test_a_network_without_attention_is_served_too() -> None:
    vit = model(BiTConfig(image_size=32, num_classes=5, layers=(1, 1, 1, 1), width_factor=0.5))
    with run_server(served(vit)) as (client, _):
        about = client.get("/v1/model").json()
        assert (about["has_attention"], about["methods"]) == (False, ["occlusion"])
        assert about["depth"] is None
        found = client.post("/v1/explain", **bodies([photo()])["raw"]).json()
        assert (list(found["maps"]), found["attention"], found["layers"]) == (["occlusion"], [], [])
        missing = client.get("/v1/positions")
        assert missing.status_code == 404
        assert "no position embeddings" in missing.json()["error"]["message"]


def test_connections_are_kept(live: tuple[httpx.Client, Service]) -> None:
    client, _ = live
    answers = [client.get("/healthz") for _ in range(3)]
    streams = {id(a.extensions["network_stream"]) for a in answers}
    assert len(streams) == 1
