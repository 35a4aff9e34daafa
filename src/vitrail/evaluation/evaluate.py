"""`vitrail.evaluate`: measure a model on labeled images, at one or more image sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from vitrail.config import DataConfig, Pair, ViTConfig, pair
from vitrail.data.batches import evaluation_batches
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources import ShardStream, open_data, open_source_splits
from vitrail.data.sources.base import Source
from vitrail.data.sources.source_spec import parse_source
from vitrail.engine_model import EngineModel, EngineModule, PixelPreprocess
from vitrail.errors import ConfigError, DataError, ModelError, VitrailError, did_you_mean
from vitrail.evaluation.accuracy import measure
from vitrail.evaluation.calibration import NUM_BINS
from vitrail.evaluation.class_matching import ClassMatch, MappedSource, labels_for_matching, match_classes
from vitrail.evaluation.imagenet_real import (
    RealAccuracy,
    outputs_by_class,
    read_real_labels,
    real_accuracy,
    valid_outputs,
)
from vitrail.evaluation.scores import SampleResults
from vitrail.evaluation.summary import Evaluation, SizeResult, summarize
from vitrail.evaluation.synsets import read_synsets_file
from vitrail.evaluation.throughput import NetworkTimer
from vitrail.model import Model
from vitrail.open_model import load
from vitrail.runtime import log_on_main_process, warn_once
from vitrail.runtime.amx import check_bfloat16
from vitrail.runtime.distributed import DistributedContext
from vitrail.weights.class_names import ASSUMED_IMAGENET, stated_labels
from vitrail.weights.loading import adapt_model
from vitrail.weights.model_info import strip_local_folders

PROTOCOLS = ("auto", "imagenet", "real")
BATCH_SIZES = {"cpu": 32}
"""Default batch size by device type; 256 for others."""

Advance = Callable[[int], None]
Progress = Callable[[str, int], AbstractContextManager[Advance]]
"""(description, total number of images) -> a context manager that gives `advance(n)`, called after each n images."""


@contextmanager
def no_progress(what: str, total: int) -> Iterator[Advance]:
    yield lambda count: None


@dataclass(frozen=True)
class _EvaluationTask:
    """What is the same at all image sizes."""

    source: MappedSource
    match: ClassMatch
    config: DataConfig
    real: list[list[int] | None] | None
    """The correct outputs of each image according to ImageNet-ReaL."""
    distributed: DistributedContext
    batch_size: int
    flip: bool
    bins: int
    progress: Progress


def evaluate(
    model: str | Path | Model,
    data: str,
    *,
    image_size: Pair | Sequence[Pair] | None = None,
    flip: bool = False,
    protocol: Literal["auto", "imagenet", "real"] = "auto",
    real: str | Path | None = None,
    held_out: bool = False,
    root: str | None = None,
    skip_bad: bool = False,
    workers: int | None = None,
    batch_size: int | None = None,
    bins: int = NUM_BINS,
    device: str | None = None,
    dtype: str | torch.dtype | None = "float32",
    progress: Progress = no_progress,
    **options: Any,
) -> Evaluation:
    """Measure a model on labeled images: `evaluate("runs/digits", "digits").top1.value`.

    If the data has splits, the test split is measured, or else the validation split; otherwise all images are.
    `held_out`: measure the images that `train` would hold out. `image_size`: one or more other sizes. `flip`: average
    the probabilities of each image and its mirror image. Classes are matched to outputs by WordNet ID, by name or by
    order; `protocol="imagenet"` requires WordNet IDs, and `"real"` (or a file of labels, `real`) adds ImageNet-ReaL.
    Under torchrun the images are divided among processes. A file, name or hub ID is loaded with `options`, which are
    those of `load`; a `Model` stays on its device unless `device` is given.
    """
    if protocol not in PROTOCOLS:
        raise ConfigError(f"unknown protocol {protocol!r}{did_you_mean(protocol, PROTOCOLS)}")
    if bins < 1 or (batch_size is not None and batch_size < 1):
        raise ConfigError(f"bins={bins}, batch_size={batch_size}: expected 1 or more.")
    config = DataConfig(source=data, root=root, skip_bad=skip_bad, workers=workers)
    device = device or (str(model.device) if isinstance(model, Model) else "auto")
    with DistributedContext.from_env(device) as distributed, log_on_main_process():
        vit, source = _open_on_main_process_first(
            distributed, lambda: _open_model_and_source(model, config, held_out, dtype=dtype, **options)
        )
        _check_model(vit, distributed.device)
        sizes = _resolve_image_sizes(vit, image_size)
        labels = labels_for_matching(vit.info, source)
        match = match_classes(
            source,
            labels,
            vit.config.num_classes,
            synsets=read_synsets_file(data, source.labels),
            require_synsets=protocol == "imagenet",
            labels_are_names=parse_source(data).kind == "builtin",
        )
        valid, assumed = None, list[str]()
        if protocol == "real" or real is not None:
            valid, assumed = _real_outputs(source, match, real, labels)
        notes = [*match.notes, *assumed, *_caveats(source, vit)]
        if labels is not None and stated_labels(vit.info) is None:
            notes.insert(0, ASSUMED_IMAGENET)
        warn_once([note for note in notes if note not in vit.info.notes], about=data)
        per_process = -(-len(source) // distributed.world_size)
        per_batch = min(batch_size or BATCH_SIZES.get(distributed.device.type, 256), per_process)
        mapped = MappedSource(source, match)
        task = _EvaluationTask(mapped, match, config, valid, distributed, per_batch, flip, bins, progress)
        results: list[SizeResult] = []
        unreadable: dict[str, str] = {}
        for size in sizes:
            result, bad = _evaluate_at_size(vit, size, task, results[0] if results else None)
            results.append(result)
            unreadable |= bad
    return Evaluation(
        model=vit.info.title if isinstance(model, Model) else strip_local_folders(str(model)),
        data=source.name,
        labels=match.labels,
        multi_label=source.multi_label,
        matched_by=match.method,
        flip=flip,
        bins=bins,
        sizes=tuple(results),
        keys=tuple(source.key(i) for i in range(len(source))),
        notes=tuple(notes),
        unreadable=unreadable,
    )


def _open_on_main_process_first(
    distributed: DistributedContext, open_both: Callable[[], tuple[Model, Source]]
) -> tuple[Model, Source]:
    """Open in the first process, which downloads and indexes once, then in the others. Errors are raised in all."""
    found, error = None, None
    if distributed.is_main:
        try:
            found = open_both()
        except VitrailError as caught:
            error = caught
    error = distributed.broadcast_object(error)
    if error is not None:
        raise error
    return found or open_both()


def _open_model_and_source(
    model: str | Path | Model, config: DataConfig, held_out: bool, **options: Any
) -> tuple[Model, Source]:
    """Open the model, and the source to measure."""
    vit = model if isinstance(model, Model) else load(model, **options)
    return vit, open_data(config).validation if held_out else _evaluation_source(config, vit)


def _evaluation_source(config: DataConfig, model: Model) -> Source:
    """The source to measure: the test split, else the validation split, else all images."""
    splits = open_source_splits(config)
    warn_once(splits.notes, about=config.source)
    found = splits.evaluation_source
    if isinstance(found, ShardStream):
        raise DataError(f"{config.source} is a stream, which cannot be evaluated; try shards: instead of stream:.")
    if not len(found):
        raise DataError(f"{config.source} has no images to evaluate.")
    if not splits.has_eval_split and model.info.trained_by_vitrail:
        about = f"measuring all {len(found):,} images of {found.name}; if it was trained on them, use --held-out "
        warn_once([f"{about}to measure only those that training holds out"], about=config.source)
    return found


def _check_model(model: Model, device: torch.device) -> None:
    if model.info.task != "classify" or not model.config.num_classes:
        raise ModelError(
            f"{model.info.origin or 'the model'} has no classes, only features; measure them with vitrail probe, or "
            "train a classifier with vitrail finetune."
        )
    if model.dtype == torch.bfloat16 and device.type == "cpu":
        check_bfloat16()


def _resolve_image_sizes(model: Model, requested: Pair | Sequence[Pair] | None) -> list[tuple[int, int]]:
    """The image sizes to measure at; impossible ones raise an error before any work is done."""
    native = pair(model.config.image_size)
    if requested is None:
        return [pair(model.info.preprocess.image_size)]
    given = [requested] if isinstance(requested, int | tuple) else list(requested)
    sizes = list(dict.fromkeys(pair(size) for size in given))
    if not sizes:
        raise ConfigError("image_size is empty; expected a size such as 224, or several: 160,224,288.")
    for size in sizes:
        if size != pair(model.info.preprocess.image_size):
            model.check_has_network()
        config = model.config.replace(image_size=size)
        if isinstance(config, ViTConfig) and config.position == "relative" and size != native:
            raise ModelError(
                f"relative positions cannot be resampled from {_format_size(native)} to {_format_size(size)}; "
                "omit --image-size."
            )
    return sizes


def _real_outputs(
    source: Source, match: ClassMatch, real: str | Path | None, names: Sequence[str] | None
) -> tuple[list[list[int] | None], list[str]]:
    """The correct outputs of each image, and notes about what was assumed; `names` are the model's class names."""
    if source.multi_label:
        raise DataError(f"{source.name} is multi-label; ImageNet-ReaL needs ImageNet's single labels.")
    labels = read_real_labels(real)
    keys = [source.key(i) for i in range(len(source))]
    outputs, note = outputs_by_class(len(match.labels), match.synsets, names)
    return valid_outputs(keys, labels, outputs), [note] if note else []


def _caveats(source: Source, model: Model) -> list[str]:
    """Limitations of the result."""
    notes = []
    targets = source.targets
    counts = targets.sum(0) if source.multi_label else np.bincount(targets[targets >= 0], minlength=len(source.labels))
    present = np.flatnonzero(counts)
    if len(present) == 1:
        name = source.labels[present[0]]
        notes.append(f"all images have one class, {name!r}: accuracy says nothing about the other classes")
    if source.multi_label and not model.info.multi_label:
        notes.append(
            "the data is multi-label and the model single-label: each output is read as a separate probability"
        )
    return notes


def _evaluate_at_size(
    model: Model, size: tuple[int, int], task: _EvaluationTask, first: SizeResult | None
) -> tuple[SizeResult, dict[str, str]]:
    """The result at one image size, and the unreadable images."""
    distributed, source = task.distributed, task.source
    net, preprocess = _resize_model(model, size)
    net = net.to(distributed.device)
    several_processes = distributed.world_size > 1
    with NetworkTimer(net) as timer:
        batches = evaluation_batches(
            source,
            preprocess=preprocess.config,
            batch_size=task.batch_size,
            device=distributed.device,
            rank=distributed.rank,
            world_size=distributed.world_size,
            config=task.config,
        )
        with batches, task.progress(f"evaluating at {_format_size(size)}", len(source)) as advance:
            scores = measure(
                net,
                batches,
                preprocess=preprocess,
                num_classes=len(task.match.labels),
                multi_label=source.multi_label,
                loss="sigmoid" if model.info.multi_label else "softmax",
                reduce=distributed.all_reduce if several_processes else None,
                gather=distributed.all_gather_rows if several_processes else None,
                flip=task.flip,
                on_batch=lambda count: advance(count * distributed.world_size),
            )
            batches.merge_bad(distributed.all_gather_object(batches.bad))
        throughput = timer.throughput(scores.count)
    assert scores.samples is not None
    real = None if task.real is None else _real_accuracy(scores.samples, task.real)
    outputs = len(task.match.labels)
    result = summarize(
        scores, image_size=size, num_outputs=outputs, throughput=throughput, bins=task.bins, real=real, first=first
    )
    return result, batches.bad


def _real_accuracy(samples: SampleResults, valid: list[list[int] | None]) -> RealAccuracy:
    return real_accuracy(samples, [valid[i] for i in samples.index])


def _resize_model(model: Model, size: tuple[int, int]) -> tuple[nn.Module, Preprocess]:
    """A copy of the network for another image size, and its preprocessing; the model is not changed."""
    if isinstance(model, EngineModel):
        return EngineModule(model), PixelPreprocess(model.info.preprocess)
    if size == pair(model.info.preprocess.image_size):
        return model.net, Preprocess(model.info.preprocess)
    net, info = adapt_model(model.net, model.info.replace(notes=()), image_size=size)
    warn_once(info.notes, about=model.info.origin)
    return net, Preprocess(info.preprocess)


def _format_size(size: tuple[int, int]) -> str:
    return f"{size[0]} px" if size[0] == size[1] else f"{size[0]}x{size[1]} px"
