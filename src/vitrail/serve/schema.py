"""What requests and answers look like: the values a route takes, and what /openapi.json says of the rest."""

from __future__ import annotations

import copy
import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vitrail.serve.bodies import FILES
from vitrail.serve.problems import Problem

KINDS = tuple(f"image/{name}" for name in ("jpeg", "png", "webp", "gif", "bmp", "tiff", "x-portable-pixmap", "avif"))
"""Bodies that are an image as it is; what one really is its bytes say."""
FEW = 100
"""So many names of classes are listed."""
Word = Literal["mean", "zero", "blur"]


class HideValues(BaseModel):
    """What every route that takes images may be told, and /v1/embed no more than that."""

    model_config = ConfigDict(extra="forbid", strict=True)

    hide: list[int] = Field(
        [],
        max_length=20_000,
        fail_fast=True,
        description="Patches to hide, counted row by row from 0: left to right, then down.",
        examples=[[0, 1, 2]],
    )
    fill: Word = Field("mean", description="What stands where a patch is hidden.", examples=["mean"])


class PredictValues(HideValues):
    """What /v1/predict may be told."""

    top: int = Field(5, ge=1, description="How many classes to name.", examples=[5])


class ExplainValues(HideValues):
    """What /v1/explain may be told."""

    layers: Annotated[list[int], Field(max_length=1000, fail_fast=True)] | None = Field(
        None, description="Layers, from 1, whose attention is sent; absent: all where that is little.", examples=[[1]]
    )
    methods: Annotated[list[str], Field(max_length=100, fail_fast=True)] | None = Field(
        None, description="Kinds of explanation.", examples=[["rollout"]]
    )
    target: int | str | None = Field(
        None, description="The class to explain, by number or name; absent: the likeliest.", examples=[0]
    )


class Prediction(BaseModel):
    label: str = Field(examples=["cat"])
    index: int = Field(examples=[3])
    score: float = Field(examples=[0.905])


class Predicted(BaseModel):
    predictions: list[Prediction]


class PredictAnswer(BaseModel):
    model: str = Field(examples=["vitrail/cifar10"])
    engine: str = Field(examples=["torch"])
    results: list[Predicted]
    ms: float = Field(examples=[12.3])


class Embedded(BaseModel):
    embedding: list[float]


class EmbedAnswer(BaseModel):
    model: str
    dimension: int = Field(examples=[192])
    results: list[Embedded]
    ms: float


class Grid(BaseModel):
    rows: int = Field(examples=[14])
    columns: int = Field(examples=[14])


class Map(BaseModel):
    values: str = Field(
        description="base64 of rows x columns unsigned bytes, row by row; value = low + byte / 255 * (high - low)"
    )
    low: float
    high: float


class Attention(BaseModel):
    layer: int
    heads: int
    tokens: int
    values: str = Field(
        description="base64 of heads x tokens x tokens unsigned bytes, the last counted fastest: of each head, for "
        "each token that asks, all that it looks at; weight = byte / 255 * the peak of that row"
    )
    peaks: str = Field(description="base64 of heads x tokens float32, little endian: the largest weight of each row")


class ExplainAnswer(BaseModel):
    model: str
    grid: Grid
    special: list[str] = Field(description="Tokens that are no patches; they come first.", examples=[["class"]])
    predictions: list[Prediction]
    target: Prediction | None
    image: str = Field(description="As the network sees it: a data address of a JPEG.")
    maps: dict[str, Map]
    attention: list[Attention]
    layers: list[int] = Field(description="Those in attention.")
    distance: list[list[float]] = Field(description="Pixels, of each head of each layer.")
    uniform_distance: float | None
    ms: float


class ImageAnswer(BaseModel):
    model: str
    grid: Grid
    image: str = Field(description="As the network sees it: a data address of a JPEG.")
    ms: float


class Size(BaseModel):
    height: int
    width: int
    channels: int


class LimitsAnswer(BaseModel):
    bytes: int
    pixels: int
    total_pixels: int
    images: int


class ModelAnswer(BaseModel):
    name: str = Field(examples=["vitrail/cifar10"])
    family: str
    task: Literal["classify", "embed"]
    multi_label: bool
    num_classes: int
    labels: list[str] | None
    parameters: int | None
    image: Size
    grid: Grid | None
    depth: int | None
    heads: int | None
    special: list[str]
    pool: str | None
    position: str | None
    attention: bool
    methods: list[str]
    engine: str
    precision: str
    version: str
    limits: LimitsAnswer


class PositionsAnswer(BaseModel):
    grid: Grid
    values: str = Field(description="base64 of N x N signed bytes, row by row; similarity = byte / 127")
    meaning: str = Field(description="What the similarity is, in words.")


class Sample(BaseModel):
    name: str
    url: str
    alt: str
    credit: str
    point: tuple[float, float] = Field(description="A place worth asking from: shares of its width and height.")


class Alive(BaseModel):
    status: Literal["alive"]


class Ready(BaseModel):
    status: Literal["ready"]


class Reason(BaseModel):
    code: str = Field(examples=["image_unreadable"])
    message: str = Field(examples=["the image is empty (0 bytes)."])


class ProblemAnswer(BaseModel):
    error: Reason


Values = TypeVar("Values", bound=BaseModel)

WANTED = {
    "hide": "a list of patches: whole numbers, row by row from 0",
    "fill": "mean, zero or blur",
    "top": "a whole number, 1 or more",
    "layers": "a list of layers: whole numbers, from 1",
    "methods": "a list of words",
    "target": "a class, by number or name",
}
WORDS = {
    400: "An image or a value that will not do.",
    401: "The token is missing or wrong.",
    403: "A page from another site has sent it.",
    404: "There is no such thing.",
    408: "The body came too slowly.",
    413: "Too large: the body, an image's pixels, all images' pixels together, or the number of images.",
    415: "A kind of body that is not read.",
    421: "The server is not called by that name.",
    429: "Your address has its share of the queue (see Retry-After).",
    431: "The headers, or the address, are too long.",
    501: "This model cannot do that.",
    503: "The queue is full (see Retry-After), or the server is not ready.",
    504: "The deadline passed.",
}


def read_values(kind: type[Values], values: dict[str, Any]) -> Values:
    """Raise Problem at the first that is wrong."""
    try:
        return kind.model_validate({name: _whole(value) for name, value in values.items()})
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
    name, value = str(found["loc"][0]), found["input"]
    if found["type"] == "extra_forbidden":
        known = ", ".join(kind.model_fields) or "none"
        raise Problem(400, "bad_value", f"there is no value called {name[:40]!r} here; there is {known}.")
    if found["type"] == "too_long":
        most = found["ctx"]["max_length"]
        raise Problem(400, "bad_value", f"{name} has {len(value):,} values, wanted at most {most:,}.")
    raise Problem(400, "bad_value", f"{name} wants {WANTED[name]}; got {_shown(value)}.")


def _shown(value: Any) -> str:
    """A value as JSON has it, if it is short."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value[:41] if isinstance(value, str) else value, ensure_ascii=False)
    return text if len(text) <= 42 else f"{text[:40]}..."


def _whole(value: Any) -> Any:
    """JSON has one kind of number: 3.0 is 3."""
    return [_number(one) for one in value] if isinstance(value, list) else _number(value)


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ProblemAnswer, "description": WORDS[status]} for status in statuses}


def narrowed(properties: dict[str, Any], about: dict[str, Any]) -> dict[str, Any]:
    """Values as this one model has them: its patches, layers, explanations and classes."""
    found = copy.deepcopy(properties)
    if "hide" in found:
        patches = about["grid"]["rows"] * about["grid"]["columns"]
        found["hide"]["items"] |= {"minimum": 0, "maximum": patches - 1}
    if "layers" in found:
        depth = about["depth"] if about["attention"] else 0
        found["layers"]["anyOf"][0] |= {} if depth else {"maxItems": 0}
        found["layers"]["anyOf"][0]["items"] |= {"minimum": 1, "maximum": max(depth, 1)}
        found["methods"]["anyOf"][0] |= {} if about["methods"] else {"maxItems": 0}
        found["methods"]["anyOf"][0]["items"] |= {"enum": about["methods"]} if about["methods"] else {}
        number, word, nothing = found["target"]["anyOf"]
        names = about["labels"] or []
        kinds = [number | {"minimum": 0, "maximum": about["classes"] - 1}] if about["classes"] else []
        kinds += [word | {"enum": names} if len(names) <= FEW else word] if names and about["classes"] else []
        found["target"] |= {"anyOf": [*kinds, nothing], "examples": [0] if kinds else [None]}
    return found


def posted(values: type[BaseModel], multi_label: bool, about: dict[str, Any]) -> dict[str, Any]:
    """The parameters and bodies of a POST route: three kinds of body, the same values in each."""
    properties = narrowed(values.model_json_schema()["properties"], about)
    image = {"type": "string", "format": "binary"}
    text = {"type": "string", "format": "byte", "contentEncoding": "base64"}
    many = {"type": "array", "items": image, "minItems": 1, "maxItems": about["limits"]["images"] if multi_label else 1}
    plain = {name: _plain(schema) for name, schema in properties.items()}
    encoding = {name: {"contentType": ", ".join(KINDS)} for name in FILES}
    return {
        "parameters": [DEADLINE, *(_in_query(name, schema) for name, schema in properties.items())],
        "requestBody": {
            "required": True,
            "content": {
                **{kind: {"schema": image} for kind in (*KINDS, "application/octet-stream")},
                "multipart/form-data": {
                    "schema": {"anyOf": [_with(name, many, plain) for name in FILES]},
                    "encoding": encoding,
                },
                "application/json": {
                    "schema": {
                        "anyOf": [_with("image", text, properties), _with("images", many | {"items": text}, properties)]
                    },
                    "example": {"image": DOT},
                },
            },
        },
    }


def _with(name: str, images: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """An object that has images under this name, and values beside them."""
    return {
        "type": "object",
        "required": [name],
        "properties": {name: images, **values},
        "additionalProperties": False,
    }


def add_examples(described: dict[str, Any], about: dict[str, Any]) -> None:
    """To the examples of /openapi.json: this model's own name, classes and sizes."""
    labels = about["labels"] or ["class 0"]
    own = {"model": about["name"], "engine": about["engine"], "label": labels[0], "index": 0}
    own |= about["grid"] | {"heads": about["heads"], "special": about["special"]}
    schemas = described["components"]["schemas"]
    for schema in schemas.values():
        for name, value in schema.get("properties", {}).items():
            if own.get(name) is not None:
                value["examples"] = [own[name]]
    few = about["labels"] and about["labels"][:3]
    schemas["ModelAnswer"]["examples"] = [about | {"labels": few}]


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    """Where everything is text, what is left out is null."""
    kinds = [kind for kind in schema.get("anyOf", ()) if kind.get("type") != "null"]
    if len(kinds) == 1:
        return kinds[0]
    return {"anyOf": kinds or [{"type": "string", "maxLength": 0}]} if "anyOf" in schema else schema


def _in_query(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    about = schema.get("description", "")
    plain = {key: value for key, value in _plain(schema).items() if key not in ("title", "description")}
    return {"name": name, "in": "query", "required": False, "description": about, "schema": plain}


DEADLINE = {
    "name": "X-Deadline-Ms",
    "in": "header",
    "required": False,
    "description": "Milliseconds after which the answer is of no use: it is then 504, and nothing more is computed.",
    "schema": {"type": "integer", "minimum": 1, "maximum": 999_999_999},
    "example": 5000,
}
IN_LINES: dict[str, Any] = {
    "content": {
        "application/json": {},
        "application/x-ndjson": {
            "schema": {"type": "string"},
            "example": '{"partial": {"occlusion": {"values": "AAAA", "low": 0.0, "high": 0.2, "known": "AQAA", '
            '"done": 1, "total": 3}}}\n{"model": "vitrail/cifar10", "maps": {"occlusion": {}}, "ms": 812.5}\n',
        },
    },
    "description": "The explanation. If the Accept header names application/x-ndjson, it is sent as JSON lines: "
    '{"partial": {method: map}} any number of times while a slow map is computed, then the whole answer, or '
    '{"error": ...}. A partial map has known (base64, one byte for each patch: 1 if its value is final), and done '
    "of total steps.",
}
"""What /v1/explain adds to its answer's description."""
DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
"""One red pixel, as a PNG."""
