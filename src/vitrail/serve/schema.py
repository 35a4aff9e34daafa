"""Parameters of the routes, as pydantic models and in /openapi.json."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vitrail.serve.http_errors import RequestError
from vitrail.serve.request_parsing import IMAGE_FIELDS
from vitrail.serve.response_types import ErrorResponse

IMAGE_TYPES = tuple(
    f"image/{name}" for name in ("jpeg", "png", "webp", "gif", "bmp", "tiff", "x-portable-pixmap", "avif")
)
"""Content types of a body that is one image; the format is detected from the bytes."""
MAX_LISTED_LABELS = 100
"""Class names are listed in the schema if there are at most this many."""
FillName = Literal["mean", "zero", "blur"]


class ModelParameters(BaseModel):
    """The model and version that a request chooses."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: Annotated[str, Field(max_length=200)] | None = Field(
        None, description="Name of the model; see /v1/models. Default: the first one."
    )
    version: Annotated[str, Field(max_length=200)] | int | None = Field(
        None, description="Version of the model. Default: the one that /v1/models states as default."
    )

    @property
    def chosen(self) -> tuple[str | None, str | None]:
        """Name and version, as `ModelRegistry.get` takes them."""
        return self.model, None if self.version is None else str(self.version)


class HideParameters(ModelParameters):
    """Parameters of every route that takes images; all parameters of /v1/embed and /v1/preprocess."""

    hide: list[int] = Field(
        [],
        max_length=20_000,
        fail_fast=True,
        description="Patches to hide, numbered row by row from 0.",
        examples=[[0, 1, 2]],
    )
    fill: FillName = Field("mean", description="What replaces a hidden patch.", examples=["mean"])


class PredictParameters(HideParameters):
    """Parameters of /v1/predict."""

    top: int = Field(5, ge=1, description="Number of classes to return.", examples=[5])


class ExplainParameters(HideParameters):
    """Parameters of /v1/explain."""

    layers: Annotated[list[int], Field(max_length=1000, fail_fast=True)] | None = Field(
        None,
        description="Layers, from 1, whose attention is returned. Default: all, unless that is too large.",
        examples=[[1]],
    )
    methods: Annotated[list[str], Field(max_length=100, fail_fast=True)] | None = Field(
        None, description="Explanation methods.", examples=[["rollout"]]
    )
    target: int | str | None = Field(
        None, description="Class to explain, by index or name. Default: the top class.", examples=[0]
    )


Parameters = TypeVar("Parameters", bound=BaseModel)

EXPECTED = {
    "model": "the name of a model, as in /v1/models",
    "version": "a version of the model, as in /v1/models",
    "hide": "a list of patch numbers, row by row from 0",
    "fill": "mean, zero or blur",
    "top": "an integer, 1 or more",
    "layers": "a list of layer numbers, from 1",
    "methods": "a list of method names",
    "target": "a class, by index or name",
}
STATUS_DESCRIPTIONS = {
    400: "An image or a parameter is invalid.",
    401: "The token is missing or wrong.",
    403: "A page of another site sent the request.",
    404: "Not found.",
    406: "The client does not accept JSON.",
    408: "The body did not arrive in time.",
    413: "Too many bytes, pixels, images or parameter values.",
    415: "Unsupported content type or encoding.",
    421: "The Host header names another server.",
    429: "This client uses its full quota (see Retry-After).",
    431: "The headers or the URL are too long.",
    501: "Not supported by this model.",
    503: "The queue is full (see Retry-After), or the server is not ready.",
    504: "The deadline passed.",
}


def validate_parameters(kind: type[Parameters], values: dict[str, Any]) -> Parameters:
    """Validate parameters; raise RequestError for the first invalid one."""
    try:
        return kind.model_validate({name: _integers(value) for name, value in values.items()})
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
    name, value = str(detail["loc"][0]), detail["input"]
    if detail["type"] == "extra_forbidden":
        known = ", ".join(kind.model_fields) or "none"
        raise RequestError(400, "invalid_parameter", f"unknown parameter {name[:40]!r}, expected one of {known}.")
    if detail["type"] == "too_long":
        limit = detail["ctx"]["max_length"]
        raise RequestError(400, "invalid_parameter", f"{name} has {len(value):,} values, expected at most {limit:,}.")
    raise RequestError(400, "invalid_parameter", f"{name}: got {_format_value(value)}, expected {EXPECTED[name]}.")


def _format_value(value: Any) -> str:
    """A value as JSON, shortened."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value[:41] if isinstance(value, str) else value, ensure_ascii=False)
    return text if len(text) <= 42 else f"{text[:40]}..."


def _integers(value: Any) -> Any:
    """Convert floats with integral values, such as 3.0, to int."""
    return [_integer(item) for item in value] if isinstance(value, list) else _integer(value)


def _integer(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorResponse, "description": STATUS_DESCRIPTIONS[status]} for status in statuses}


def constrain_to_models(properties: dict[str, Any], models: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """JSON schemas of parameters, restricted to the loaded models; with one model, also to its patches and classes."""
    adapted = copy.deepcopy(properties)
    if "model" in adapted:
        adapted["model"]["anyOf"][0] |= {"enum": list(dict.fromkeys(model["name"] for model in models))}
        adapted["version"]["anyOf"][0] |= {"enum": list(dict.fromkeys(model["version"] for model in models))}
        del adapted["version"]["anyOf"][1]  # a number is understood too
    return _constrain_to_model(adapted, models[0]) if len(models) == 1 else adapted


def _constrain_to_model(adapted: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """JSON schemas of parameters, restricted to the patches, layers, methods and classes of the model."""
    if "hide" in adapted:
        patches = model["grid"]["rows"] * model["grid"]["columns"]
        adapted["hide"]["items"] |= {"minimum": 0, "maximum": patches - 1}
    if "layers" in adapted:
        depth = model["depth"] if model["has_attention"] else 0
        adapted["layers"]["anyOf"][0] |= {} if depth else {"maxItems": 0}
        adapted["layers"]["anyOf"][0]["items"] |= {"minimum": 1, "maximum": max(depth, 1)}
        adapted["methods"]["anyOf"][0] |= {} if model["methods"] else {"maxItems": 0}
        adapted["methods"]["anyOf"][0]["items"] |= {"enum": model["methods"]} if model["methods"] else {}
        number, word, nothing = adapted["target"]["anyOf"]
        names = model["labels"] or []
        types = [number | {"minimum": 0, "maximum": model["num_classes"] - 1}] if model["num_classes"] else []
        types += (
            [word | {"enum": names} if len(names) <= MAX_LISTED_LABELS else word]
            if names and model["num_classes"]
            else []
        )
        adapted["target"] |= {"anyOf": [*types, nothing], "examples": [0] if types else [None]}
    return adapted


def post_operation(
    values: type[BaseModel], multiple_images: bool, models: Sequence[dict[str, Any]], max_images: int
) -> dict[str, Any]:
    """OpenAPI parameters and request body of a POST route: raw image, form or JSON, each with the same parameters."""
    properties = constrain_to_models(values.model_json_schema()["properties"], models)
    image = {"type": "string", "format": "binary"}
    text = {"type": "string", "format": "byte", "contentEncoding": "base64"}
    many = {
        "type": "array",
        "items": image,
        "minItems": 1,
        "maxItems": max_images if multiple_images else 1,
    }
    plain = {name: _without_null(schema) for name, schema in properties.items()}
    encoding = {name: {"contentType": ", ".join(IMAGE_TYPES)} for name in IMAGE_FIELDS}
    return {
        "parameters": [DEADLINE_HEADER, *(_query_parameter(name, schema) for name, schema in properties.items())],
        "requestBody": {
            "required": True,
            "content": {
                **{kind: {"schema": image} for kind in (*IMAGE_TYPES, "application/octet-stream")},
                "multipart/form-data": {
                    "schema": {"anyOf": [_object_schema(name, many, plain) for name in IMAGE_FIELDS]},
                    "encoding": encoding,
                },
                "application/json": {
                    "schema": {
                        "anyOf": [
                            _object_schema("image", text, properties),
                            _object_schema("images", many | {"items": text}, properties),
                        ]
                    },
                    "example": {"image": EXAMPLE_PNG},
                },
            },
        },
    }


def _object_schema(name: str, images: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """JSON schema of an object with images under this name, and parameters."""
    return {
        "type": "object",
        "required": [name],
        "properties": {name: images, **values},
        "additionalProperties": False,
    }


def model_query(models: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """OpenAPI parameters of a GET route that describes a model."""
    properties = constrain_to_models(ModelParameters.model_json_schema()["properties"], models)
    chosen = {name: properties[name] for name in ModelParameters.model_fields}
    return {"parameters": [_query_parameter(name, schema) for name, schema in chosen.items()]}


def add_examples(described: dict[str, Any], model: dict[str, Any]) -> None:
    """Fill the examples of /openapi.json with the name, classes and sizes of this model."""
    labels = model["labels"] or ["class 0"]
    own = {
        "model": model["name"],
        "version": model["version"],
        "engine": model["engine"],
        "label": labels[0],
        "index": 0,
    }
    own |= model["grid"] | {"num_heads": model["num_heads"], "prefix_tokens": model["prefix_tokens"]}
    schemas = described["components"]["schemas"]
    for schema in schemas.values():
        for name, value in schema.get("properties", {}).items():
            if own.get(name) is not None:
                value["examples"] = [own[name]]
    few = model["labels"] and model["labels"][:3]
    schemas["ModelResponse"]["examples"] = [model | {"labels": few}]


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """JSON schema without null, for forms and query strings, which leave a parameter out instead."""
    types = [kind for kind in schema.get("anyOf", ()) if kind.get("type") != "null"]
    if len(types) == 1:
        return types[0]
    return {"anyOf": types or [{"type": "string", "maxLength": 0}]} if "anyOf" in schema else schema


def _query_parameter(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    description = schema.get("description", "")
    plain = {key: value for key, value in _without_null(schema).items() if key not in ("title", "description")}
    return {"name": name, "in": "query", "required": False, "description": description, "schema": plain}


DEADLINE_HEADER = {
    "name": "X-Deadline-Ms",
    "in": "header",
    "required": False,
    "description": "Deadline in milliseconds. After it the response is 504, and nothing more is computed.",
    "schema": {"type": "integer", "minimum": 1, "maximum": 999_999_999},
    "example": 5000,
}
NDJSON_RESPONSE: dict[str, Any] = {
    "content": {
        "application/json": {},
        "application/x-ndjson": {
            "schema": {"type": "string"},
            "example": '{"partial": {"occlusion": {"values": "AAAA", "min": 0.0, "max": 0.2, "final": "AQAA", '
            '"done": 1, "total": 3}}}\n{"model": "vitrail/cifar10", "maps": {"occlusion": {}}, "ms": 812.5}\n',
        },
    },
    "description": "The explanation. With Accept: application/x-ndjson it is sent as JSON lines: "
    '{"partial": {method: map}} any number of times while a slow map is computed, then the complete response, or '
    '{"error": ...}. A partial map has final (base64, one byte per patch: 1 if its value is final), and the number of '
    "steps done of total.",
}
"""Addition to the 200 response of /v1/explain."""
EXAMPLE_PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
"""A PNG of one red pixel, in base64."""
