"""Faster exports of small networks in tests: traces and ONNX conversions are cached."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vitrail.engines.export_metadata import ExportMetadata
from vitrail.exporting import compare, engine_cache, exporter
from vitrail.exporting.tracing import trace
from vitrail.models import Net

PROGRAMS: dict[object, torch.export.ExportedProgram] = {}
CONVERTED: dict[int, Any] = {}
"""ONNX conversions by the id of the program."""
original_onnx_export = torch.onnx.export


def export_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace and convert each network only once per process, and shorten the timing of files."""
    monkeypatch.setattr(compare, "SECONDS", 0.01)
    monkeypatch.setattr(exporter, "trace", _cached_trace)
    monkeypatch.setattr("torch.onnx.export", _cached_conversion)


def _cached_trace(net: Net, metadata: ExportMetadata) -> torch.export.ExportedProgram:
    precision = metadata.precision if metadata.to == "pt2" else None  # other formats are quantized after tracing
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
        CONVERTED[id(program)] = original_onnx_export(program, **options)
    return CONVERTED[id(program)]
