"""What an export is called and asked for: formats, precisions, files; known before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from vitrail.errors import CheckpointError, ConfigError, did_you_mean
from vitrail.export.optional_packages import is_installed
from vitrail.export.quantize import NO_IMAGES

SUFFIXES: dict[str, str] = {"onnx": ".onnx", "pt2": ".pt2", "openvino": ".xml"}
REQUIRED_PACKAGES: dict[str, tuple[str, ...]] = {
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "pt2": (),
    "openvino": ("onnx", "onnxscript", "openvino"),
}
"""Packages that writing and comparing take."""
PRECISIONS = ("float32", "bfloat16", "int8")
PRECISION_ALIASES = {
    "float32": ("fp32", "f32", "float"),
    "bfloat16": ("bf16",),
    "int8": ("i8",),
}
"""What else the precisions are called."""
UNSUPPORTED = {
    ("onnx", "bfloat16"): "ONNX Runtime has no products in bfloat16 on a CPU; try openvino or pt2, or int8",
    ("pt2", "int8"): "torch runs such a program no faster; try onnx or openvino, or bfloat16",
}
"""What would be of no use, and why."""


def resolve_request(
    path: str | Path, to: str | None, precision: str, *, calibrated: bool = False, overwrite: bool = False
) -> tuple[Path, str, str]:
    """The file to write, its format and its precision, once nothing that can be seen from here is in their way."""
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
    """The format asked for, else the one that a name's ending tells, else ONNX."""
    if to is not None:
        return to
    return next((name for name, suffix in SUFFIXES.items() if path.suffix.lower() == suffix), "onnx")


def normalize_precision(name: str) -> str:
    """bf16 is bfloat16; what nobody knows stays as it is."""
    return next((known for known, others in PRECISION_ALIASES.items() if name.lower() in (known, *others)), name)


def check_supported(to: str, precision: str) -> None:
    """Raise ConfigError where there is no such format or precision, or one is of no use in the other."""
    if to not in SUFFIXES:
        raise ConfigError(f"nothing is exported to {to!r}{did_you_mean(to, SUFFIXES)}")
    if precision not in PRECISIONS:
        raise ConfigError(f"no precision {precision!r} to export in{did_you_mean(precision, PRECISIONS)}")
    if (to, precision) in UNSUPPORTED:
        raise ConfigError(f"{to} is not written in {precision}: {UNSUPPORTED[to, precision]}.")


def target_path(path: str | Path, to: str) -> Path:
    """A file as the format calls it; a name without an ending, or a folder, gets one."""
    path = Path(path).expanduser()
    suffix = SUFFIXES[to]
    if path.suffix == suffix:
        return path
    if path.is_dir() or not path.suffix:
        return path / f"model{suffix}" if path.is_dir() else path.with_name(path.name + suffix)
    instead = format_from_path(path)
    other = f", or leave --to out for {instead}" if path.suffix.lower() == SUFFIXES[instead] else ""
    raise CheckpointError(f"{path}: a file for {to} ends in {suffix}; try {path.with_suffix(suffix)}{other}.")


def check_writable(path: Path, overwrite: bool) -> None:
    """Raise CheckpointError where files of this name are there already, or the folder is not."""
    if not path.parent.is_dir():
        raise CheckpointError(f"could not write {path}: there is no folder {path.parent}; make it first.")
    there = [part for part in reversed(export_files(path)) if part.exists()]
    if there and not overwrite:
        raise CheckpointError(f"{there[0]} exists already; choose another name, or overwrite it (--overwrite).")


def weights_path(path: Path) -> Path:
    """Where weights lie that are not in the file itself."""
    return path.with_suffix(".bin") if path.suffix == ".xml" else path.with_name(f"{path.name}.data")


def report_path(path: Path) -> Path:
    """model.onnx.json: another format's report may lie beside it."""
    return path.with_name(f"{path.name}.json")


def export_files(path: Path) -> list[Path]:
    """All that an export may consist of; the file that is opened comes last."""
    return [weights_path(path), report_path(path), path]


def is_exported(source: object) -> bool:
    """Whether this names a file that `vitrail export` may have written."""
    return (
        isinstance(source, str | Path) and Path(source).suffix.lower() in SUFFIXES.values() and Path(source).is_file()
    )
