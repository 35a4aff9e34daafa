"""Exports of small networks in a fraction of the time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vitrail.export import compare, engine_cache, exporter
from vitrail.export.export_metadata import ExportMetadata
from vitrail.export.tracing import trace
from vitrail.models import Net

PROGRAMS: dict[object, torch.export.ExportedProgram] = {}
CONVERTED: dict[int, Any] = {}
"""By the program's id."""
convert = torch.onnx.export


def export_quickly(patch: pytest.MonkeyPatch) -> None:
    """Trace a network and convert it to ONNX once in each process, and do not time the file for long."""
    patch.setattr(compare, "SECONDS", 0.01)
    patch.setattr(exporter, "trace", _cached_trace)
    patch.setattr("torch.onnx.export", _cached_conversion)


def _cached_trace(net: Net, metadata: ExportMetadata) -> torch.export.ExportedProgram:
    precision = metadata.precision if metadata.to == "pt2" else None  # other formats are rounded afterwards
    key = (
        engine_cache.cache_key(net, metadata.info),
        metadata.to == "pt2",
        precision,
        metadata.normalize_inside,
        metadata.output_type,
        metadata.batch_size,
    )
    if key not in PROGRAMS:
        PROGRAMS[key] = trace(net, metadata)
    return PROGRAMS[key]


def _cached_conversion(program: torch.export.ExportedProgram, **options: Any) -> Any:
    if id(program) not in CONVERTED:
        CONVERTED[id(program)] = convert(program, **options)
    return CONVERTED[id(program)]
