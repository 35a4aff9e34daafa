"""A Swin Transformer served: predictions, features, and maps across windows, without attention between all patches."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from serving import photo, run_server, served
from small_models import model

import vitrail
from vitrail.config import SwinConfig
from vitrail.explain import gradient_rollout, rollout_map
from vitrail.inference import network_input

JPEG = {"content-type": "image/jpeg"}
SMALL: dict[str, Any] = {"image_size": (32, 48), "width": 8, "depths": (2, 2), "num_heads": (1, 2), "window_size": 3}


@pytest.fixture(scope="module")
def swin() -> vitrail.Model:
    torch.manual_seed(0)
    preprocess = vitrail.PreprocessConfig(image_size=(32, 48))
    return model(SwinConfig(**SMALL, num_classes=5, version=2), preprocess=preprocess, family="SwinV2")


@pytest.fixture(scope="module")
def client(swin: vitrail.Model) -> Iterator[httpx.Client]:
    with run_server(served(swin)) as (client, _):
        yield client


def test_model_is_described_without_attention_between_patches(client: httpx.Client) -> None:
    described = client.get("/v1/model").json()
    assert described["grid"] == {"rows": 8, "columns": 12}
    assert (described["depth"], described["num_heads"], described["has_attention"]) == (4, None, False)
    assert described["methods"] == ["rollout", "gradient", "attention", "occlusion"]


def test_maps_of_a_response_equal_those_of_the_network(client: httpx.Client, swin: vitrail.Model) -> None:
    body = photo()
    query = [("methods", name) for name in ("rollout", "gradient", "attention", "occlusion")]
    answer = client.post("/v1/explain", params=query, content=body, headers=JPEG).raise_for_status().json()
    assert answer["attention"] == answer["layers"] == answer["attention_distance"] == []
    pixels = swin.preprocess.pixels(body)
    images = network_input(swin.net, swin.preprocess, pixels[None])
    target = torch.tensor([answer["target"]["index"]])
    for name, expected in (
        ("rollout", rollout_map(swin.net, images)),
        ("gradient", gradient_rollout(swin.net, images, target)),
    ):
        found = answer["maps"][name]
        steps = np.frombuffer(base64.b64decode(found["values"]), np.uint8).reshape(8, 12) / 255
        values = found["min"] + steps * (found["max"] - found["min"])
        np.testing.assert_allclose(values, expected[0], atol=(found["max"] - found["min"]) / 255)
    assert set(answer["maps"]) == {"rollout", "gradient", "attention", "occlusion"}


@pytest.mark.parametrize(("path", "status"), [("/v1/predict", 200), ("/v1/embed", 200)])
def test_predictions_and_features_are_served(client: httpx.Client, path: str, status: int) -> None:
    assert client.post(path, content=photo(), headers=JPEG).status_code == status


def test_what_the_network_does_not_have_is_refused_with_the_reason(client: httpx.Client) -> None:
    answer = client.post("/v1/explain", params={"layers": 1}, content=photo(), headers=JPEG)
    assert answer.status_code == 400
    assert "this network has no attention" in answer.json()["error"]["message"]
    positions = client.get("/v1/positions")
    assert positions.status_code == 404
    assert "biases for distances inside windows" in positions.json()["error"]["message"]
