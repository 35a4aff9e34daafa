"""A traced network -> a file: ONNX, torch.export's own, OpenVINO; each with its sheet inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch

from vitrail.errors import FormatError
from vitrail.export.compress import compress
from vitrail.export.extras import need, quiet
from vitrail.export.names import beside
from vitrail.export.program import first_line as first_line
from vitrail.export.program import read_archive, write_program
from vitrail.export.quantize import quantize
from vitrail.export.sheet import KEY, Sheet
from vitrail.weights.size_limits import check_image_size

LARGEST = 1_900_000_000
"""Bytes that one ONNX file can hold, nearly; beyond, the weights lie in a file beside it."""


def write(
    program: torch.export.ExportedProgram | Path,
    sheet: Sheet,
    path: Path,
    calibration: Sequence[npt.NDArray[Any]] = (),
) -> list[str]:
    """Write one file, for OpenVINO two, at a path where nothing is; gives what to say about it.

    For OpenVINO the network may lie in an ONNX file already.
    """
    if isinstance(program, Path):
        return _write_openvino(program, sheet, path, compressed=sheet.precision == "int8")
    if sheet.to == "pt2":
        write_program(program, path, sheet.to_json())
        return []
    if sheet.to == "onnx":
        return _write_onnx(program, sheet, path, calibration)
    need("openvino")  # before the work
    bridge = path.with_suffix(".bridge.onnx")
    try:
        alone = sheet.precision == "int8" and not calibration  # OpenVINO's own integers need no images
        notes = _write_onnx(program, replace(sheet, precision="float32") if alone else sheet, bridge, calibration)
        notes += _write_openvino(bridge, sheet, path, compressed=alone)
    finally:
        for part in (bridge, beside(bridge)):
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
        model, notes = quantize(model, calibration)
    entry = model.metadata_props.add()
    entry.key, entry.value = KEY, sheet.to_json()
    model.doc_string = f"{sheet.info.title}, written by vitrail"
    if bytes_of(model) > LARGEST:
        onnx.save_model(
            model, str(path), save_as_external_data=True, all_tensors_to_one_file=True, location=beside(path).name
        )
    else:
        onnx.save_model(model, str(path))
    return notes


def _name_batch(model: Any) -> None:
    """Call the number of images so, where the exporter gives it a symbol; and without the source's places."""
    graph = model.graph
    for part in (graph, *graph.node):
        del part.metadata_props[:]
    found = {d.dim_param for d in graph.input[0].type.tensor_type.shape.dim if d.dim_param}
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param in found:
                dimension.dim_param = "batch"


def bytes_of(model: Any) -> int:
    """Of an ONNX model's weights; those of the whole cannot be asked for above two gigabytes."""
    return sum(len(tensor.raw_data) for tensor in model.graph.initializer)


def _write_openvino(bridge: Path, sheet: Sheet, path: Path, *, compressed: bool) -> list[str]:
    openvino = need("openvino")
    with quiet():
        model = openvino.Core().read_model(str(bridge))
        notes = compress(model) if compressed else []
        model.set_rt_info(sheet.to_json(), [KEY])
        # Ten bits of float16 are more than the eight that bfloat16 computes with.
        openvino.save_model(model, str(path), compress_to_fp16=sheet.precision == "bfloat16")
    return notes


def parts_of(path: Path) -> list[Path]:
    """The files of an export, the one that is opened last."""
    return [part for part in (beside(path), path) if part.exists()]


def read_program(path: Path) -> tuple[Any, Sheet]:
    """A module to call, and its sheet."""
    module, text = read_archive(path)
    sheet = sheet_of(text, path)
    nodes = {node.op: node for node in module.graph.nodes}
    check_graph(sheet, nodes["placeholder"].meta["val"].shape, nodes["output"].args[0][0].meta["val"].shape, path)
    return module, sheet


def check_graph(sheet: Sheet, given: Sequence[Any], gives: Sequence[Any], path: Path) -> None:
    """Raise FormatError where a file states other sizes than its graph has; a dimension that is no number is any."""
    inputs, outputs = ([side if type(side) is int else None for side in shape] for shape in (given, gives))
    if inputs != [sheet.batch_size, *sheet.shape]:
        raise FormatError(
            f"{path}: got images of {[sheet.batch_size, *sheet.shape]} in its metadata, its graph takes {inputs}."
        )
    classes = sheet.info.config.num_classes
    if sheet.answer != "features" and outputs[1:] != [classes]:
        raise FormatError(f"{path}: got {classes} classes in its metadata, its graph gives {outputs[1:]}.")


def sheet_of(text: object, path: Path) -> Sheet:
    """The sheet that a file holds, which without one is somebody else's."""
    if not text:
        raise FormatError(f"{path} was not written by vitrail export: it does not say how its images are prepared.")
    try:
        sheet = Sheet.from_json(str(text))
        check_image_size(sheet.info)
        return sheet
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error
