"""Export options: formats, precisions and file names. Does not import torch."""

from __future__ import annotations

from pathlib import Path

from vitrail.engines.exported_files import SUFFIXES, check_supported, weights_path
from vitrail.engines.optional_packages import is_installed
from vitrail.errors import CheckpointError, ConfigError
from vitrail.exporting.quantize import NO_IMAGES

REQUIRED_PACKAGES: dict[str, tuple[str, ...]] = {
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "pt2": (),
    "openvino": ("onnx", "onnxscript", "openvino"),
}
"""Packages needed to write a file of a format and to compare it with the model."""
PRECISION_ALIASES = {
    "float32": ("fp32", "f32", "float"),
    "bfloat16": ("bf16",),
    "int8": ("i8",),
}
"""Other names of the precisions."""


def resolve_request(
    path: str | Path, to: str | None, precision: str, *, calibrated: bool = False, overwrite: bool = False
) -> tuple[Path, str, str]:
    """The file to write, its format and its precision; raises if the export would fail for a reason visible here."""
    path = Path(path).expanduser()
    to, precision = format_from_path(path, to), normalize_precision(precision)
    check_supported(to, precision)
    target = target_path(path, to)
    check_writable(target, overwrite)
    missing = [name for name in REQUIRED_PACKAGES[to] if not is_installed(name)]
    if missing:
        raise ConfigError(f"{missing[0]} is not installed; try pip install 'vitrail[export]'.")
    if (to, precision) == ("onnx", "int8") and not calibrated:
        raise ConfigError(NO_IMAGES)
    return target, to, precision


def format_from_path(path: Path, to: str | None = None) -> str:
    """`to` if given, else the format of the file's suffix, else ONNX."""
    if to is not None:
        return to
    return next((name for name, suffix in SUFFIXES.items() if path.suffix.lower() == suffix), "onnx")


def normalize_precision(name: str) -> str:
    """Resolve other names of precisions, such as bf16; unknown names are returned unchanged."""
    return next(
        (precision for precision, aliases in PRECISION_ALIASES.items() if name.lower() in (precision, *aliases)), name
    )


def target_path(path: str | Path, to: str) -> Path:
    """The path with the suffix of the format; in a folder, the file is called model."""
    path = Path(path).expanduser()
    suffix = SUFFIXES[to]
    if path.suffix == suffix:
        return path
    if path.is_dir() or not path.suffix:
        return path / f"model{suffix}" if path.is_dir() else path.with_name(path.name + suffix)
    suggestion = format_from_path(path)
    known = path.suffix.lower() == SUFFIXES[suggestion]
    formats = ", ".join(f"{name} ({known_suffix})" for name, known_suffix in SUFFIXES.items())
    hint = f", or omit --to for {suggestion}" if known else f"; available formats: {formats}"
    raise CheckpointError(
        f"{path}: expected a file name that ends in {suffix} for {to}; try {path.with_suffix(suffix)}{hint}."
    )


def check_writable(path: Path, overwrite: bool) -> None:
    """Raise CheckpointError if a file exists and must not be replaced, or its folder does not exist."""
    if not path.parent.is_dir():
        raise CheckpointError(f"could not write {path}: there is no folder {path.parent}; create it first.")
    existing = [part for part in reversed(export_files(path)) if part.exists()]
    if existing and not overwrite:
        raise CheckpointError(f"{existing[0]} already exists; choose another name, or replace it with --overwrite.")


def report_path(path: Path) -> Path:
    """model.onnx.json: the name includes the suffix, so that the reports of several formats can be in one folder."""
    return path.with_name(f"{path.name}.json")


def export_files(path: Path) -> list[Path]:
    """All files that an export may consist of; the file that is opened is last."""
    return [weights_path(path), report_path(path), path]
