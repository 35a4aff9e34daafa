"""Responses of the routes, as pydantic models for /openapi.json."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class Prediction(BaseModel):
    label: str = Field(examples=["cat"])
    index: int = Field(examples=[3])
    score: float = Field(examples=[0.905])


class ImagePredictions(BaseModel):
    predictions: list[Prediction]


class PredictResponse(BaseModel):
    model: str = Field(examples=["vitrail/cifar10"])
    version: str = Field(examples=["1"])
    engine: str = Field(examples=["torch"])
    results: list[ImagePredictions]
    ms: float = Field(examples=[12.3])


class ImageEmbedding(BaseModel):
    embedding: list[float]


class EmbedResponse(BaseModel):
    model: str
    version: str = Field(examples=["1"])
    dimension: int = Field(examples=[192])
    results: list[ImageEmbedding]
    ms: float


class Grid(BaseModel):
    rows: int = Field(examples=[14])
    columns: int = Field(examples=[14])


class Map(BaseModel):
    values: str = Field(
        description="base64 of rows x columns unsigned bytes, row by row; value = min + byte / 255 * (max - min)"
    )
    min: float
    max: float


class Attention(BaseModel):
    layer: int
    num_heads: int
    num_tokens: int
    values: str = Field(
        description="base64 of heads x queries x keys unsigned bytes, row-major; weight = byte / 255 * row_max"
    )
    row_max: str = Field(description="base64 of heads x queries float32, little endian: the largest weight of each row")


class ExplainResponse(BaseModel):
    model: str
    version: str = Field(examples=["1"])
    grid: Grid
    prefix_tokens: list[str] = Field(
        description="Tokens before the patches, such as the class token.", examples=[["class"]]
    )
    predictions: list[Prediction]
    target: Prediction | None
    image: str = Field(description="The image as the network receives it, as a data URL of a JPEG.")
    maps: dict[str, Map]
    attention: list[Attention]
    layers: list[int] = Field(description="Layers in attention.")
    attention_distance: list[list[float]] = Field(description="Mean attention distance in pixels, by layer and head.")
    uniform_attention_distance: float | None
    ms: float


class PreprocessResponse(BaseModel):
    model: str
    version: str = Field(examples=["1"])
    grid: Grid
    image: str = Field(description="The image as the network receives it, as a data URL of a JPEG.")
    ms: float


class ImageSize(BaseModel):
    height: int
    width: int


class LimitsResponse(BaseModel):
    max_bytes: int
    max_pixels: int
    max_total_pixels: int
    max_images: int


class ModelResponse(BaseModel):
    name: str = Field(examples=["vitrail/cifar10"])
    version: str = Field(examples=["1"])
    family: str
    task: Literal["classify", "embed"]
    multi_label: bool
    num_classes: int
    labels: list[str] | None
    num_parameters: int | None
    image_size: ImageSize
    channels: int
    grid: Grid | None
    depth: int | None
    num_heads: int | None
    prefix_tokens: list[str]
    pool: str | None
    position: str | None
    has_attention: bool
    methods: list[str]
    engine: str
    precision: str
    vitrail_version: str
    limits: LimitsResponse


class Canary(BaseModel):
    images: int
    compared_with: str | None = Field(description="The version that was in use.")
    agreement: float | None = Field(description="Fraction of the images with the same top class in both versions.")
    accuracy: float | None = Field(description="Top-1 accuracy on labeled images of classes that both versions have.")
    previous_accuracy: float | None = Field(description="The same of the version that was in use.")


class VersionState(BaseModel):
    version: str = Field(examples=["1"])
    state: Literal["available", "loading", "comparing", "warming_up", "ready", "draining", "failed"]
    reason: str | None = Field(None, description="Why it has failed, or is not in use.")
    canary: Canary | None = Field(None, description="What trying it on images showed before it was used.")


class ModelVersions(BaseModel):
    """A model, with the fields of OpenAI's API and those of this service."""

    id: str = Field(description="The name again.", examples=["vitrail/cifar10"])
    object: Literal["model"]
    created: int = Field(description="Always 0.", examples=[0])
    owned_by: Literal["vitrail"]
    name: str = Field(examples=["vitrail/cifar10"])
    default: str | None = Field(description="The version that answers requests without a version.", examples=["1"])
    versions: list[VersionState]
    problem: str | None = Field(None, description="Why no new version is loaded.")


class ModelsResponse(BaseModel):
    object: Literal["list"]
    data: list[ModelVersions]


class PositionsResponse(BaseModel):
    model: str
    version: str = Field(examples=["1"])
    grid: Grid
    values: str = Field(description="base64 of N x N signed bytes, row-major; similarity = byte / 127")
    description: str = Field(description="What the similarity measures.")


class Sample(BaseModel):
    name: str
    url: str
    alt: str
    credit: str
    query_point: tuple[float, float] = Field(description="Suggested query point: fractions of width and height.")


class HealthResponse(BaseModel):
    status: Literal["alive"]


class ReadyResponse(BaseModel):
    status: Literal["ready"]


class ErrorDetail(BaseModel):
    code: str = Field(examples=["image_unreadable"])
    message: str = Field(examples=["the image is empty (0 bytes)."])
    request_id: str = Field(examples=["5f1f8a0f6f6f4e0c9f0e6d5c4b3a2918"])


class ErrorResponse(BaseModel):
    error: ErrorDetail
