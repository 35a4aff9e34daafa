"""The packages of the extra `export`, imported on first use and without their warnings."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vitrail.errors import ConfigError

LOGGERS = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")
"""Loggers of the exporters."""


def import_optional(name: str) -> Any:
    """Import a module of the extra `export`; ConfigError with the pip command if that fails."""
    try:
        with silence_exporters():
            return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        reason = "" if getattr(error, "name", None) == package else f" or does not load ({error})"
        raise ConfigError(f"{package} is not installed{reason}; try pip install 'vitrail[export]'.") from error


def is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@contextmanager
def silence_exporters() -> Iterator[None]:
    """Suppress the warnings and log messages of the exporters, which are about their internals."""
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    try:
        for name in LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def error_summary(error: BaseException) -> str:
    """First line of an engine's error message, without the source locations that OpenVINO puts before it."""
    lines = [line for line in str(error).strip().splitlines() if not line.startswith(("Exception from ", "Check '"))]
    return (lines or [type(error).__name__])[0].rstrip(".")
