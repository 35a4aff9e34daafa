"""Outputs of the Open Inference Protocol for models of each kind."""

from __future__ import annotations

import numpy as np
import pytest
from serving import served
from small_models import POOLS, model, small

import vitrail
from vitrail.config import BiTConfig, SwinConfig
from vitrail.serve.http_errors import RequestError
from vitrail.serve.inference_outputs import describe_outputs, engine_outputs, output_tensors, requested_outputs
from vitrail.serve.tensor_codec import InferenceRequest, RequestedOutput

SWIN = SwinConfig(image_size=32, patch_size=2, window_size=4, width=32, depths=(1, 1), num_heads=(1, 2), num_classes=5)
CONFIGS = POOLS | {"BiT": BiTConfig(image_size=32, layers=(1, 1), width_factor=0.5, num_classes=5), "Swin": SWIN}


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_stated_number_of_features_is_that_of_embed(name: str) -> None:
    vit = model(CONFIGS[name])
    image = np.zeros((40, 40, 3), np.uint8)
    described = {one["name"]: one["shape"] for one in describe_outputs(served(vit))}
    assert described["features"] == [-1, vit.embed(image).shape[-1]]
    assert described["logits"] == [-1, 5]


def test_features_that_are_outputs_of_the_engine_have_its_width() -> None:
    projecting = served(model(small(num_classes=7), task="embed"))
    assert describe_outputs(projecting) == [{"name": "features", "datatype": "FP32", "shape": [-1, 7]}]


def test_only_outputs_of_the_model_can_be_requested() -> None:
    encoder = served(model(small(num_classes=0)))
    request = InferenceRequest(images=[b""], outputs=(RequestedOutput(name="logits", binary=False),))
    with pytest.raises(RequestError, match="got output 'logits', expected one of features"):
        requested_outputs(request, encoder)


def test_the_engine_runs_once_unless_features_and_classes_are_requested(vit: vitrail.Model) -> None:
    default = requested_outputs(InferenceRequest(images=[b""], binary=True), served(vit))
    assert [(one.name, one.binary) for one in default] == [("logits", True), ("probabilities", True), ("labels", True)]
    assert engine_outputs(default) == ["logits"]
    features = RequestedOutput(name="features", binary=False)
    assert engine_outputs((features,)) == ["features"]
    assert engine_outputs((features, *default)) == ["logits", "features"]


def test_classes_without_names_are_numbered() -> None:
    vit = model(small(num_classes=3))
    outputs = (RequestedOutput(name="logits", binary=False, classification=2),)
    [tensor] = output_tensors(vit.info, outputs, {"logits": [np.array([0.5, -1.0, 2.25], np.float32)]})
    assert (tensor.shape, tensor.values) == ((1, 2), ["2.250000:2:class 2", "0.500000:0:class 0"])
