"""Outputs of the Open Inference Protocol, computed from the outputs of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from vitrail.predictions import class_label, class_probabilities
from vitrail.serve.batching import OutputName
from vitrail.serve.http_errors import RequestError
from vitrail.serve.served_model import Floats, ServedModel
from vitrail.serve.tensor_codec import InferenceRequest, OutputTensor, RequestedOutput
from vitrail.weights.model_info import ModelInfo

# N images, K classes, D features

CLASS_OUTPUTS = ("logits", "probabilities", "labels")


def describe_outputs(served: ServedModel) -> list[dict[str, Any]]:
    """Names, datatypes and shapes of the outputs that the model has."""
    outputs: list[dict[str, Any]] = []
    if served.classifies:
        classes = served.info.config.num_classes
        outputs += [
            {"name": "logits", "datatype": "FP32", "shape": [-1, classes]},
            {"name": "probabilities", "datatype": "FP32", "shape": [-1, classes]},
            {"name": "labels", "datatype": "BYTES", "shape": [-1]},
        ]
    if served.has_features:
        outputs.append({"name": "features", "datatype": "FP32", "shape": [-1, served.feature_dimension]})
    return outputs


def requested_outputs(request: InferenceRequest, served: ServedModel) -> tuple[RequestedOutput, ...]:
    """The outputs to compute: those requested, else those of one pass through the network.

    That is the classes, or the features of a model without classes: both would take two passes.
    """
    names = [output["name"] for output in describe_outputs(served)]
    if request.outputs is None:
        default = [name for name in names if (name in CLASS_OUTPUTS) == served.classifies]
        return tuple(RequestedOutput(name=name, binary=request.binary) for name in default)
    for output in request.outputs:
        if output.name not in names:
            message = f"got output {output.name[:40]!r}, expected one of {', '.join(names)}."
            raise RequestError(400, "invalid_parameter", message)
        if output.classification is not None and output.name == "features":
            raise RequestError(400, "invalid_parameter", "features have no classes; request classification of logits.")
    return request.outputs


def engine_outputs(outputs: tuple[RequestedOutput, ...]) -> list[OutputName]:
    """The outputs of the engine from which these are computed."""
    names = {output.name for output in outputs}
    needed: list[OutputName] = []
    if names & set(CLASS_OUTPUTS):
        needed.append("logits")
    if "features" in names:
        needed.append("features")
    return needed


def output_tensors(
    info: ModelInfo, outputs: tuple[RequestedOutput, ...], computed: Mapping[OutputName, list[Floats]]
) -> list[OutputTensor]:
    return [_output_tensor(info, output, computed) for output in outputs]


def _output_tensor(
    info: ModelInfo, output: RequestedOutput, computed: Mapping[OutputName, list[Floats]]
) -> OutputTensor:
    values = np.stack(computed["features" if output.name == "features" else "logits"])  # N K or N D
    if output.name in ("probabilities", "labels"):
        values = class_probabilities(torch.from_numpy(values), info).float().numpy()
    if output.classification is not None:
        texts = [text for row in values for text in _classification(info, row, output.classification)]
        return OutputTensor(output.name, (len(values), len(texts) // len(values)), texts, output.binary)
    if output.name == "labels":
        labels = [class_label(info, int(index)) for index in values.argmax(1)]
        return OutputTensor(output.name, (len(labels),), labels, output.binary)
    return OutputTensor(output.name, values.shape, values, output.binary)


def _classification(info: ModelInfo, row: Floats, count: int) -> list[str]:
    """The highest values of a row as `value:index:label`, as Triton's classification extension writes them."""
    best = np.argsort(-row, kind="stable")[:count]
    return [f"{row[index]:f}:{index}:{class_label(info, int(index))}" for index in best]
