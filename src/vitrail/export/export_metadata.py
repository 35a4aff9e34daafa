"""What travels inside an exported file: the model's info, and what was made of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, get_args

from vitrail.config import Pair, ViTConfig, pair
from vitrail.config.format_version import VERSION, current
from vitrail.data.preprocess import Preprocess
from vitrail.errors import ConfigError, FormatError
from vitrail.explain.attention import special_token_names
from vitrail.export.export_options import SUFFIXES as SUFFIXES
from vitrail.export.export_options import check_supported
from vitrail.weights.model_info import ModelInfo

ExportFormat = Literal["onnx", "pt2", "openvino"]
Precision = Literal["float32", "bfloat16", "int8"]
OutputType = Literal["logits", "probabilities", "features"]

KEY = "vitrail"
"""Under which the metadata lies in a file's own metadata."""


@dataclass(frozen=True, kw_only=True)
class ExportMetadata:
    """Everything about an exported file that running it needs."""

    info: ModelInfo
    """Its config has the image size that positions are baked for."""
    to: ExportFormat
    precision: Precision = "float32"
    normalize_inside: bool = True
    """Whether pixels are normalized inside: B H W C, 0 to 255; else normalized B C H W go in."""
    output_type: OutputType = "logits"
    """What comes out."""
    batch_size: int | None = None
    """Images at a time; None: any number."""
    parameters: int | None = None
    """Of the network; files that were written before this was kept do not say."""
    saturates: bool = False
    """Whether sums of its 8-bit products can exceed 16 bits, which changes them on a CPU without VNNI."""

    def __post_init__(self) -> None:
        check_supported(self.to, self.precision)
        if self.output_type not in get_args(OutputType):
            raise ConfigError(f"output_type={self.output_type!r}: expected {', '.join(get_args(OutputType))}.")
        if self.batch_size is not None and self.batch_size < 1:
            raise ConfigError(
                f"batch_size={self.batch_size}: expected 1 image at a time or more, or dynamic for any number."
            )

    @property
    def image(self) -> tuple[int, int]:
        return pair(self.info.config.image_size)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one image as it goes in."""
        channels = self.info.config.channels
        return (*self.image, channels) if self.normalize_inside else (channels, *self.image)

    @property
    def takes_uint8(self) -> bool:
        """Whether uint8 goes in: not where a model's own preprocessing never rounds its pixels."""
        return self.normalize_inside and Preprocess(self.info.preprocess).dtype.__name__ == "uint8"

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The network's tokens that are no patches, in order."""
        return special_token_names(self.info.config) if isinstance(self.info.config, ViTConfig) else ()

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        found = {
            "format": "vitrail-export",
            "version": VERSION,
            "to": self.to,
            "precision": self.precision,
            "preprocessing_inside": self.normalize_inside,
            "input": {"shape": [self.batch_size, *self.shape], "type": "uint8" if self.takes_uint8 else "float32"},
            "output": self.output_type,
            "parameters": self.parameters,
            "model_info": self.info.to_dict(),
        }
        return found | ({"saturates_without_vnni": self.saturates} if self.precision == "int8" else {})

    @classmethod
    def from_json(cls, text: str) -> ExportMetadata:
        """What `to_json` wrote; FormatError for anything else."""
        try:
            return cls._from_values(json.loads(text))
        except FormatError:
            raise
        except ConfigError as error:
            raise FormatError(f"what it says of itself cannot be: {error}") from error
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise FormatError("what it says of itself is not what vitrail export writes.") from error

    @classmethod
    def _from_values(cls, values: Any) -> ExportMetadata:
        if values.get("format") != "vitrail-export" or "version" not in values:
            got = f"format={values.get('format')!r}, version={values.get('version')!r}"
            raise FormatError(f"expected format='vitrail-export' and a version, got {got}.")
        values = current("export", values)
        batch, parameters = values["input"]["shape"][0], values.get("parameters")
        for number in (batch, parameters):
            if number is not None and type(number) is not int:
                raise TypeError(number)
        info = ModelInfo.from_dict(values["model_info"])
        if not isinstance(info.origin, str) or any(not isinstance(name, str) for name in info.labels or ()):
            raise TypeError(info.origin, info.labels)
        return cls(
            info=info,
            to=values["to"],
            precision=values["precision"],
            normalize_inside=bool(values["preprocessing_inside"]),
            output_type=values["output"],
            batch_size=batch,
            parameters=parameters,
            # Files that do not say are from before weights were kept small enough.
            saturates=values["precision"] == "int8" and bool(values.get("saturates_without_vnni", True)),
        )


def format_size(image_size: Pair) -> str:
    """224 or 384x288."""
    height, width = pair(image_size)
    return f"{height}" if height == width else f"{height}x{width}"
