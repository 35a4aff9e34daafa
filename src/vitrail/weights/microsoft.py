"""Microsoft's .pth files of Swin Transformers, also those of SimMIM's pre-training."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from vitrail.config import SwinConfig, pair
from vitrail.weights.archive import Archive
from vitrail.weights.family_defaults import default_preprocess
from vitrail.weights.format import Format
from vitrail.weights.model_info import ModelInfo
from vitrail.weights.swin_buffers import swin_buffers
from vitrail.weights.swin_config import inexact_conventions, infer_config, is_swin, swin_info, unsupported_parts
from vitrail.weights.swin_names import MICROSOFT_NAMES, TIMM_NAMES
from vitrail.weights.writers import write_torch

HINTS = ("image_size", "window_size", "pretrained_window_sizes")
"""Fields that the caller may pass where the file does not state them."""
SQUASHED = 384
"""Image size from which the released models are evaluated without a crop."""


def detect(archive: Archive) -> str | None:
    """Microsoft's files, and those that timm wrote before 0.9, have the first merge in the first stage."""
    for prefix in ("", "module.", "encoder.", "module.encoder."):  # SimMIM's encoder
        inside = archive.strip_prefix(prefix)
        timm = "layers.1.downsample.reduction.weight" in inside.tensors
        first = "layers.0.downsample.reduction.weight" in inside.tensors
        if (
            is_swin(inside, MICROSOFT_NAMES)
            and (first or not timm)
            and f"{TIMM_NAMES.head}.weight" not in inside.tensors
        ):
            return prefix
    return None


def infer_info(archive: Archive) -> ModelInfo:
    stated = {name: archive.hints[name] for name in HINTS if name in archive.hints}
    config, notes = infer_config(archive, MICROSOFT_NAMES, stated)
    preprocess = default_preprocess("Swin", config)
    if min(pair(config.image_size)) >= SQUASHED:
        preprocess = preprocess.replace(resize="squash", resize_to=None)
    note = f"the file does not store preprocessing; that of the released models is used: {preprocess.summary()}."
    return swin_info(archive, config, preprocess, [*notes, note])


def write(path: Path, tensors: Mapping[str, Tensor], info: ModelInfo, overwrite: bool) -> None:
    """Write a state dict, with the buffers, under the key 'model'."""
    assert isinstance(info.config, SwinConfig)
    complete = {**tensors, **swin_buffers(info.config, MICROSOFT_NAMES)}
    write_torch(path, complete, section="model", overwrite=overwrite)


MICROSOFT = Format(
    "microsoft",
    detect,
    infer_info,
    MICROSOFT_NAMES.table,
    write,
    partial(unsupported_parts, MICROSOFT_NAMES),
    partial(inexact_conventions, MICROSOFT_NAMES),
    ignored_outside=("decoder.*", "module.decoder.*"),
    config_types=(SwinConfig,),
)
