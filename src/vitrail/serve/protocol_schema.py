"""Requests and responses of the protocols of other servers, in /openapi.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field

from vitrail.serve.schema import DEADLINE_HEADER, EXAMPLE_PNG, STATUS_DESCRIPTIONS


class ServerMetadata(BaseModel):
    name: str
    version: str
    extensions: list[str]


class ServerLive(BaseModel):
    live: bool


class ServerReady(BaseModel):
    ready: bool


class TensorMetadata(BaseModel):
    name: str = Field(examples=["logits"])
    datatype: Literal["BYTES", "FP32"]
    shape: list[int] = Field(description="-1 stands for any size.", examples=[[-1, 1000]])


class ModelMetadata(BaseModel):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ModelReady(BaseModel):
    name: str
    ready: bool


class IndexedVersion(BaseModel):
    name: str
    version: str
    state: Literal["UNAVAILABLE", "LOADING", "READY", "UNLOADING"]
    reason: str


class OutputData(BaseModel):
    name: str
    datatype: Literal["BYTES", "FP32"]
    shape: list[int]
    data: list[float] | list[str] | None = Field(None, description="Values in row-major order.")
    parameters: dict[str, int] | None = Field(None, description="binary_data_size, instead of data.")


class InferenceResponse(BaseModel):
    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[OutputData]


class Embedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="Numbers, or base64 of little-endian float32.")


class Usage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(BaseModel):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    version: str = Field(description="Version of the model; not in OpenAI's API.")
    usage: Usage


class PlainError(BaseModel):
    error: str = Field(examples=["the shape must be a list of positive integers, [N] or [N, 1]."])


def plain_errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Error responses of the Open Inference Protocol."""
    return {status: {"model": PlainError, "description": STATUS_DESCRIPTIONS[status]} for status in statuses}


def model_path(versioned: bool) -> dict[str, Any]:
    """Parameters of a path with a model, and a version if it is versioned."""
    names = ("name", "version") if versioned else ("name",)
    text = {"type": "string", "minLength": 1}
    return {"parameters": [{"name": name, "in": "path", "required": True, "schema": text} for name in names]}


def inference_operation(versioned: bool) -> dict[str, Any]:
    """Parameters and request body of an inference."""
    parameters = {"type": "object", "description": "timeout, binary_data_output; for outputs: classification."}
    tensor = {
        "type": "object",
        "required": ["name", "shape", "datatype"],
        "properties": {
            "name": {"const": "images"},
            "shape": {"type": "array", "items": {"type": "integer", "minimum": 1}},
            "datatype": {"enum": ["BYTES", "UINT8"]},
            "parameters": {"type": "object", "description": "binary_data_size, content_type."},
            "data": {"type": "array", "description": "base64 of N images, or N x H x W x C pixels."},
        },
    }
    output = {
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {"enum": ["logits", "probabilities", "labels", "features"]},
            "parameters": {"type": "object", "description": "classification, binary_data."},
        },
    }
    body = {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string", "maxLength": 1000},
            "parameters": parameters,
            "inputs": {"type": "array", "minItems": 1, "maxItems": 1, "items": tensor},
            "outputs": {"type": "array", "items": output},
        },
    }
    example = {"inputs": [{"name": "images", "shape": [1], "datatype": "BYTES", "data": [EXAMPLE_PNG]}]}
    header = {
        "name": "Inference-Header-Content-Length",
        "in": "header",
        "required": False,
        "description": "Bytes of JSON before the binary data; 0: the body is one image.",
        "schema": {"type": "integer", "minimum": 0},
    }
    return {
        "parameters": [*model_path(versioned)["parameters"], DEADLINE_HEADER, header],
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": body, "example": example},
                "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
            },
        },
    }


BINARY_RESPONSE: dict[str, Any] = {
    "model": InferenceResponse,
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    "description": "The outputs, as JSON, or as JSON followed by binary data.",
}
"""200 response of an inference."""
DATA_URI = {"type": "string", "format": "data-uri", "description": "An image as a data URI with base64."}
EMBEDDINGS_OPERATION: dict[str, Any] = {
    "parameters": [DEADLINE_HEADER],
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["model", "input"],
                    "properties": {
                        "model": {"type": "string", "description": "Name of the model; see /v1/models."},
                        "version": {"type": "string", "description": "Version of the model."},
                        "input": {"anyOf": [DATA_URI, {"type": "array", "items": DATA_URI, "minItems": 1}]},
                        "encoding_format": {"enum": ["float", "base64"]},
                        "user": {"type": "string", "description": "Ignored."},
                    },
                    "additionalProperties": False,
                },
                "example": {"model": "vitrail/cifar10", "input": f"data:image/png;base64,{EXAMPLE_PNG}"},
            }
        },
    },
}
"""Request of /v1/embeddings."""


def constrain_to_models(paths: dict[str, Any], models: Sequence[dict[str, Any]], max_images: int) -> None:
    """Restrict names, versions and the number of images in the paths of /openapi.json to what is served."""
    if not models:
        return
    names, versions = (list(dict.fromkeys(model[key] for model in models)) for key in ("name", "version"))
    body = paths["/v1/embeddings"]["post"]["requestBody"]["content"]["application/json"]
    properties = body["schema"]["properties"]
    properties["model"]["enum"], properties["version"]["enum"] = names, versions
    properties["input"]["anyOf"][1]["maxItems"] = max_images
    body["example"]["model"] = names[0]
    in_path = [one for path in paths.values() for method in path.values() for one in method.get("parameters", ())]
    for parameter in in_path:
        if parameter["in"] == "path":
            parameter["schema"]["enum"] = names if parameter["name"] == "name" else versions
