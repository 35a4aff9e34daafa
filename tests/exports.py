"""Exports of small networks in a fraction of the time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vitrail.export import compare, export, kept
from vitrail.export.packaged import traced
from vitrail.export.sheet import Sheet
from vitrail.models import Net

PROGRAMS: dict[object, torch.export.ExportedProgram] = {}
CONVERTED: dict[int, Any] = {}
"""By the program's id."""
convert = torch.onnx.export


def export_quickly(patch: pytest.MonkeyPatch) -> None:
    """Trace a network and convert it to ONNX once in each process, and do not time the file for long."""
    patch.setattr(compare, "SECONDS", 0.01)
    patch.setattr(export, "traced", _traced)
    patch.setattr("torch.onnx.export", _converted)


def _traced(net: Net, sheet: Sheet) -> torch.export.ExportedProgram:
    precision = sheet.precision if sheet.to == "pt2" else None  # other formats are rounded afterwards
    key = (kept.digest(net, sheet.info), sheet.to == "pt2", precision, sheet.inside, sheet.answer, sheet.batch_size)
    if key not in PROGRAMS:
        PROGRAMS[key] = traced(net, sheet)
    return PROGRAMS[key]


def _converted(program: torch.export.ExportedProgram, **options: Any) -> Any:
    if id(program) not in CONVERTED:
        CONVERTED[id(program)] = convert(program, **options)
    return CONVERTED[id(program)]
