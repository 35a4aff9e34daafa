"""/v1/explain and /v1/positions: decoded responses equal what the network computes."""

from __future__ import annotations

import asyncio
import base64
import importlib
import io
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from fastapi.responses import JSONResponse
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image
from serving import QUICK, photo, run_server, served, wait_until
from small_models import model, small

import vitrail
from vitrail.config import pair
from vitrail.explain import attention_distance, gradient_rollout, occlusion, position_similarity, rollout_map
from vitrail.explain.distance import uniform_distance
from vitrail.explain.occlusion import windows
from vitrail.explain.steps import AttributionMap, explain_steps
from vitrail.serve import explain_requests
from vitrail.serve.explain_requests import Explainer, ExplainRequest, encode_attention, encode_map
from vitrail.serve.http_errors import RequestError
from vitrail.serve.image_decoder import ImageDecoder
from vitrail.serve.limits import Limits
from vitrail.serve.prometheus_metrics import Metrics
from vitrail.serve.served_model import ServedModel
from vitrail.serve.streaming import LatestValue, stream_ndjson

occlusion_module = importlib.import_module("vitrail.explain.occlusion")  # the name in the package is the function
JPEG = {"content-type": "image/jpeg"}


@pytest.fixture(scope="module")
def vit() -> vitrail.Model:
    torch.manual_seed(0)
    return model(small(num_registers=1, image_size=(32, 48)), preprocess=vitrail.PreprocessConfig(image_size=(32, 48)))


@pytest.fixture(scope="module")
def client(vit: vitrail.Model) -> Iterator[httpx.Client]:
    with run_server(served(vit)) as (client, _):
        yield client


@pytest.fixture(scope="module")
def images(vit: vitrail.Model) -> torch.Tensor:
    return vit.preprocess(photo())


def explain(client: httpx.Client, **values: str) -> dict[str, Any]:
    response = client.post("/v1/explain", params=values, content=photo(), headers=JPEG)
    assert response.status_code == 200, response.text
    return response.json()


def decode(text: str, kind: Any = np.uint8) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), kind)


def map_of(result: dict[str, Any], grid: tuple[int, int]) -> np.ndarray:
    return (result["min"] + decode(result["values"]) / 255 * (result["max"] - result["min"])).reshape(grid)


def test_attention_is_encoded_row_by_row(client: httpx.Client, vit: vitrail.Model, images: torch.Tensor) -> None:
    result = explain(client)
    assert result["layers"] == [1, 2]
    assert result["prefix_tokens"] == ["class", "register 1"]
    assert result["grid"] == {"rows": 4, "columns": 6}
    expected = vit.net.features(images, outputs=("attention",)).attention
    for number, layer in enumerate(result["attention"]):
        assert (layer["layer"], layer["num_heads"], layer["num_tokens"]) == (number + 1, 2, 26)
        peaks = decode(layer["row_max"], "<f4").reshape(2, 26, 1)
        rows = decode(layer["values"]).reshape(2, 26, 26) / 255 * peaks
        assert np.allclose(rows, expected[number][0].detach(), atol=peaks.max() / 255)
        assert np.allclose(rows.sum(-1), 1, atol=0.1)


def test_maps_equal_those_of_explain(client: httpx.Client, vit: vitrail.Model, images: torch.Tensor) -> None:
    result = explain(client, methods='["rollout","gradient","occlusion"]', target="bird")
    assert result["target"]["label"] == "bird"
    target = torch.tensor([2])
    expected = {
        "rollout": rollout_map(vit.net, images),
        "gradient": gradient_rollout(vit.net, images, target),
        "occlusion": occlusion(vit.net, images, target, stride=2),
    }
    assert list(result["maps"]) == list(expected)
    for name, values in expected.items():
        step = float(values.max() - values.min()) / 255
        assert np.allclose(map_of(result["maps"][name], (4, 6)), values[0], atol=step), name


def test_occlusion_is_split_into_steps(vit: vitrail.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain_requests, "MAX_OCCLUSION_BATCH", 1)
    served_model = served(vit)
    explainer = Explainer(served_model, ImageDecoder(vit.preprocess, Limits(), served_model.grid))
    steps = {
        method: len(list(explainer.steps(vit.preprocess.pixels(photo()), ExplainRequest(methods=(method,)))))
        for method in ("rollout", "occlusion")
    }
    assert steps["occlusion"] == steps["rollout"] + 2 * 3  # squares of two patches on a grid of 4 x 6


def test_occlusion_of_a_multi_label_model(vit: vitrail.Model, images: torch.Tensor) -> None:
    multi_label_model = vitrail.Model(vit.net, vit.info.replace(multi_label=True))
    with run_server(served(multi_label_model)) as (client, _):
        result = explain(client, methods='["occlusion"]', target="bird")
    expected = occlusion(vit.net, images, torch.tensor([2]), stride=2, multi_label=True)[0].numpy()
    assert np.allclose(map_of(result["maps"]["occlusion"], (4, 6)), expected, atol=np.ptp(expected) / 255)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"image_size": (8, 48)},  # a single row of patches
        {"image_size": 40},  # an odd number of patches: the last square ends at the edge
        {"image_size": 36, "uncovered": "ignore"},  # the last 4 pixels belong to no patch
    ],
)
@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("step_seconds", [0.0, 10.0])
def test_occlusion_in_steps_equals_occlusion(changes: dict[str, Any], multi_label: bool, step_seconds: float) -> None:
    torch.manual_seed(1)
    net = model(small(**changes)).net
    images, target = torch.randn(1, 3, *pair(changes.get("image_size", 32))), torch.tensor([3])
    expected = occlusion(net, images, target, stride=2, multi_label=multi_label)[0]
    settings = {"targets": target, "multi_label": multi_label, "step_s": step_seconds}
    maps = [s for s in explain_steps(net, images, ["occlusion"], **settings) if isinstance(s, AttributionMap)]
    count = len(maps) - 1
    assert torch.allclose(maps[-1].values[0], expected, atol=1e-6)
    size = min(2, *expected.shape)
    num_squares = len(windows(expected.shape, size, size))
    assert count == (num_squares if step_seconds == 0 else num_squares.bit_length())  # one at a time, or 1, 2, 4, ...


def test_predictions_run_between_the_steps_of_an_occlusion(vit: vitrail.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain_requests, "STEP_S", 0.0)
    with (
        run_server(served(vit), batching=replace(QUICK, batch_size=1)) as (client, service),
        ThreadPoolExecutor(2) as pool,
    ):
        order: list[str] = []
        step, run = service.default.batcher._run_explain_step, service.default.batcher._run_batch
        service.default.batcher._run_explain_step = lambda ticket: (
            order.append("look"),
            time.sleep(0.05),
            step(ticket),
        )[-1]  # type: ignore[func-returns-value, method-assign]
        service.default.batcher._run_batch = lambda group: (order.append("batch"), run(group))[1]  # type: ignore[func-returns-value, method-assign]
        request = {"params": {"methods": "occlusion"}, "content": photo(), "headers": JPEG}
        explanation = pool.submit(client.post, "/v1/explain", **request)
        wait_until(lambda: len(order) >= 6)  # two layers, the rest of the network, then the squares
        assert client.post("/v1/predict", content=photo(), headers=JPEG).status_code == 200
        assert not explanation.done()
        expired = client.post("/v1/explain", **request | {"headers": JPEG | {"x-deadline-ms": "200"}})
        assert expired.status_code == 504
        assert explanation.result().status_code == 200
        assert order.count("look") < 2 * 12  # the request with the deadline was abandoned


def test_attention_distances_equal_those_of_the_figure(
    client: httpx.Client, vit: vitrail.Model, images: torch.Tensor
) -> None:
    result = explain(client, layers="[2]")
    assert result["layers"] == [2]
    assert [layer["layer"] for layer in result["attention"]] == [2]
    assert np.allclose(result["attention_distance"], attention_distance(vit.net, images), atol=1e-3)
    assert result["uniform_attention_distance"] == pytest.approx(uniform_distance((4, 6), (32, 48)))


def test_predictions_and_target_equal_those_of_predict(client: httpx.Client, vit: vitrail.Model) -> None:
    result = explain(client)
    expected = vit.predict(photo())
    assert [p["label"] for p in result["predictions"]] == [p.label for p in expected]
    assert [p["score"] for p in result["predictions"]] == pytest.approx([p.score for p in expected], abs=1e-5)
    assert result["target"] == result["predictions"][0]
    assert list(result["maps"]) == ["rollout"]


def test_hidden_patches_change_the_input_but_not_the_returned_image(client: httpx.Client) -> None:
    complete, hidden = explain(client), explain(client, hide="[0,1,2,3,4,5,6,7]", fill="zero")
    assert complete["image"] == hidden["image"]
    assert complete["attention"] != hidden["attention"]
    raw = client.post(
        "/v1/predict", params={"hide": "[0,1,2,3,4,5,6,7]", "fill": "zero"}, content=photo(), headers=JPEG
    )
    scores = [p["score"] for p in raw.json()["results"][0]["predictions"]]
    assert [p["score"] for p in hidden["predictions"]] == pytest.approx(scores, abs=1e-5)


def test_the_returned_image_is_the_network_input_enlarged(client: httpx.Client, vit: vitrail.Model) -> None:
    kind, _, text = explain(client)["image"].partition(",")
    assert kind == "data:image/jpeg;base64"
    image = Image.open(io.BytesIO(base64.b64decode(text)))
    assert image.size == (384, 256)
    downscaled = np.asarray(image.resize((48, 32), Image.Resampling.BOX)).astype(int)
    assert np.abs(downscaled - vit.preprocess.pixels(photo())).mean() < 4


def test_positions_are_similarities_of_all_pairs(client: httpx.Client, vit: vitrail.Model) -> None:
    result = client.get("/v1/positions").json()
    assert result["grid"] == {"rows": 4, "columns": 6}
    similarity = decode(result["values"], np.int8).reshape(24, 24) / 127
    assert np.allclose(similarity, position_similarity(vit.net).reshape(24, 24), atol=1 / 254 + 1e-6)
    assert "cosine" in result["description"]


def test_a_model_without_position_embeddings_is_a_404_with_a_reason() -> None:
    with run_server(served(model(small(position="none")))) as (client, _):
        response = client.get("/v1/positions")
        assert response.status_code == 404
        assert "no position" in response.json()["error"]["message"]


def test_a_deadline_ends_an_explanation(client: httpx.Client) -> None:
    response = client.post("/v1/explain", content=photo(), headers=JPEG | {"x-deadline-ms": "1"})
    assert response.status_code == 504


@pytest.mark.parametrize(("max_values", "layers"), [(10**9, [1, 2]), (10, [2])])
def test_a_large_network_sends_its_last_layer_by_default(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, max_values: int, layers: list[int]
) -> None:
    monkeypatch.setattr(explain_requests, "MAX_DEFAULT_ATTENTION", max_values)
    assert explain(client)["layers"] == layers


def test_more_attention_than_the_limit_of_a_response_is_rejected(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explain_requests, "MAX_ATTENTION", 2 * 26 * 26)
    assert client.post("/v1/explain", params={"layers": "[1]"}, content=photo(), headers=JPEG).status_code == 200
    response = client.post("/v1/explain", params={"layers": "[1,2]"}, content=photo(), headers=JPEG)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "too_many_layers")


@given(arrays.arrays(np.float32, (2, 5, 5), elements=st.floats(0, 1, width=32)))
def test_attention_is_quantized_within_half_a_step(attention: np.ndarray) -> None:
    result = encode_attention(1, attention)
    peaks = decode(result["row_max"], "<f4").reshape(2, 5, 1)
    decoded = decode(result["values"]).reshape(2, 5, 5) / 255 * peaks
    assert (np.abs(decoded - attention) <= peaks / 510 + 1e-7).all()


@given(arrays.arrays(np.float32, (3, 4), elements=st.floats(-1e6, 1e6, width=32)))
def test_a_map_is_quantized_within_half_a_step(values: np.ndarray) -> None:
    result = encode_map(values)
    assert np.abs(map_of(result, (3, 4)) - values).max() <= (result["max"] - result["min"]) / 510 * 1.01 + 1e-6


def test_an_exported_file_has_no_explanations(vit: vitrail.Model) -> None:
    exported = ServedModel(served(vit).engine)
    explainer = Explainer(exported, ImageDecoder(exported.preprocess, Limits(), exported.grid))
    with pytest.raises(RequestError, match="has no explanations") as refused:
        explainer.check(explain_requests.ExplainRequest())
    assert refused.value.status == 501
    assert (exported.has_features, exported.explain_methods, exported.classifies) == (False, (), True)
    assert exported.grid == (4, 6)


ACCEPT_NDJSON = {"accept": "application/x-ndjson"}


@pytest.fixture
def slow_occlusion(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Make occlusion process one square per step with a delay, and call `action` from the fifth call on."""

    def start(seconds: float, action: Callable[[], None] = lambda: None) -> list[int]:
        calls: list[int] = []

        def scores(*args: Any, real: Any = occlusion_module.class_probabilities, **kwargs: Any) -> Any:
            calls.append(1)
            time.sleep(seconds)
            if len(calls) > 4:
                action()
            return real(*args, **kwargs)

        monkeypatch.setattr(occlusion_module, "class_probabilities", scores)
        monkeypatch.setattr(explain_requests, "MAX_OCCLUSION_BATCH", 1)
        return calls

    return start


def fail() -> None:
    raise RuntimeError("the device is gone")


def read_lines(client: httpx.Client, headers: dict[str, str] = ACCEPT_NDJSON, **values: str) -> list[dict[str, Any]]:
    with client.stream("POST", "/v1/explain", params=values, content=photo(), headers=JPEG | headers) as response:
        assert (response.status_code, response.headers["content-type"]) == (200, "application/x-ndjson")
        return [json.loads(line) for line in response.iter_lines()]


def test_occlusion_is_streamed_as_partial_results(
    client: httpx.Client, slow_occlusion: Callable[..., list[int]]
) -> None:
    slow_occlusion(0.02)
    complete = explain(client, methods='["occlusion"]', target="bird")
    *parts, last = read_lines(client, methods='["occlusion"]', target="bird")
    assert {**last, "ms": 0} == {**complete, "ms": 0}  # same response as without lines
    expected = map_of(last["maps"]["occlusion"], (4, 6))
    assert len(parts) > 2
    done = []
    for line in parts:
        assert list(line) == ["partial"]
        result = line["partial"]["occlusion"]
        done.append(result["done"])
        final_mask = decode(result["final"]).reshape(4, 6).astype(bool)
        assert result["total"] == 6
        assert final_mask.sum() == 4 * result["done"]  # squares of 2 x 2 patches that do not overlap
        assert np.allclose(map_of(result, (4, 6))[final_mask], expected[final_mask], atol=np.ptp(expected) / 255 + 1e-9)
    assert done == sorted(set(done))


@pytest.mark.parametrize("grid", [(4, 4), (5, 5), (1, 6)])
def test_values_marked_final_in_a_partial_map_do_not_change(
    grid: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explain_requests, "MAX_OCCLUSION_BATCH", 1)
    torch.manual_seed(1)
    image_size = (8 * grid[0], 8 * grid[1])
    vit = model(small(image_size=image_size))
    served_model = served(vit)
    explainer = Explainer(served_model, ImageDecoder(vit.preprocess, Limits(), served_model.grid))
    pixels = np.random.default_rng(1).integers(0, 256, (*image_size, 3), np.uint8)
    steps = explainer.steps(pixels, ExplainRequest(methods=("occlusion",), target=3))
    parts, result = [], None
    while result is None:
        try:
            partial = next(steps)
            parts += [partial["occlusion"]] if partial else []
        except StopIteration as end:
            result = end.value
    final = map_of(result["maps"]["occlusion"], grid)
    for result in parts:
        final_mask = decode(result["final"]).reshape(grid).astype(bool)
        assert final_mask[0, 0]
        assert np.allclose(map_of(result, grid)[final_mask], final[final_mask], atol=1.01 * np.ptp(final) / 255)
    assert final_mask.all()
    assert [result["done"] for result in parts] == list(range(1, len(parts) + 1))


@pytest.mark.parametrize("accept", ["*/*", "application/json", "application/x-ndjson;q=0, application/json"])
def test_ndjson_is_sent_only_if_accepted(client: httpx.Client, accept: str) -> None:
    values = {"methods": '["occlusion"]'}
    response = client.post("/v1/explain", params=values, content=photo(), headers=JPEG | {"accept": accept})
    assert response.headers["content-type"] == "application/json"
    assert "occlusion" in response.json()["maps"]


def test_a_response_without_partial_results_is_one_line(client: httpx.Client) -> None:
    (line,) = read_lines(client, {"accept": "text/html, Application/X-NDJSON; q=0.9"}, methods='["rollout"]')
    assert {**line, "ms": 0} == {**explain(client, methods='["rollout"]'), "ms": 0}


def test_an_error_before_the_first_line_has_its_own_status(client: httpx.Client) -> None:
    for values, content, headers, status in (
        ({"methods": '["magic"]'}, photo(), {}, 400),
        ({}, b"not an image", {}, 400),
        ({}, photo(), {"x-deadline-ms": "1"}, 504),
    ):
        response = client.post("/v1/explain", params=values, content=content, headers=JPEG | ACCEPT_NDJSON | headers)
        assert response.status_code == status
        assert response.headers["content-type"] == "application/json"
        assert response.json()["error"]["code"]


@pytest.mark.parametrize(
    ("action", "code"),
    [(partial(time.sleep, 0.5), "deadline_exceeded"), (fail, "internal_error")],
    ids=["late", "broken"],
)
def test_an_error_after_the_first_line_is_the_last_line(
    vit: vitrail.Model, slow_occlusion: Callable[..., list[int]], action: Callable[[], None], code: str
) -> None:
    slow_occlusion(0.03, action)
    with run_server(served(vit)) as (client, service):
        *parts, last = read_lines(client, ACCEPT_NDJSON | {"x-deadline-ms": "500"}, methods='["occlusion"]')
        assert parts
        assert last["error"]["code"] == code
        assert "device" not in last["error"]["message"]
        assert f'vitrail_errors_total{{code="{code}"}} 1.0' in client.get("/metrics").text
        assert service.default.batcher.explain_quota.used == 0


def test_a_disconnect_between_lines_cancels_the_work(
    vit: vitrail.Model, slow_occlusion: Callable[..., list[int]]
) -> None:
    calls = slow_occlusion(0.1)
    with run_server(served(vit)) as (client, service):
        values = {"methods": '["occlusion"]'}
        with client.stream(
            "POST", "/v1/explain", params=values, content=photo(), headers=JPEG | ACCEPT_NDJSON
        ) as response:
            next(response.iter_lines())
        wait_until(lambda: service.default.batcher.explain_quota.used == 0)
        count = len(calls)
        assert count < 1 + 6
        time.sleep(0.3)
        assert len(calls) <= count + 1
        assert "vitrail_client_disconnects_total 1.0" in client.get("/metrics").text


def test_a_client_that_reads_slowly_gets_the_newest_partial_result() -> None:
    async def run() -> list[bytes]:
        latest, metrics = LatestValue(), Metrics()
        go, sent = asyncio.Event(), []

        async def work() -> JSONResponse:
            latest.put(0)
            await asyncio.sleep(0)
            await go.wait()
            for number in range(1, 1000):
                latest.put(number)
            await asyncio.sleep(0.01)
            return JSONResponse({"done": True})

        async def send(message: Any) -> None:
            if message.get("body"):
                sent.append(message["body"])
                go.set()
                await asyncio.sleep(0)

        response = await stream_ndjson(work(), latest, metrics)
        await response({}, None, send)  # type: ignore[arg-type]
        return sent

    first, second, last = asyncio.run(run())
    assert [json.loads(line) for line in (first, second)] == [{"partial": 0}, {"partial": 999}]
    assert json.loads(last) == {"done": True}
