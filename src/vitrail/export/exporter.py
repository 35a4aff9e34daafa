"""From a network to a file that is known to agree with it; a file that does not is never seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vitrail.data.preprocess import Preprocess
from vitrail.errors import ModelError
from vitrail.export import formats
from vitrail.export.compare import BATCH, Comparison, check_agreement, compare, time_alternately
from vitrail.export.engines import FileEngine, Pixels, TorchEngine, open_file
from vitrail.export.export_metadata import ExportMetadata
from vitrail.export.export_options import check_writable, export_files, report_path
from vitrail.export.scratch_folder import scratch_folder
from vitrail.export.tracing import trace
from vitrail.models import Net
from vitrail.weights.model_info import strip_local_folders
from vitrail.weights.writers import explain_write_errors, fsync, write_json

CALIBRATED = 4
"""Images at a time while calibrating: every product's activations are kept meanwhile."""


@dataclass(frozen=True)
class ExportResult:
    """A file that agrees with the model."""

    path: Path
    metadata: ExportMetadata
    comparison: Comparison
    size: int
    """Bytes, with the file beside it where there are two."""
    notes: tuple[str, ...] = ()

    @property
    def weights(self) -> int:
        """Bytes of the model's own weights, in float32."""
        return 4 * (self.metadata.parameters or 0)

    @property
    def report(self) -> Path:
        return report_path(self.path)

    def to_dict(self) -> dict[str, Any]:
        return {
            "file": self.path.name,
            "bytes": self.size,
            "model_bytes": self.weights,
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
    """Write, run, compare with the model on `images` (each H W C), and only then move into place.

    bridge: the same network in ONNX, where it is there already, to make OpenVINO's file from.
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
        there = folder / path.name
        step("tracing")
        program = bridge or trace(net, metadata)
        step("calibrating and writing" if calibration else "writing")
        with explain_write_errors(path):
            notes = formats.write(program, metadata, there, calibration_batches(metadata, calibration))
        del program
        step("comparing")
        engine, model = open_file(there), reference_engine(net, metadata)
        found = compare(engine, model, images, targets, timed=False, advance=advance)
        check_agreement(found, path.name)
        if timed:
            step("timing")
            count = metadata.batch_size or BATCH
            many = np.stack([images[i % len(images)] for i in range(count)])
            found = replace(found, speed=time_alternately(engine, model, many))
        size = sum(part.stat().st_size for part in formats.existing_files(there))
        made = ExportResult(path, metadata, found, size, (*notes, *found.notes))
        write_json(report_path(there), made.to_dict())
        del engine
        with explain_write_errors(path):
            _move(there, path)
    return made


def calibration_batches(metadata: ExportMetadata, images: Sequence[Pixels]) -> list[Pixels]:
    """Images as the file wants them, a few at a time."""
    if metadata.precision != "int8":
        return []
    size = metadata.batch_size or CALIBRATED
    shaped = FileEngine("onnxruntime", metadata, lambda given: given)
    count = len(images)
    full = -(-count // size) * size if metadata.batch_size else count  # the first again, up to a full batch
    places = [range(i, min(i + size, full)) for i in range(0, full, size)]
    return [shaped.to_input(np.stack([images[i % count] for i in part])) for part in places]


def reference_engine(net: Net, metadata: ExportMetadata) -> TorchEngine:
    """What an export is held against: the network itself, in float32, on the CPU."""
    return TorchEngine(float32_on_cpu(net), metadata.info)


def float32_on_cpu(net: Net) -> Net:
    """The network in float32 on the CPU: itself, where it is that."""
    first = next(net.parameters())
    if first.dtype == torch.float32 and first.device.type == "cpu":
        return net
    return net.rebuild(net.config, {}).to("cpu", torch.float32)


def preprocess_images(metadata: ExportMetadata, images: Sequence[Any]) -> list[Pixels]:
    """Images of any kind -> H W C each, as the model's preprocessing makes them."""
    pixels = Preprocess(metadata.info.preprocess).pixels
    return [pixels(image) for image in images]


def _move(there: Path, path: Path) -> None:
    """The file that is opened comes last: what it needs is there before it."""
    for new, final in zip(export_files(there), export_files(path), strict=True):
        if new.exists():
            fsync(new)
            new.replace(final)
        elif final.exists():  # of an export that was replaced
            final.unlink()
    fsync(path.absolute().parent)
