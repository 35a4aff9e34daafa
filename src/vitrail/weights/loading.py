"""Load a checkpoint by path, name or hub id, and adapt it: image size, channels, number of classes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from vitrail.config import BiTConfig, Pair, pair
from vitrail.config.image import preprocess_for_channels, preprocess_for_size
from vitrail.errors import FormatError, VitrailError
from vitrail.models import Net, Swin, ViT
from vitrail.weights import checkpoint
from vitrail.weights.locate import ModelLocation, locate
from vitrail.weights.model_info import ModelInfo


def load_checkpoint(
    source: str | Path | ModelLocation,
    *,
    image_size: Pair | None = None,
    channels: int | None = None,
    num_classes: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[Net, ModelInfo]:
    """The network, in evaluation mode, and the model info, whose notes list what was changed and assumed."""
    location = locate(source)
    net, info = _read(location.path, image_size, dict(overrides or {}), **options)
    if location.origin:
        info = info.replace(origin=location.origin)
    return adapt_model(net, info.with_notes(*location.notes), image_size, channels, num_classes)


def _read(path: Path, image_size: Pair | None, changes: dict[str, Any], **options: Any) -> tuple[Net, ModelInfo]:
    """Read the checkpoint as stored; if that fails because its image size is unknown, with the requested size."""
    try:
        return checkpoint.read(path, overrides=changes, **options)
    except FormatError:
        if image_size is None:
            raise
        with suppress(VitrailError):
            return checkpoint.read(path, overrides=changes | {"image_size": pair(image_size)}, **options)
        raise


def adapt_model(
    net: Net,
    info: ModelInfo,
    image_size: Pair | None = None,
    channels: int | None = None,
    num_classes: int | None = None,
) -> tuple[Net, ModelInfo]:
    """Adapt a model to another image size, number of channels or number of classes."""
    if image_size is not None and pair(image_size) != pair(net.config.image_size):
        before = net.table_windows if isinstance(net, Swin) else ()
        net = net.resized(image_size)
        info = info.replace(config=net.config)
        if isinstance(net, ViT) and net.config.position.startswith("learned"):
            info = info.with_notes(
                f"position embeddings were resampled to {_format_size(image_size)} ({net.config.resample} method)"
            )
        if isinstance(net, Swin) and net.table_windows != before:
            info = info.with_notes(f"tables of position biases were resampled for {_format_size(image_size)}")
    if image_size is not None and pair(image_size) != pair(info.preprocess.image_size):
        info = info.replace(preprocess=preprocess_for_size(info.preprocess, pair(image_size), info.preprocess.channels))
    if channels is not None and channels != net.config.channels:
        note = _channels_note(net, channels)
        net = net.with_channels(channels)
        info = info.replace(
            config=net.config, preprocess=preprocess_for_channels(info.preprocess, channels)
        ).with_notes(note)
    if num_classes is None:
        return net, info
    if num_classes == net.config.num_classes and info.task == "classify":
        return net, info.with_notes(f"the model already has {num_classes} classes; its head is kept")
    net = net.with_classes(num_classes)
    info = info.replace(config=net.config, labels=None, multi_label=False, task="classify" if num_classes else "embed")
    return net, info.with_notes(
        f"the head is new: {num_classes} classes, all zeros until trained" if num_classes else "the head was removed"
    )


def _channels_note(net: Net, channels: int) -> str:
    had, plural = net.config.channels, "s" * (channels > 1)
    if channels == 1:
        how = f"summed over the {had} channels"
    elif channels > had:
        how = f"repeated from {had} to {channels} and scaled by {had}/{channels}"
    else:
        how = f"cut from {had} to {channels} and scaled by {had}/{channels}"
    note = f"for {channels} channel{plural} the first filters were {how}"
    standardized = isinstance(net.config, BiTConfig) or getattr(net.config, "stem", None) is not None
    return (
        f"{note}; its first convolution is weight-standardized, so the model must be fine-tuned before use"
        if standardized
        else note
    )


def _format_size(image_size: Pair) -> str:
    return "x".join(map(str, pair(image_size)))
