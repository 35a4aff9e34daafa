"""Write traced networks as ONNX, torch.export and OpenVINO files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch

from vitrail.engines.export_metadata import KEY, ExportMetadata
from vitrail.engines.exported_files import weights_path
from vitrail.engines.optional_packages import import_optional, silence_exporters
from vitrail.engines.pt2_archive import write_program
from vitrail.exporting.compress import compress
from vitrail.exporting.quantize import quantize

MAX_ONNX_BYTES = 1_900_000_000
"""Larger weights are stored in a separate file: protobuf limits an ONNX file to 2 GB."""


def write(
    program: torch.export.ExportedProgram | Path,
    metadata: ExportMetadata,
    path: Path,
    calibration: Sequence[npt.NDArray[Any]] = (),
) -> list[str]:
    """Write one file, for OpenVINO two, to a new path. Returns notes for the user.

    For OpenVINO, `program` may also be the path of an ONNX file of the network.
    """
    if isinstance(program, Path):
        return _write_openvino(program, metadata, path, compressed=metadata.precision == "int8")
    if metadata.to == "pt2":
        write_program(program, path, metadata.to_json())
        return []
    if metadata.to == "onnx":
        return _write_onnx(program, metadata, path, calibration)
    import_optional("openvino")  # raises before the work
    bridge = path.with_suffix(".bridge.onnx")
    try:
        dynamic = metadata.precision == "int8" and not calibration  # dynamic quantization needs no images
        notes = _write_onnx(
            program, replace(metadata, precision="float32") if dynamic else metadata, bridge, calibration
        )
        notes += _write_openvino(bridge, metadata, path, compressed=dynamic)
    finally:
        for part in (bridge, weights_path(bridge)):
            part.unlink(missing_ok=True)
    return notes


def _write_onnx(
    program: torch.export.ExportedProgram, metadata: ExportMetadata, path: Path, calibration: Sequence[npt.NDArray[Any]]
) -> list[str]:
    onnx = import_optional("onnx")
    import_optional("onnxscript")
    with silence_exporters():
        onnx_program = torch.onnx.export(
            program,
            dynamo=True,
            input_names=["pixels" if metadata.normalize_inside else "images"],
            output_names=[metadata.output_type],
            verbose=False,
        )
        assert onnx_program is not None
        model = onnx_program.model_proto
    _name_batch_dimension(model)
    notes: list[str] = []
    if metadata.precision == "int8":
        model, notes = quantize(model, calibration)
    entry = model.metadata_props.add()
    entry.key, entry.value = KEY, metadata.to_json()
    model.doc_string = f"{metadata.info.title}, written by vitrail"
    if weight_bytes(model) > MAX_ONNX_BYTES:
        onnx.save_model(
            model, str(path), save_as_external_data=True, all_tensors_to_one_file=True, location=weights_path(path).name
        )
    else:
        onnx.save_model(model, str(path))
    return notes


def _name_batch_dimension(model: Any) -> None:
    """Name a dynamic batch dimension "batch", and remove source locations from the graph."""
    graph = model.graph
    for part in (graph, *graph.node):
        del part.metadata_props[:]
    symbols = {d.dim_param for d in graph.input[0].type.tensor_type.shape.dim if d.dim_param}
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param in symbols:
                dimension.dim_param = "batch"


def weight_bytes(model: Any) -> int:
    """Size of an ONNX model's weights; `ByteSize` of the whole model fails above 2 GB."""
    return sum(len(tensor.raw_data) for tensor in model.graph.initializer)


def _write_openvino(bridge: Path, metadata: ExportMetadata, path: Path, *, compressed: bool) -> list[str]:
    openvino = import_optional("openvino")
    with silence_exporters():
        model = openvino.Core().read_model(str(bridge))
        notes = compress(model) if compressed else []
        model.set_rt_info(metadata.to_json(), [KEY])
        # float16 has a longer mantissa than bfloat16, in which the file is computed.
        openvino.save_model(model, str(path), compress_to_fp16=metadata.precision == "bfloat16")
    return notes
