"""Write traced networks as ONNX, torch.export and OpenVINO files, and read the metadata stored in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch

from vitrail.errors import FormatError
from vitrail.export.compress import compress
from vitrail.export.export_metadata import KEY, ExportMetadata
from vitrail.export.export_options import weights_path
from vitrail.export.optional_packages import import_optional, silence_exporters
from vitrail.export.pt2_archive import error_summary as error_summary
from vitrail.export.pt2_archive import read_archive, write_program
from vitrail.export.quantize import quantize
from vitrail.weights.size_limits import check_image_size

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


def existing_files(path: Path) -> list[Path]:
    """The files of an export that exist; the one that is opened is last."""
    return [part for part in (weights_path(path), path) if part.exists()]


def read_program(path: Path) -> tuple[Any, ExportMetadata]:
    """Read a .pt2 file: a callable module, and the metadata."""
    module, text = read_archive(path)
    metadata = parse_metadata(text, path)
    nodes = {node.op: node for node in module.graph.nodes}
    check_graph(metadata, nodes["placeholder"].meta["val"].shape, nodes["output"].args[0][0].meta["val"].shape, path)
    return module, metadata


def check_graph(metadata: ExportMetadata, input_shape: Sequence[Any], output_shape: Sequence[Any], path: Path) -> None:
    """Raise FormatError if sizes in the metadata and in the graph differ; dimensions that are not int are dynamic."""
    inputs, outputs = ([dim if type(dim) is int else None for dim in shape] for shape in (input_shape, output_shape))
    if inputs != [metadata.batch_size, *metadata.image_shape]:
        raise FormatError(
            f"{path}: got input shape {[metadata.batch_size, *metadata.image_shape]} in its metadata, "
            f"but {inputs} in its graph."
        )
    classes = metadata.info.config.num_classes
    if metadata.output_type != "features" and outputs[1:] != [classes]:
        raise FormatError(f"{path}: got {classes} classes in its metadata, but outputs {outputs[1:]} in its graph.")


def parse_metadata(text: object, path: Path) -> ExportMetadata:
    """Parse and check the metadata of a file; FormatError if it has none, that is, if vitrail did not write it."""
    if not text:
        raise FormatError(f"{path} was not written by vitrail export: it has no metadata about preprocessing.")
    try:
        metadata = ExportMetadata.from_json(str(text))
        check_image_size(metadata.info)
        return metadata
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error
