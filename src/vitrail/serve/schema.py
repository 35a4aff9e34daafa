"""What requests and answers look like: the values a route takes, and what /openapi.json says of the rest."""

from __future__ import annotations

import copy
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vitrail.serve.problems import Problem

FEW = 100
"""So many names of classes are listed."""
Word = Literal["mean", "zero", "blur"]


class NoValues(BaseModel):
    """A route that takes pictures and nothing else."""

    model_config = ConfigDict(extra="forbid", strict=True)


class PredictValues(NoValues):
    """What /v1/predict may be told."""

    top: int = Field(5, ge=1, description="How many classes to name.", examples=[5])
    hide: list[int] = Field([], description="Patches to hide, row by row from 0.", examples=[[0, 1, 2]])
    fill: Word = Field("mean", description="What stands where a patch is hidden.")


class ExplainValues(NoValues):
    """What /v1/explain may be told."""

    layers: list[int] | None = Field(
        None, description="Layers, from 1, whose attention is sent; absent: all where that is little.", examples=[[1]]
    )
    methods: list[str] | None = Field(None, description="Kinds of explanation.", examples=[["rollout"]])
    target: int | str | None = Field(
        None, description="The class to explain, by number or name; absent: the likeliest.", examples=[0]
    )
    hide: list[int] = Field([], description="Patches to hide, row by row from 0.", examples=[[0, 1, 2]])
    fill: Word = Field("mean", description="What stands where a patch is hidden.")


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
    values: str = Field(description="base64 of rows x columns bytes; value = low + byte / 255 * (high - low)")
    low: float
    high: float


class Attention(BaseModel):
    layer: int
    heads: int
    tokens: int
    values: str = Field(description="base64 of heads x tokens x tokens bytes; a row is byte / 255 * its peak")
    peaks: str = Field(description="base64 of heads x tokens float32, little endian")


class ExplainAnswer(BaseModel):
    model: str
    grid: Grid
    special: list[str] = Field(description="Tokens that are no patches; they come first.", examples=[["class"]])
    predictions: list[Prediction]
    target: Prediction | None
    picture: str = Field(description="As the network sees it: a data address of a JPEG.")
    maps: dict[str, Map]
    attention: list[Attention]
    layers: list[int] = Field(description="Those in attention.")
    distance: list[list[float]] = Field(description="Pixels, of each head of each layer.")
    uniform_distance: float | None
    ms: float


class Size(BaseModel):
    height: int
    width: int
    channels: int


class LimitsAnswer(BaseModel):
    bytes: int
    pixels: int
    images: int


class ModelAnswer(BaseModel):
    name: str = Field(examples=["vitrail/cifar10"])
    family: str
    task: Literal["classify", "embed"]
    several: bool
    classes: int
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
    values: str = Field(description="base64 of N x N signed bytes; similarity = byte / 127")
    meaning: str


class Sample(BaseModel):
    name: str
    url: str
    alt: str
    credit: str


class State(BaseModel):
    status: Literal["alive", "ready"]


class Reason(BaseModel):
    code: str = Field(examples=["image_unreadable"])
    message: str = Field(examples=["the picture is empty (0 bytes)."])


class ProblemAnswer(BaseModel):
    error: Reason


Values = TypeVar("Values", bound=BaseModel)

WORDS = {
    400: "A picture or a value that will not do.",
    401: "The token is missing or wrong.",
    404: "There is no such thing.",
    408: "The body came too slowly.",
    413: "Too large: the body, a picture's pixels, or the number of pictures.",
    415: "A kind of body that is not read.",
    501: "This model cannot do that.",
    503: "The queue is full (see Retry-After), or the server is not ready.",
    504: "The deadline passed.",
}


def read_values(kind: type[Values], values: dict[str, Any]) -> Values:
    """Raise Problem at the first that is wrong."""
    try:
        return kind.model_validate({name: _whole(value) for name, value in values.items()})
    except ValidationError as error:
        found = error.errors()[0]
    name = ".".join(str(part)[:40] for part in found["loc"][:2])
    if found["type"] == "extra_forbidden":
        known = ", ".join(kind.model_fields) or "none"
        raise Problem(400, "bad_value", f"there is no value called {name!r} here; there is {known}.")
    said = found["msg"][:1].lower() + found["msg"][1:]
    raise Problem(400, "bad_value", f"{name}: {said}.")


def _whole(value: Any) -> Any:
    """JSON has one kind of number: 3.0 is 3."""
    if isinstance(value, list):
        return [_whole(one) for one in value]
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


def posted(values: type[BaseModel], several: bool, about: dict[str, Any]) -> dict[str, Any]:
    """The parameters and bodies of a POST route: three kinds of body, the same values in each."""
    properties = narrowed(values.model_json_schema()["properties"], about)
    picture = {"type": "string", "format": "binary"}
    text = {"type": "string", "format": "byte", "contentEncoding": "base64"}
    many = {"type": "array", "items": picture, "minItems": 1, "maxItems": about["limits"]["images"] if several else 1}
    several_texts = {**many, "items": text}
    form = {
        "type": "object",
        "required": ["images"],
        "properties": {"images": many, **{name: _plain(schema) for name, schema in properties.items()}},
        "additionalProperties": False,
    }
    one = {"properties": {"image": text, **properties}, "required": ["image"]}
    list_of = {"properties": {"images": several_texts, **properties}, "required": ["images"]}
    either = {"anyOf": [{"type": "object", "additionalProperties": False, **kind} for kind in (one, list_of)]}
    encoding = {"images": {"contentType": "image/jpeg, image/png, image/webp"}}
    return {
        "parameters": [DEADLINE, *(_in_query(name, schema) for name, schema in properties.items())],
        "requestBody": {
            "required": True,
            "content": {
                "image/jpeg": {"schema": picture},
                "image/png": {"schema": picture},
                "application/octet-stream": {"schema": picture},
                "multipart/form-data": {"schema": form, "encoding": encoding},
                "application/json": {"schema": either, "example": {"image": DOT}},
            },
        },
    }


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
DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
"""One red pixel, as a PNG."""
