"""Metadata stored in an exported file: the model info and the export options."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from vitrail.config import Pair, ViTConfig, pair
from vitrail.config.format_version import VERSION, upgrade
from vitrail.data.preprocess import Preprocess
from vitrail.engines.exported_files import check_supported
from vitrail.errors import ConfigError, FormatError
from vitrail.runtime import warn_once
from vitrail.runtime.cpu import detect_cpu
from vitrail.weights.model_info import ModelInfo
from vitrail.weights.size_limits import check_image_size

ExportFormat = Literal["onnx", "pt2", "openvino"]
Precision = Literal["float32", "bfloat16", "int8"]
OutputType = Literal["logits", "probabilities", "features"]

KEY = "vitrail"
"""Key of the metadata in ONNX and OpenVINO files."""

SATURATES = (
    "this int8 file was written by an older version of vitrail: on this CPU, which has no VNNI instructions, sums of "
    "its 8-bit products can saturate at 16 bits and give wrong outputs; export the model again"
)


@dataclass(frozen=True, kw_only=True)
class ExportMetadata:
    """What is needed to run an exported file, beside its graph."""

    info: ModelInfo
    """Its config has the image size of the export."""
    to: ExportFormat
    precision: Precision = "float32"
    normalize_inside: bool = True
    """Whether the graph normalizes: the input is pixels, B H W C, 0 to 255; else it is normalized images, B C H W."""
    output_type: OutputType = "logits"
    """Type of the outputs."""
    batch_size: int | None = None
    """Fixed batch size; None: any."""
    parameters: int | None = None
    """Number of parameters of the network; None in files of earlier versions."""
    saturates: bool = False
    """Whether sums of two of its 8-bit products can exceed 16 bits: they saturate on x86 CPUs without VNNI."""

    def __post_init__(self) -> None:
        check_supported(self.to, self.precision)
        if self.output_type not in get_args(OutputType):
            raise ConfigError(f"output_type={self.output_type!r}: expected {', '.join(get_args(OutputType))}.")
        if self.batch_size is not None and self.batch_size < 1:
            raise ConfigError(f"batch_size={self.batch_size}: expected 1 or more, or dynamic for any batch size.")

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return pair(self.info.config.image_size)

    @property
    def image_shape(self) -> tuple[int, ...]:
        """Shape of one image of the input: (H, W, C), or (C, H, W) if normalized."""
        channels = self.info.config.channels
        return (*self.image_size, channels) if self.normalize_inside else (channels, *self.image_size)

    @property
    def takes_uint8(self) -> bool:
        """Whether the input is uint8: pixels, if the preprocessing rounds them after resizing."""
        return self.normalize_inside and Preprocess(self.info.preprocess).dtype.__name__ == "uint8"

    @property
    def prefix_tokens(self) -> tuple[str, ...]:
        """Names of the tokens that are not patches, in order."""
        return self.info.config.prefix_token_names if isinstance(self.info.config, ViTConfig) else ()

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        values = {
            "format": "vitrail-export",
            "version": VERSION,
            "to": self.to,
            "precision": self.precision,
            "preprocessing_inside": self.normalize_inside,
            "input": {
                "shape": [self.batch_size, *self.image_shape],
                "type": "uint8" if self.takes_uint8 else "float32",
            },
            "output": self.output_type,
            "parameters": self.parameters,
            "model_info": self.info.to_dict(),
        }
        return values | ({"saturates_without_vnni": self.saturates} if self.precision == "int8" else {})

    @classmethod
    def from_json(cls, text: str) -> ExportMetadata:
        """Parse the output of `to_json`; FormatError for anything else."""
        try:
            return cls._from_values(json.loads(text))
        except FormatError:
            raise
        except ConfigError as error:
            raise FormatError(f"invalid metadata: {error}") from error
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise FormatError("its metadata do not have the format that vitrail export writes.") from error

    @classmethod
    def _from_values(cls, values: Any) -> ExportMetadata:
        if values.get("format") != "vitrail-export" or "version" not in values:
            got = f"format={values.get('format')!r}, version={values.get('version')!r}"
            raise FormatError(f"expected format='vitrail-export' and a version, got {got}.")
        values = upgrade("export", values)
        batch_size, parameters = values["input"]["shape"][0], values.get("parameters")
        for number in (batch_size, parameters):
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
            batch_size=batch_size,
            parameters=parameters,
            # Files without this field are older than weights that cannot saturate.
            saturates=values["precision"] == "int8" and bool(values.get("saturates_without_vnni", True)),
        )


def format_size(image_size: Pair) -> str:
    """Height x width as text: 384x288, or 224 for a square."""
    height, width = pair(image_size)
    return f"{height}" if height == width else f"{height}x{width}"


def parse_metadata(text: object, path: Path) -> ExportMetadata:
    """Parse and check the metadata of a file; FormatError if it has none, that is, if vitrail did not write it."""
    if not text:
        raise FormatError(f"{path} was not written by vitrail export: it has no metadata about preprocessing.")
    try:
        metadata = ExportMetadata.from_json(str(text))
        check_image_size(metadata.info)
        return metadata
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error


def check_graph(metadata: ExportMetadata, input_shape: Sequence[Any], output_shape: Sequence[Any], path: Path) -> None:
    """Raise FormatError if sizes in the metadata and in the graph differ; dimensions that are not int are dynamic."""
    inputs, outputs = ([dim if type(dim) is int else None for dim in shape] for shape in (input_shape, output_shape))
    if inputs != [metadata.batch_size, *metadata.image_shape]:
        raise FormatError(
            f"{path}: got input shape {[metadata.batch_size, *metadata.image_shape]} in its metadata, "
            f"but {inputs} in its graph."
        )
    classes = metadata.info.config.num_classes
    if metadata.output_type != "features" and outputs[1:] != [classes]:
        raise FormatError(f"{path}: got {classes} classes in its metadata, but outputs {outputs[1:]} in its graph.")


def warn_of_saturation(metadata: ExportMetadata, path: Path) -> None:
    """Warn if the sums of products of an int8 file can saturate on this CPU."""
    if metadata.saturates and detect_cpu().int8_saturates:
        warn_once([SATURATES], about=str(path))
