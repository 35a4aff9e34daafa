"""Exported files: formats, precisions, suffixes, and the engines that run them. Does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from vitrail.errors import ConfigError, did_you_mean

EngineName = Literal["torch", "onnxruntime", "openvino"]

ENGINES = ("torch", "onnxruntime", "openvino", "auto")
ENGINES_BY_SUFFIX: dict[str, tuple[EngineName, ...]] = {
    ".onnx": ("onnxruntime", "openvino"),
    ".pt2": ("torch",),
    ".xml": ("openvino",),
}
"""Engines that can run a file, by its suffix; the first one is the default."""
SUFFIXES: dict[str, str] = {"onnx": ".onnx", "pt2": ".pt2", "openvino": ".xml"}
PRECISIONS = ("float32", "bfloat16", "int8")
UNSUPPORTED = {
    ("onnx", "bfloat16"): "ONNX Runtime has no bfloat16 matrix products on a CPU; try openvino or pt2, or int8",
    ("pt2", "int8"): "int8 is no faster in torch; try onnx or openvino, or bfloat16",
}
"""Unsupported combinations of format and precision, and the reasons."""


def check_supported(to: str, precision: str) -> None:
    """Raise ConfigError if the format or precision is unknown, or the combination is not supported."""
    if to not in SUFFIXES:
        raise ConfigError(f"unknown export format {to!r}{did_you_mean(to, SUFFIXES)}")
    if precision not in PRECISIONS:
        raise ConfigError(f"unknown export precision {precision!r}{did_you_mean(precision, PRECISIONS)}")
    if (to, precision) in UNSUPPORTED:
        raise ConfigError(f"{to} does not support {precision}: {UNSUPPORTED[to, precision]}.")


def weights_path(path: Path) -> Path:
    """File with the weights, if they are separate from the graph."""
    return path.with_suffix(".bin") if path.suffix == ".xml" else path.with_name(f"{path.name}.data")


def existing_files(path: Path) -> list[Path]:
    """The files of an export that exist; the one that is opened is last."""
    return [part for part in (weights_path(path), path) if part.exists()]


def is_exported(source: object) -> bool:
    """Whether `source` is an existing file with the suffix of an export format."""
    return (
        isinstance(source, str | Path) and Path(source).suffix.lower() in SUFFIXES.values() and Path(source).is_file()
    )
