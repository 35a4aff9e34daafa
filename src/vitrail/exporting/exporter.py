"""Export a network to a file and compare the file with the network; files that do not match are deleted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vitrail.data.preprocess import Preprocess
from vitrail.engines.engine import FileEngine, Pixels, TorchEngine, open_file
from vitrail.engines.export_metadata import ExportMetadata
from vitrail.engines.exported_files import existing_files
from vitrail.errors import ModelError
from vitrail.exporting import formats
from vitrail.exporting.compare import BATCH_SIZE, Comparison, check_agreement, compare, time_alternately
from vitrail.exporting.export_options import check_writable, export_files, report_path
from vitrail.exporting.tracing import trace
from vitrail.models import Net
from vitrail.storage.atomic_write import explain_write_errors, rename_synced, write_json
from vitrail.storage.scratch_folder import scratch_folder
from vitrail.weights.model_info import strip_local_folders

CALIBRATION_BATCH_SIZE = 4
"""Default batch size for calibration, in which the activations of all products are in memory at once."""


@dataclass(frozen=True)
class ExportResult:
    """An exported file, and its comparison with the model."""

    path: Path
    metadata: ExportMetadata
    comparison: Comparison
    size: int
    """Size in bytes, including a separate file with the weights."""
    notes: tuple[str, ...] = ()

    @property
    def weight_bytes(self) -> int:
        """Size of the model's weights in float32, in bytes."""
        return 4 * (self.metadata.parameters or 0)

    @property
    def report(self) -> Path:
        """The JSON file beside the export, with the values of `to_dict`."""
        return report_path(self.path)

    def to_dict(self) -> dict[str, Any]:
        return {
            "file": self.path.name,
            "bytes": self.size,
            "model_bytes": self.weight_bytes,
            "comparison": self.comparison.to_dict(),
            "notes": list(self.notes),
            **self.metadata.to_dict(),
        }


def export(
    net: Net,
    metadata: ExportMetadata,
    path: Path,
    images: Sequence[Pixels],
    *,
    targets: npt.NDArray[np.int64] | None = None,
    calibration: Sequence[Pixels] = (),
    bridge: Path | None = None,
    overwrite: bool = False,
    timed: bool = True,
    step: Callable[[str], None] = lambda what: None,
    advance: Callable[[int], None] = lambda count: None,
) -> ExportResult:
    """Write a file, compare it with the model on `images`, each H W C, and then move it into place.

    targets: class indices of the images, -1 if unknown.
    calibration: images for static int8 quantization, each H W C.
    bridge: an ONNX file of the same network, if there is one, from which the OpenVINO file is converted.
    timed: whether to measure the speed of the file and of the model.
    step, advance: called with the name of each step, and with the number of images after each compared batch.
    """
    check_writable(path, overwrite)
    parameters = sum(p.numel() for p in net.parameters())
    metadata = replace(
        metadata, parameters=parameters, info=metadata.info.replace(origin=strip_local_folders(metadata.info.origin))
    )
    if calibration and metadata.precision == "int8" and 4 * parameters > formats.MAX_ONNX_BYTES:
        raise ModelError(
            f"got {4 * parameters / 1e9:.1f} GB of weights, expected at most {formats.MAX_ONNX_BYTES / 1e9} GB to "
            "calibrate int8; try bfloat16, or int8 for openvino without calibration images."
        )
    with scratch_folder(path) as folder:
        temporary = folder / path.name
        step("tracing")
        program = bridge or trace(net, metadata)
        step("calibrating and writing" if calibration else "writing")
        with explain_write_errors(path):
            notes = formats.write(program, metadata, temporary, calibration_batches(metadata, calibration))
        del program
        step("comparing")
        engine, model = open_file(temporary), reference_engine(net, metadata)
        comparison = compare(engine, model, images, targets, timed=False, advance=advance)
        check_agreement(comparison, path.name)
        if timed:
            step("timing")
            count = metadata.batch_size or BATCH_SIZE
            batch = np.stack([images[i % len(images)] for i in range(count)])
            comparison = replace(comparison, speed=time_alternately(engine, model, batch))
        size = sum(part.stat().st_size for part in existing_files(temporary))
        result = ExportResult(path, metadata, comparison, size, (*notes, *comparison.notes))
        write_json(report_path(temporary), result.to_dict())
        del engine
        with explain_write_errors(path):
            _move_into_place(temporary, path)
    return result


def calibration_batches(metadata: ExportMetadata, images: Sequence[Pixels]) -> list[Pixels]:
    """Calibration images, each H W C -> batches of the file's input; empty unless the precision is int8."""
    if metadata.precision != "int8":
        return []
    size = metadata.batch_size or CALIBRATION_BATCH_SIZE
    engine = FileEngine("onnxruntime", metadata, lambda inputs: inputs)
    count = len(images)
    # The first images are repeated to fill the last batch, if the batch size is fixed.
    padded_count = -(-count // size) * size if metadata.batch_size else count
    ranges = [range(i, min(i + size, padded_count)) for i in range(0, padded_count, size)]
    return [engine.to_input(np.stack([images[i % count] for i in indices])) for indices in ranges]


def reference_engine(net: Net, metadata: ExportMetadata) -> TorchEngine:
    """The reference of a comparison: the network in torch, in float32 on the CPU."""
    return TorchEngine(float32_on_cpu(net), metadata.info)


def float32_on_cpu(net: Net) -> Net:
    """The network in float32 on the CPU; the same object if it is already."""
    first = next(net.parameters())
    if first.dtype == torch.float32 and first.device.type == "cpu":
        return net
    return net.rebuild(net.config, {}).to("cpu", torch.float32)


def preprocess_images(metadata: ExportMetadata, images: Sequence[Any]) -> list[Pixels]:
    """Apply the model's preprocessing to images of any type -> pixels, each H W C."""
    pixels = Preprocess(metadata.info.preprocess).pixels
    return [pixels(image) for image in images]


def _move_into_place(temporary: Path, path: Path) -> None:
    """Move the files of an export; the one that is opened is last, so that it is never there without its weights."""
    for source, target in zip(export_files(temporary), export_files(path), strict=True):
        if source.exists():
            rename_synced(source, target)
        elif target.exists():  # left from the replaced export
            target.unlink()
