"""What travels inside an exported file: the model's card, and what was made of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from vitrail.config import Pair, pair
from vitrail.data.preprocess import Preprocess
from vitrail.errors import ConfigError, FormatError, nearest
from vitrail.weights.card import Card

To = Literal["onnx", "pt2", "openvino"]
Precision = Literal["float32", "bfloat16", "int8"]
Answer = Literal["logits", "probabilities", "features"]

SUFFIXES: dict[str, str] = {"onnx": ".onnx", "pt2": ".pt2", "openvino": ".xml"}
NEEDS: dict[str, tuple[str, ...]] = {
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "pt2": (),
    "openvino": ("onnx", "onnxscript", "openvino"),
}
"""Packages that writing and comparing take."""
PRECISIONS = ("float32", "bfloat16", "int8")
KEY = "vitrail"
"""Under which the sheet lies in a file's own metadata."""


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """Everything about an exported file that running it needs."""

    card: Card
    """Its config has the image size that positions are baked for."""
    to: To
    precision: Precision = "float32"
    inside: bool = True
    """Whether pixels are normalised inside: B H W C, 0 to 255; else normalised B C H W go in."""
    answer: Answer = "logits"
    """What comes out."""
    batch: int | None = None
    """Pictures at a time; None: any number."""

    def __post_init__(self) -> None:
        refuse(self.to, self.precision)
        if self.batch is not None and self.batch < 1:
            raise ConfigError(f"batch={self.batch}: wanted 1 picture at a time or more, or dynamic for any number.")

    @property
    def image(self) -> tuple[int, int]:
        return pair(self.card.config.image)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one picture as it goes in."""
        channels = self.card.config.channels
        return (*self.image, channels) if self.inside else (channels, *self.image)

    @property
    def bytes_in(self) -> bool:
        """Whether uint8 goes in: not where a model's own preprocessing never rounds its pixels."""
        return self.inside and Preprocess(self.card.preprocess).dtype.__name__ == "uint8"

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": "vitrail-export",
            "version": 1,
            "to": self.to,
            "precision": self.precision,
            "preprocessing_inside": self.inside,
            "input": {"shape": [self.batch, *self.shape], "type": "uint8" if self.bytes_in else "float32"},
            "output": self.answer,
            "card": self.card.to_dict(),
        }

    @classmethod
    def from_json(cls, text: str) -> Sheet:
        values = json.loads(text)
        if values.get("format") != "vitrail-export" or values.get("version") != 1:
            got = f"format={values.get('format')!r}, version={values.get('version')!r}"
            raise FormatError(f"wanted what vitrail export writes, version 1, got {got}; a newer vitrail may read it.")
        return cls(
            card=Card.from_dict(values["card"]),
            to=values["to"],
            precision=values["precision"],
            inside=values["preprocessing_inside"],
            answer=values["output"],
            batch=values["input"]["shape"][0],
        )


REFUSED = {
    ("onnx", "bfloat16"): "ONNX Runtime has no products in bfloat16 on a CPU; try openvino or pt2, or int8",
    ("pt2", "int8"): "torch runs such a program no faster; try onnx or openvino, or bfloat16",
}
"""What would be of no use, and why."""


def refuse(to: str, precision: str) -> None:
    """Raise ConfigError where there is no such format or precision, or one is of no use in the other."""
    if to not in SUFFIXES:
        raise ConfigError(f"nothing is exported to {to!r}{nearest(to, SUFFIXES)}")
    if precision not in PRECISIONS:
        raise ConfigError(f"no precision {precision!r} to export in{nearest(precision, PRECISIONS)}")
    if (to, precision) in REFUSED:
        raise ConfigError(f"{to} is not written in {precision}: {REFUSED[to, precision]}.")


def spelled(image: Pair) -> str:
    """224 or 384x288."""
    height, width = pair(image)
    return f"{height}" if height == width else f"{height}x{width}"
