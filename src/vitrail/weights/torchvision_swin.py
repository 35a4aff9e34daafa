"""torchvision's Swin Transformers: swin_t to swin_b and swin_v2_t to swin_v2_b."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from vitrail.config import PreprocessConfig, SwinConfig, pair
from vitrail.config.image import preprocess_for_size
from vitrail.weights.archive import Archive
from vitrail.weights.format import Format
from vitrail.weights.microsoft import HINTS
from vitrail.weights.model_info import ModelInfo
from vitrail.weights.swin_buffers import swin_buffers
from vitrail.weights.swin_config import inexact_conventions, infer_config, is_swin, swin_info, unsupported_parts
from vitrail.weights.swin_names import TORCHVISION_NAMES
from vitrail.weights.torchvision import PUBLISHED
from vitrail.weights.writers import write_torch

SHORT_SIDES = {
    (1, 96, 12): 232,
    (1, 96, 24): 246,
    (1, 128, 24): 238,
    (2, 96, 12): 260,
    (2, 96, 24): 260,
    (2, 128, 24): 272,
}
"""Version, width and number of blocks of the published weights -> short side before the crop to 224 or 256."""


def detect(archive: Archive) -> str | None:
    prefixes = ("", "module.", "backbone.", "model.")
    return next((p for p in prefixes if is_swin(archive.strip_prefix(p), TORCHVISION_NAMES)), None)


def infer_info(archive: Archive) -> ModelInfo:
    stated = {name: archive.hints[name] for name in HINTS if name in archive.hints}
    config, notes = infer_config(archive, TORCHVISION_NAMES, stated)
    preprocess = _preprocess(config)
    notes.append(f"the file does not store preprocessing: torchvision's default is assumed: {preprocess.summary()}.")
    if config.num_classes:
        notes.append("the file does not store class names.")
    return swin_info(archive, config, preprocess, notes)


def _preprocess(config: SwinConfig) -> PreprocessConfig:
    """The transforms of torchvision's published weights."""
    crop = 224 if config.version == 1 else 256
    short = SHORT_SIDES.get((config.version, config.width, config.depth), 232 if config.version == 1 else 260)
    published = PUBLISHED.replace(image_size=crop, resize_to=short, interpolation="bicubic")
    return preprocess_for_size(published, pair(config.image_size), config.channels)


def write(path: Path, tensors: Mapping[str, Tensor], info: ModelInfo, overwrite: bool) -> None:
    """Write a state dict for `SwinTransformer(...).load_state_dict`."""
    assert isinstance(info.config, SwinConfig)
    write_torch(path, {**tensors, **swin_buffers(info.config, TORCHVISION_NAMES)}, overwrite=overwrite)


TORCHVISION_SWIN = Format(
    "torchvision",
    detect,
    infer_info,
    TORCHVISION_NAMES.table,
    write,
    partial(unsupported_parts, TORCHVISION_NAMES),
    partial(inexact_conventions, TORCHVISION_NAMES),
    config_types=(SwinConfig,),
)
