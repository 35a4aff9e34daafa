"""A traced network -> a file: ONNX, torch.export's own, OpenVINO; each with its sheet inside."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch

from vitrail.errors import CheckpointError, FormatError
from vitrail.export.extras import need, quiet
from vitrail.export.quantise import quantise
from vitrail.export.sheet import KEY, SUFFIXES, Sheet

LARGEST = 1_900_000_000
"""Bytes that one ONNX file can hold, nearly; beyond, the weights lie in a file beside it."""
PROGRAM = f"{KEY}.json"
"""The sheet's name in a torch.export archive."""
MINE = frozenset(SUFFIXES.values())


def write(
    program: torch.export.ExportedProgram, sheet: Sheet, path: Path, calibration: Sequence[npt.NDArray[Any]] = ()
) -> list[str]:
    """Write one file, for OpenVINO two, at a path where nothing is; gives what to say about it."""
    if sheet.to == "pt2":
        with quiet():
            torch.export.save(program, path, extra_files={PROGRAM: sheet.to_json()})
        return []
    if sheet.to == "onnx":
        return _write_onnx(program, sheet, path, calibration)
    need("openvino")  # before the work
    bridge = path.with_suffix(".bridge.onnx")
    try:
        notes = _write_onnx(program, sheet, bridge, calibration)
        _write_openvino(bridge, sheet, path)
    finally:
        for part in (bridge, _beside(bridge)):
            part.unlink(missing_ok=True)
    return notes


def _write_onnx(
    program: torch.export.ExportedProgram, sheet: Sheet, path: Path, calibration: Sequence[npt.NDArray[Any]]
) -> list[str]:
    onnx = need("onnx")
    need("onnxscript")
    with quiet():
        made = torch.onnx.export(
            program,
            dynamo=True,
            input_names=["pixels" if sheet.inside else "images"],
            output_names=[sheet.answer],
            verbose=False,
        )
        assert made is not None
        model = made.model_proto
    _name_batch(model)
    notes: list[str] = []
    if sheet.precision == "int8":
        model, notes = quantise(model, calibration)
    entry = model.metadata_props.add()
    entry.key, entry.value = KEY, sheet.to_json()
    model.doc_string = f"{sheet.card.origin or sheet.card.family}, written by vitrail"
    if model.ByteSize() > LARGEST:
        onnx.save_model(
            model, str(path), save_as_external_data=True, all_tensors_to_one_file=True, location=_beside(path).name
        )
    else:
        onnx.save_model(model, str(path))
    return notes


def _name_batch(model: Any) -> None:
    """Call the number of pictures so: the exporter gives it a symbol."""
    graph = model.graph
    found = {d.dim_param for d in graph.input[0].type.tensor_type.shape.dim if d.dim_param}
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param in found:
                dimension.dim_param = "batch"


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.data")


def _write_openvino(bridge: Path, sheet: Sheet, path: Path) -> None:
    openvino = need("openvino")
    with quiet():
        model = openvino.Core().read_model(str(bridge))
        model.set_rt_info(sheet.to_json(), [KEY])
        # Ten bits of float16 are more than the eight that bfloat16 computes with.
        openvino.save_model(model, str(path), compress_to_fp16=sheet.precision == "bfloat16")


def is_exported(source: object) -> bool:
    """Whether this names a file that `vitrail export` may have written."""
    return isinstance(source, str | Path) and Path(source).suffix.lower() in MINE and Path(source).is_file()


def parts_of(path: Path) -> list[Path]:
    """The files of an export, the one that is opened last."""
    beside = path.with_suffix(".bin") if path.suffix == ".xml" else _beside(path)
    return [part for part in (beside, path) if part.exists()]


def read_program(path: Path) -> tuple[Any, Sheet]:
    """A module to call, and its sheet."""
    files = {PROGRAM: ""}
    try:
        with quiet():
            module = torch.export.load(path, extra_files=files).module()
    except Exception as error:  # torch's own, of many kinds
        raise CheckpointError(f"{path} cannot be read as a torch.export program: {first_line(error)}.") from error
    return module, sheet_of(files[PROGRAM], path)


def sheet_of(text: object, path: Path) -> Sheet:
    """The sheet that a file holds, which without one is somebody else's."""
    if not text:
        raise FormatError(f"{path} was not written by vitrail export: it does not say how its pictures are prepared.")
    return Sheet.from_json(str(text))


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
