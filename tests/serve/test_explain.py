"""/v1/explain and /v1/positions: decoded responses equal what the network computes."""

from __future__ import annotations

import asyncio
import base64
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
from serving import QUICK, photo, run_server, served, until
from small_models import model, small

import vitrail
from vitrail.api.explanation import METHODS
from vitrail.config import pair
from vitrail.explain import attention_distance, gradient_rollout, occlusion, position_similarity, rollout_map
from vitrail.explain.distance import uniform_distance
from vitrail.explain.occlusion import windows
from vitrail.serve import explain_requests
from vitrail.serve.explain_requests import Explainer, ExplainRequest, encode_attention, encode_map
from vitrail.serve.http_errors import RequestError
from vitrail.serve.image_decoder import ImageDecoder
from vitrail.serve.limits import Limits
from vitrail.serve.prometheus_metrics import Metrics
from vitrail.serve.served_model import ServedModel
from vitrail.serve.streaming import LatestValue, stream_ndjson

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


def explained(client: httpx.Client, **values: str) -> dict[str, Any]:
    answer = client.post("/v1/explain", params=values, content=photo(), headers=JPEG)
    assert answer.status_code == 200, answer.text
    return answer.json()


def unpacked(text: str, kind: Any = np.uint8) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), kind)


def map_of(found: dict[str, Any], grid: tuple[int, int]) -> np.ndarray:
    return (found["min"] + unpacked(found["values"]) / 255 * (found["max"] - found["min"])).reshape(grid)


def test_attention_comes_back_row_by_row(client: httpx.Client, vit: vitrail.Model, images: torch.Tensor) -> None:
    found = explained(client)
    assert found["layers"] == [1, 2]
    assert found["prefix_tokens"] == ["class", "register 1"]
    assert found["grid"] == {"rows": 4, "columns": 6}
    expected = vit.net.features(images, outputs=("attention",)).attention
    for number, layer in enumerate(found["attention"]):
        assert (layer["layer"], layer["num_heads"], layer["num_tokens"]) == (number + 1, 2, 26)
        peaks = unpacked(layer["row_max"], "<f4").reshape(2, 26, 1)
        rows = unpacked(layer["values"]).reshape(2, 26, 26) / 255 * peaks
        assert np.allclose(rows, expected[number][0].detach(), atol=peaks.max() / 255)
        assert np.allclose(rows.sum(-1), 1, atol=0.1)


def test_maps_are_those_of_explain(client: httpx.Client, vit: vitrail.Model, images: torch.Tensor) -> None:
    found = explained(client, methods='["rollout","gradient","occlusion"]', target="bird")
    assert found["target"]["label"] == "bird"
    target = torch.tensor([2])
    expected = {
        "rollout": rollout_map(vit.net, images),
        "gradient": gradient_rollout(vit.net, images, target),
        "occlusion": occlusion(vit.net, images, target, stride=2),
    }
    assert list(found["maps"]) == list(expected)
    for name, values in expected.items():
        step = float(values.max() - values.min()) / 255
        assert np.allclose(map_of(found["maps"][name], (4, 6)), values[0], atol=step), name


def test_occlusion_is_done_a_few_squares_at_a_time(vit: vitrail.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain_requests, "MAX_OCCLUSION_BATCH", 1)
    what = served(vit)
    explainer = Explainer(what, ImageDecoder(vit.preprocess, Limits(), what.grid))
    turns = {
        method: len(list(explainer.steps(vit.preprocess.pixels(photo()), ExplainRequest(methods=(method,)))))
        for method in ("rollout", "occlusion")
    }
    assert turns["occlusion"] == turns["rollout"] + 2 * 3  # squares of two patches on a grid of 4 x 6


def test_occlusion_of_a_multi_label_model(vit: vitrail.Model, images: torch.Tensor) -> None:
    model_ = vitrail.Model(vit.net, vit.info.replace(multi_label=True))
    with run_server(served(model_)) as (client, _):
        found = explained(client, methods='["occlusion"]', target="bird")
    expected = occlusion(vit.net, images, torch.tensor([2]), stride=2, multi_label=True)[0].numpy()
    assert np.allclose(map_of(found["maps"]["occlusion"], (4, 6)), expected, atol=np.ptp(expected) / 255)


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
@pytest.mark.parametrize("turn", [0.0, 10.0])
def test_occlusion_in_steps_is_occlusion(
    changes: dict[str, Any], multi_label: bool, turn: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explain_requests, "STEP_S", turn)
    torch.manual_seed(1)
    net = model(small(**changes)).net
    images, target = torch.randn(1, 3, *pair(changes.get("image_size", 32))), torch.tensor([3])
    expected = METHODS["occlusion"](net, images, target, multi_label)[0]
    steps = explain_requests.occlusion_steps(net, images, target, multi_label)
    count, found = 0, None
    while found is None:
        try:
            next(steps)
            count += 1
        except StopIteration as end:
            found = end.value
    assert torch.allclose(found.float(), expected, atol=1e-6)
    size = min(2, *expected.shape)
    places = len(windows(expected.shape, size, size))
    assert count == (places if turn == 0 else places.bit_length())  # one at a time, or 1, 2, 4, ...


def test_predictions_have_their_turn_within_an_occlusion(vit: vitrail.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain_requests, "STEP_S", 0.0)
    with (
        run_server(served(vit), batching=replace(QUICK, batch_size=1)) as (client, service),
        ThreadPoolExecutor(2) as pool,
    ):
        order: list[str] = []
        step, run = service.batcher._run_explain_step, service.batcher._run_batch
        service.batcher._run_explain_step = lambda ticket: (order.append("look"), time.sleep(0.05), step(ticket))[-1]  # type: ignore[func-returns-value, method-assign]
        service.batcher._run_batch = lambda group: (order.append("batch"), run(group))[1]  # type: ignore[func-returns-value, method-assign]
        asked = {"params": {"methods": "occlusion"}, "content": photo(), "headers": JPEG}
        look = pool.submit(client.post, "/v1/explain", **asked)
        until(lambda: len(order) >= 6)  # two layers, the rest of the network, then the squares
        assert client.post("/v1/predict", content=photo(), headers=JPEG).status_code == 200
        assert not look.done()
        late = client.post("/v1/explain", **asked | {"headers": JPEG | {"x-deadline-ms": "200"}})
        assert late.status_code == 504
        assert look.result().status_code == 200
        assert order.count("look") < 2 * 12  # the request with the deadline was abandoned


def test_distances_are_those_of_the_figure(client: httpx.Client, vit: vitrail.Model, images: torch.Tensor) -> None:
    found = explained(client, layers="[2]")
    assert found["layers"] == [2]
    assert [layer["layer"] for layer in found["attention"]] == [2]
    assert np.allclose(found["attention_distance"], attention_distance(vit.net, images), atol=1e-3)
    assert found["uniform_attention_distance"] == pytest.approx(uniform_distance((4, 6), (32, 48)))


def test_predictions_and_target_are_those_of_predict(client: httpx.Client, vit: vitrail.Model) -> None:
    found = explained(client)
    expected = vit.predict(photo())
    assert [p["label"] for p in found["predictions"]] == [p.label for p in expected]
    assert [p["score"] for p in found["predictions"]] == pytest.approx([p.score for p in expected], abs=1e-5)
    assert found["target"] == found["predictions"][0]
    assert list(found["maps"]) == ["rollout"]


def test_what_is_hidden_is_hidden_from_the_network_and_not_from_the_image(client: httpx.Client) -> None:
    whole, hidden = explained(client), explained(client, hide="[0,1,2,3,4,5,6,7]", fill="zero")
    assert whole["image"] == hidden["image"]
    assert whole["attention"] != hidden["attention"]
    raw = client.post(
        "/v1/predict", params={"hide": "[0,1,2,3,4,5,6,7]", "fill": "zero"}, content=photo(), headers=JPEG
    )
    scores = [p["score"] for p in raw.json()["results"][0]["predictions"]]
    assert [p["score"] for p in hidden["predictions"]] == pytest.approx(scores, abs=1e-5)


def test_the_image_is_what_the_network_sees_and_large_enough_to_be_seen(
    client: httpx.Client, vit: vitrail.Model
) -> None:
    kind, _, text = explained(client)["image"].partition(",")
    assert kind == "data:image/jpeg;base64"
    shown = Image.open(io.BytesIO(base64.b64decode(text)))
    assert shown.size == (384, 256)
    small_again = np.asarray(shown.resize((48, 32), Image.Resampling.BOX)).astype(int)
    assert np.abs(small_again - vit.preprocess.pixels(photo())).mean() < 4


def test_positions_are_similarities_of_every_pair(client: httpx.Client, vit: vitrail.Model) -> None:
    found = client.get("/v1/positions").json()
    assert found["grid"] == {"rows": 4, "columns": 6}
    alike = unpacked(found["values"], np.int8).reshape(24, 24) / 127
    assert np.allclose(alike, position_similarity(vit.net).reshape(24, 24), atol=1 / 254 + 1e-6)
    assert "cosine" in found["description"]


def test_a_model_without_positions_says_why() -> None:
    with run_server(served(model(small(position="none")))) as (client, _):
        answer = client.get("/v1/positions")
        assert answer.status_code == 404
        assert "no position" in answer.json()["error"]["message"]


def test_a_deadline_ends_an_explanation_too(client: httpx.Client) -> None:
    answer = client.post("/v1/explain", content=photo(), headers=JPEG | {"x-deadline-ms": "1"})
    assert answer.status_code == 504


@pytest.mark.parametrize(("most", "layers"), [(10**9, [1, 2]), (10, [2])])
def test_a_large_network_sends_its_last_layer_by_default(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, most: int, layers: list[int]
) -> None:
    monkeypatch.setattr(explain_requests, "MAX_DEFAULT_ATTENTION", most)
    assert explained(client)["layers"] == layers


def test_too_much_attention_for_one_response_is_rejected(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain_requests, "MAX_ATTENTION", 2 * 26 * 26)
    assert client.post("/v1/explain", params={"layers": "[1]"}, content=photo(), headers=JPEG).status_code == 200
    answer = client.post("/v1/explain", params={"layers": "[1,2]"}, content=photo(), headers=JPEG)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_layers")


@given(arrays.arrays(np.float32, (2, 5, 5), elements=st.floats(0, 1, width=32)))
def test_attention_is_within_half_a_step_of_its_peak(attention: np.ndarray) -> None:
    found = encode_attention(1, attention)
    peaks = unpacked(found["row_max"], "<f4").reshape(2, 5, 1)
    back = unpacked(found["values"]).reshape(2, 5, 5) / 255 * peaks
    assert (np.abs(back - attention) <= peaks / 510 + 1e-7).all()


@given(arrays.arrays(np.float32, (3, 4), elements=st.floats(-1e6, 1e6, width=32)))
def test_a_map_is_within_half_a_step_of_its_range(values: np.ndarray) -> None:
    found = encode_map(values)
    assert np.abs(map_of(found, (3, 4)) - values).max() <= (found["max"] - found["min"]) / 510 * 1.01 + 1e-6


def test_an_exported_file_has_no_explanations(vit: vitrail.Model) -> None:
    alone = ServedModel(served(vit).engine)
    explainer = Explainer(alone, ImageDecoder(alone.preprocess, Limits(), alone.grid))
    with pytest.raises(RequestError, match="has no explanations") as refused:
        explainer.check(explain_requests.ExplainRequest())
    assert refused.value.status == 501
    assert (alone.has_features, alone.explain_methods, alone.classifies) == (False, (), True)
    assert alone.grid == (4, 6)


LINES = {"accept": "application/x-ndjson"}


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Make occlusion process one square per step with a delay, and call `then` from the fifth call on."""

    def begin(seconds: float, then: Callable[[], None] = lambda: None) -> list[int]:
        calls: list[int] = []

        def scores(*given: Any, real: Any = explain_requests.class_probabilities, **named: Any) -> Any:
            calls.append(1)
            time.sleep(seconds)
            if len(calls) > 4:
                then()
            return real(*given, **named)

        monkeypatch.setattr(explain_requests, "class_probabilities", scores)
        monkeypatch.setattr(explain_requests, "MAX_OCCLUSION_BATCH", 1)
        return calls

    return begin


def broken() -> None:
    raise RuntimeError("the device is gone")


def lines_of(client: httpx.Client, headers: dict[str, str] = LINES, **values: str) -> list[dict[str, Any]]:
    with client.stream("POST", "/v1/explain", params=values, content=photo(), headers=JPEG | headers) as answer:
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-ndjson")
        return [json.loads(line) for line in answer.iter_lines()]


def test_occlusion_fills_in_line_by_line(client: httpx.Client, slowly: Callable[..., list[int]]) -> None:
    slowly(0.02)
    whole = explained(client, methods='["occlusion"]', target="bird")
    *parts, last = lines_of(client, methods='["occlusion"]', target="bird")
    assert {**last, "ms": 0} == {**whole, "ms": 0}  # same response as without lines
    expected = map_of(last["maps"]["occlusion"], (4, 6))
    assert len(parts) > 2
    done = []
    for line in parts:
        assert list(line) == ["partial"]
        found = line["partial"]["occlusion"]
        done.append(found["done"])
        known = unpacked(found["final"]).reshape(4, 6).astype(bool)
        assert found["total"] == 6
        assert known.sum() == 4 * found["done"]  # squares of 2 x 2 patches that do not overlap
        assert np.allclose(map_of(found, (4, 6))[known], expected[known], atol=np.ptp(expected) / 255 + 1e-9)
    assert done == sorted(set(done))


@pytest.mark.parametrize("grid", [(4, 4), (5, 5), (1, 6)])
def test_values_marked_final_in_a_partial_map_do_not_change(
    grid: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explain_requests, "MAX_OCCLUSION_BATCH", 1)
    torch.manual_seed(1)
    image = (8 * grid[0], 8 * grid[1])
    net = model(small(image_size=image)).net
    steps = explain_requests.occlusion_steps(net, torch.randn(1, 3, *image), torch.tensor([3]), False)
    parts, final = [], None
    while final is None:
        try:
            parts.append(next(steps)["occlusion"])
        except StopIteration as end:
            final = end.value.numpy()
    for found in parts:
        known = unpacked(found["final"]).reshape(grid).astype(bool)
        assert known[0, 0]
        assert np.allclose(map_of(found, grid)[known], final[known], atol=np.ptp(final) / 255)
    assert known.all()
    assert [found["done"] for found in parts] == list(range(1, len(parts) + 1))


@pytest.mark.parametrize("accept", ["*/*", "application/json", "application/x-ndjson;q=0, application/json"])
def test_lines_are_sent_only_where_they_are_accepted(client: httpx.Client, accept: str) -> None:
    values = {"methods": '["occlusion"]'}
    answer = client.post("/v1/explain", params=values, content=photo(), headers=JPEG | {"accept": accept})
    assert answer.headers["content-type"] == "application/json"
    assert "occlusion" in answer.json()["maps"]


def test_an_answer_without_partial_results_is_one_line(client: httpx.Client) -> None:
    (only,) = lines_of(client, {"accept": "text/html, Application/X-NDJSON; q=0.9"}, methods='["rollout"]')
    assert {**only, "ms": 0} == {**explained(client, methods='["rollout"]'), "ms": 0}


def test_an_error_before_the_first_line_has_its_own_status(client: httpx.Client) -> None:
    for values, content, headers, status in (
        ({"methods": '["magic"]'}, photo(), {}, 400),
        ({}, b"not an image", {}, 400),
        ({}, photo(), {"x-deadline-ms": "1"}, 504),
    ):
        answer = client.post("/v1/explain", params=values, content=content, headers=JPEG | LINES | headers)
        assert answer.status_code == status
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["error"]["code"]


@pytest.mark.parametrize(
    ("then", "code"),
    [(partial(time.sleep, 0.5), "deadline_exceeded"), (broken, "internal_error")],
    ids=["late", "broken"],
)
def test_an_error_after_the_first_line_is_the_last_line(
    vit: vitrail.Model, slowly: Callable[..., list[int]], then: Callable[[], None], code: str
) -> None:
    slowly(0.03, then)
    with run_server(served(vit)) as (client, service):
        *parts, last = lines_of(client, LINES | {"x-deadline-ms": "500"}, methods='["occlusion"]')
        assert parts
        assert last["error"]["code"] == code
        assert "device" not in last["error"]["message"]
        assert f'vitrail_errors_total{{code="{code}"}} 1.0' in client.get("/metrics").text
        assert service.batcher.explain_quota.used == 0


def test_a_disconnect_between_lines_ends_the_work(vit: vitrail.Model, slowly: Callable[..., list[int]]) -> None:
    calls = slowly(0.1)
    with run_server(served(vit)) as (client, service):
        values = {"methods": '["occlusion"]'}
        with client.stream("POST", "/v1/explain", params=values, content=photo(), headers=JPEG | LINES) as answer:
            next(answer.iter_lines())
        until(lambda: service.batcher.explain_quota.used == 0)
        made = len(calls)
        assert made < 1 + 6
        time.sleep(0.3)
        assert len(calls) <= made + 1
        assert "vitrail_client_disconnects_total 1.0" in client.get("/metrics").text


def test_a_client_that_reads_slowly_gets_the_newest_partial_result() -> None:
    async def ended() -> list[bytes]:
        newest, metrics = LatestValue(), Metrics()
        go, sent = asyncio.Event(), []

        async def work() -> JSONResponse:
            newest.put(0)
            await asyncio.sleep(0)
            await go.wait()
            for number in range(1, 1000):
                newest.put(number)
            await asyncio.sleep(0.01)
            return JSONResponse({"done": True})

        async def send(message: Any) -> None:
            if message.get("body"):
                sent.append(message["body"])
                go.set()
                await asyncio.sleep(0)

        response = await stream_ndjson(work(), newest, metrics)
        await response({}, None, send)  # type: ignore[arg-type]
        return sent

    first, second, last = asyncio.run(ended())
    assert [json.loads(line) for line in (first, second)] == [{"partial": 0}, {"partial": 999}]
    assert json.loads(last) == {"done": True}
