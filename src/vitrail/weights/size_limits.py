"""Check the sizes that a file states against its tensors before a network of these sizes is built."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from vitrail.config import BiTConfig, SwinConfig, ViTConfig, pair
from vitrail.errors import FormatError
from vitrail.weights.archive import LazyTensors
from vitrail.weights.model_info import ModelInfo
from vitrail.weights.renaming import AnyConfig

MAX_PIXELS = 2**26
"""In one input image: 8192 x 8192."""
MAX_TOKENS = 2**20
"""Patches and registers of one image."""
MIN_BLOCK_LIMIT = 256
"""This many blocks are always accepted: some files stack the tensors of all blocks."""
MAX_WEIGHT_RATIO = 64
"""Number of the network's weights / number in the file. Up to this ratio, missing tensors are listed by name."""
LONG_NUMBER = re.compile(r"\d{4,}")


def check_names(tensors: LazyTensors) -> None:
    """Raise FormatError for an impossible block index in a name: the number of blocks is inferred from the names."""
    for name in tensors:
        if any(len(digits) > 9 or int(digits) >= len(tensors) for digits in LONG_NUMBER.findall(name)):
            raise FormatError(
                f"got a tensor {name[:80]!r} among {len(tensors)} tensors, expected block indices from 0."
            )


def check_sizes(info: ModelInfo, tensors: LazyTensors) -> None:
    """Raise FormatError if the network would have far more blocks or weights than the file."""
    check_image_size(info)
    blocks, stated = _num_blocks(info.config)
    if blocks > max(len(tensors), MIN_BLOCK_LIMIT):
        raise FormatError(f"got {stated}, expected at most the file's number of tensors, {len(tensors)}.")
    there = sum(math.prod(tensors.shape(name)) for name in tensors)
    for stated, expected in _min_weights(info.config):
        if expected > MAX_WEIGHT_RATIO * there:
            raise FormatError(f"got {stated}: at least {expected:,} weights, but the file has {there:,}.")


def check_image_size(info: ModelInfo) -> None:
    """Raise FormatError if the image size is too large; in some networks it does not appear in the tensors."""
    for stated, image in (
        ("image_size", info.config.image_size),
        ("preprocess.image_size", info.preprocess.image_size),
    ):
        height, width = pair(image)
        if height * width > MAX_PIXELS:
            raise FormatError(f"got {stated}={height}x{width}, expected at most {MAX_PIXELS:,} pixels.")
    if isinstance(info.config, ViTConfig | SwinConfig):
        registers = info.config.num_registers if isinstance(info.config, ViTConfig) else 0
        tokens = math.prod(info.config.grid) + registers
        if tokens > MAX_TOKENS:
            raise FormatError(f"got {tokens:,} patches and registers, expected at most {MAX_TOKENS:,}.")
    if isinstance(info.config, SwinConfig) and max(map(math.prod, info.config.window_sizes)) > MAX_TOKENS:
        raise FormatError(f"got windows of {info.config.window_sizes}, expected at most {MAX_TOKENS:,} tokens in each.")


def _num_blocks(config: AnyConfig) -> tuple[int, str]:
    """The number of blocks, and the config field that states it."""
    if isinstance(config, BiTConfig):
        return sum(config.layers), f"layers={config.layers}"
    if isinstance(config, SwinConfig):
        return config.depth, f"depths={config.depths}"
    if config.stem is not None and sum(config.stem.layers) > config.depth:
        return sum(config.stem.layers), f"stem.layers={config.stem.layers}"
    return config.depth, f"depth={config.depth}"


def _min_weights(config: AnyConfig) -> Iterator[tuple[str, int]]:
    """(config fields, lower bound of the number of weights) for each part of a network."""
    if isinstance(config, BiTConfig):
        channels = 4 * int(64 * config.width_factor * 2 ** (len(config.layers) - 1))
        yield (
            f"layers={config.layers} and width_factor={config.width_factor:g}",
            _resnet_weights(config.width_factor, config.layers),
        )
        yield f"num_classes={config.num_classes}", config.num_classes * channels
        yield f"channels={config.channels}", config.channels
        return
    if isinstance(config, SwinConfig):
        yield from _min_swin_weights(config)
        return
    width, image, patch = (
        config.width,
        "x".join(map(str, pair(config.image_size))),
        "x".join(map(str, pair(config.patch_size))),
    )
    blocks = config.depth * width * (4 * width + 2 * config.mlp_dim)
    yield f"depth={config.depth}, width={width} and mlp_dim={config.mlp_dim}", blocks
    if config.stem is not None:
        units = f"stem.layers={config.stem.layers} and stem.width_factor={config.stem.width_factor:g}"
        yield units, _resnet_weights(config.stem.width_factor, config.stem.layers)
    channels = config.channels if config.stem is None else config.stem.channels
    yield f"patch_size={patch} and channels={config.channels}", channels * math.prod(pair(config.patch_size)) * width
    if config.position == "learned-1d":
        yield f"image_size={image} of patch_size={patch}", math.prod(config.grid) * width
    if config.position in ("learned-2d", "relative"):
        yield f"image_size={image} of patch_size={patch}", sum(config.grid)
    yield f"num_registers={config.num_registers}", config.num_registers * width
    yield f"pre_logits={config.pre_logits}", config.pre_logits * config.pooled_width
    if config.pool == "coca":
        yield f"pool_width={config.pool_width}", config.pooled_width * width
    yield f"num_classes={config.num_classes}", config.num_classes * config.head_width


def _min_swin_weights(config: SwinConfig) -> Iterator[tuple[str, int]]:
    widths = [config.stage_width(stage) for stage in range(len(config.depths))]
    blocks = sum(
        n * w * (4 * w + 2 * config.mlp_dim(s)) for s, (n, w) in enumerate(zip(config.depths, widths, strict=True))
    )
    yield f"depths={config.depths}, width={config.width} and mlp_ratio={config.mlp_ratio:g}", blocks
    patch = config.channels * math.prod(pair(config.patch_size)) * config.width
    yield f"patch_size={config.patch_size} and channels={config.channels}", patch
    if config.version == 1:
        tables = [math.prod(config.table_window(stage)) for stage in range(len(config.depths))]
        yield f"window_size={config.window_size}", sum(tables)
    yield f"num_classes={config.num_classes}", config.num_classes * config.pooled_width


def _resnet_weights(width: float, layers: Sequence[int], first: int = 0) -> int:
    """Lower bound for a ResNet: each unit has 3x3 weights from m channels to m and 1x1 weights to 4 m."""
    return sum(units * 13 * int(64 * width * 2**s) ** 2 for s, units in enumerate(layers, first))
