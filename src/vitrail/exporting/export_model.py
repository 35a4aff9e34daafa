"""`vitrail.export`: writes a model as an ONNX, torch.export or OpenVINO file and compares the file with the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from vitrail.config import DataConfig, Pair
from vitrail.data.decode import ImageLike
from vitrail.data.sources import open_source_splits
from vitrail.data.sources.base import Source
from vitrail.engines.export_metadata import ExportMetadata, OutputType
from vitrail.engines.openvino_engine import openvino_core
from vitrail.engines.optional_packages import import_optional
from vitrail.errors import DataError
from vitrail.evaluation.class_matching import MappedSource, labels_for_matching, match_classes
from vitrail.evaluation.synsets import read_synsets_file
from vitrail.exporting import exporter
from vitrail.exporting.export_options import REQUIRED_PACKAGES, resolve_request
from vitrail.exporting.exporter import ExportResult
from vitrail.exporting.sample_images import sample_images
from vitrail.model import Model
from vitrail.open_model import load
from vitrail.runtime import warn_once
from vitrail.runtime.amx import check_bfloat16
from vitrail.weights.loading import adapt_model
from vitrail.weights.model_info import ModelInfo

MAX_CALIBRATION_IMAGES = 128
"""Maximum number of calibration images for int8."""
MAX_COMPARISON_IMAGES = 1000
"""Maximum number of images on which a file is compared with the model."""


def export(
    model: str | Path | Model,
    path: str | Path,
    *,
    to: str | None = None,
    image_size: Pair | None = None,
    batch_size: int | None = None,
    raw: bool = False,
    precision: str = "float32",
    calibrate: str | Sequence[ImageLike] | None = None,
    check: str | Sequence[ImageLike] | None = None,
    root: str | None = None,
    overwrite: bool = False,
    step: Callable[[str], None] = lambda what: None,
    started: Callable[[int], None] = lambda total: None,
    advance: Callable[[int], None] = lambda count: None,
    **options: Any,
) -> ExportResult:
    """Write a model as "onnx", "pt2" (torch.export) or "openvino": `export("ViT-Ti/16", "model.onnx")`.

    The input of the file is pixels, B H W C, 0 to 255, and the output is probabilities (features, if the model has no
    classes). The file is compared with the model on real images; if the outputs differ too much, CheckpointError is
    raised and no file is written.

    model: a Model, or a name, file, folder or hub id, which is loaded with `options`, those of `vitrail.load`.
    to: the default is the format of the suffix of `path`, else ONNX.
    image_size: another image size, for which position embeddings are resampled.
    batch_size: a fixed batch size; the default is any.
    raw: the input is normalized images, B C H W, and the output is logits.
    precision: "float32", "bfloat16" or "int8".
    calibrate, check: images for the calibration of int8 and for the comparison, as a data set that `vitrail.evaluate`
        accepts or a list; `root` is the folder of the built-in data sets. The default of `check` is crops of two
        photographs.
    step, started, advance: called with the name of each step, with the number of images to compare, and with the number
        of images after each compared batch.
    """
    target, to, precision = check_request(path, to, precision, calibrate is not None, overwrite)
    vit = model if isinstance(model, Model) else load(model, **options)
    net, info = adapt_model(vit.net, vit.info.replace(config=vit.net.config, notes=()), image_size)
    warn_once(info.notes, about=info.origin)
    metadata = ExportMetadata(
        info=info.replace(notes=()),
        to=cast(Any, to),
        precision=cast(Any, precision),
        normalize_inside=not raw,
        output_type=_output_type(vit, raw),
        batch_size=batch_size,
    )
    images, targets = comparison_images(check, vit.info.replace(config=vit.net.config), root)
    if precision == "int8" and calibrate and _is_same_data(calibrate, check):
        warn_once(
            ["calibrated and compared on the same images; the agreement on other images may be lower"],
            about=str(target),
        )
    started(len(images))
    result = exporter.export(
        net,
        metadata,
        target,
        exporter.preprocess_images(metadata, images),
        targets=targets,
        calibration=exporter.preprocess_images(metadata, calibration_images(calibrate, root))
        if precision == "int8"
        else (),
        overwrite=overwrite,
        step=step,
        advance=advance,
    )
    warn_once(result.notes, about=str(target))
    return result


def check_request(
    path: str | Path, to: str | None, precision: str, calibrated: bool, overwrite: bool
) -> tuple[Path, str, str]:
    """The file to write, its format and its precision; raises if the export cannot succeed. Loads no model."""
    target, to, precision = resolve_request(path, to, precision, calibrated=calibrated, overwrite=overwrite)
    for name in REQUIRED_PACKAGES[to]:
        import_optional(name)
    if precision == "bfloat16":
        check_bfloat16()  # before the first computation of torch
    if to == "openvino":
        openvino_core()  # its ISA limit must be set before the first computation
    return target, to, precision


def check_images(calibrate: str | None, check: str | None, root: str | None = None) -> None:
    """Raise DataError if a data set of images cannot be sampled."""
    for data in filter(None, dict.fromkeys((calibrate, check))):
        _sample_source(data, 1, root)


def _is_same_data(calibrate: object, check: object) -> bool:
    """Whether both are the same data set, or the same list object."""
    return calibrate is check or (isinstance(calibrate, str) and calibrate == check)


def _output_type(model: Model, raw: bool) -> OutputType:
    """Features without classes; else logits if `raw`, probabilities if not."""
    if model.info.task != "classify" or not model.config.num_classes:
        return "features"
    return "logits" if raw else "probabilities"


def comparison_images(
    check: str | Sequence[ImageLike] | None, info: ModelInfo, root: str | None
) -> tuple[list[Any], npt.NDArray[np.int64] | None]:
    """Images for the comparison, and their class indices if the data are labeled with the model's classes."""
    if check is None:
        return sample_images(info.config.channels), None
    if not isinstance(check, str):
        return list(check), None
    source, indices = _sample_source(check, MAX_COMPARISON_IMAGES, root)
    images = [source[int(i)].image for i in indices]
    if info.task != "classify" or not info.config.num_classes or source.multi_label:
        return images, None
    try:
        labels = labels_for_matching(info, source)
        match = match_classes(source, labels, info.config.num_classes, synsets=read_synsets_file(check, source.labels))
    except DataError as error:
        warn_once([f"top-1 accuracy is not compared: {error}"], about=check)
        return images, None
    warn_once(match.notes, about=check)
    return images, MappedSource(source, match).targets.astype(np.int64)[indices]


def calibration_images(calibrate: str | Sequence[ImageLike] | None, root: str | None = None) -> list[Any]:
    """Calibration images for int8, from a data set or a list; empty if `calibrate` is None."""
    if not isinstance(calibrate, str):
        return list(calibrate or ())[:MAX_CALIBRATION_IMAGES]
    source, indices = _sample_source(calibrate, MAX_CALIBRATION_IMAGES, root)
    return [source[int(i)].image for i in indices]


def _sample_source(data: str, max_images: int, root: str | None) -> tuple[Source, npt.NDArray[np.int64]]:
    """The evaluation split of a data set, and the indices of at most `max_images` images, evenly spaced."""
    source = open_source_splits(DataConfig(source=data, root=root), require_labels=False).evaluation_source
    if not hasattr(source, "__len__") or not len(source):
        raise DataError(
            f"{data} has no images."
            if hasattr(source, "__len__")
            else f"{data} is a stream, which cannot be sampled from; try shards:."
        )
    return source, np.unique(np.linspace(0, len(source) - 1, min(max_images, len(source))).astype(np.int64))
