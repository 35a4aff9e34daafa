"""torchvision's VisionTransformer: vit_b_16 to vit_h_14, including SWAG weights, and other sizes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from vitrail.config import Pair, PreprocessConfig, ViTConfig, pair
from vitrail.config.image import IMAGENET_MEAN, IMAGENET_STD, preprocess_for_channels, preprocess_for_size
from vitrail.errors import FormatError
from vitrail.models.model_names import infer_num_heads
from vitrail.weights.archive import Archive
from vitrail.weights.format import KINDS, Format
from vitrail.weights.google import GELU_NAMES, UNCOVERED_BORDER, parts_beyond_original
from vitrail.weights.model_info import ModelInfo
from vitrail.weights.renaming import (
    CLASS_TOKEN,
    POSITION,
    POSITION_NAMES,
    AnyConfig,
    RenameTable,
    Rule,
    weight_and_bias,
)
from vitrail.weights.writers import write_torch

BLOCK, OUR_BLOCK = "encoder.layers.encoder_layer_{i}.", "blocks.{i}."
FIRST = BLOCK.format(i=0)
OLD_NAMES = {"mlp.linear_1.": "mlp.0.", "mlp.linear_2.": "mlp.3."}
"""Names until torchvision 0.12, and in files published then -> current names."""


RULES = [
    *weight_and_bias("conv_proj", "patch"),
    Rule("class_token", "class_token", CLASS_TOKEN),
    Rule("encoder.pos_embedding", POSITION_NAMES, POSITION),
    *weight_and_bias(f"{BLOCK}ln_1", f"{OUR_BLOCK}norm1"),
    Rule(f"{BLOCK}self_attention.in_proj_weight", f"{OUR_BLOCK}attention.qkv.weight"),
    Rule(f"{BLOCK}self_attention.in_proj_bias", f"{OUR_BLOCK}attention.qkv.bias"),
    *weight_and_bias(f"{BLOCK}self_attention.out_proj", f"{OUR_BLOCK}attention.out"),
    *weight_and_bias(f"{BLOCK}ln_2", f"{OUR_BLOCK}norm2"),
    *weight_and_bias(f"{BLOCK}mlp.0", f"{OUR_BLOCK}mlp.up"),
    *weight_and_bias(f"{BLOCK}mlp.3", f"{OUR_BLOCK}mlp.down"),
    *weight_and_bias("encoder.ln", "norm"),
    *weight_and_bias("heads.pre_logits", "pre_logits"),
    *weight_and_bias("heads.head", "head"),
]

PUBLISHED = PreprocessConfig(resize="short", resize_to=256, mean=IMAGENET_MEAN, std=IMAGENET_STD)
LARGE = (1024, 16), 242
"""Width and patch of vit_l_16, and the length of its short side before the crop, where the others have 256."""
SWAG_SIZES = (384, 512, 518)
"""Image sizes of weights fine-tuned by SWAG: resized to the crop size, bicubic."""


def normalize_name(name: str) -> str:
    for old, new in OLD_NAMES.items():
        name = name.replace(old, new)
    return name


def table(_: AnyConfig) -> RenameTable:
    return RenameTable("torchvision", RULES)


def detect(archive: Archive) -> str | None:
    names, end = archive.tensors, "conv_proj.weight"
    prefixes = [name.removesuffix(end) for name in names if name.endswith(end)]
    return next((p for p in prefixes if f"{p}{FIRST}self_attention.in_proj_weight" in names), None)


def infer_info(archive: Archive) -> ModelInfo:
    names, shape = archive.tensors, archive.shape
    for name in ("encoder.pos_embedding", f"{FIRST}mlp.0.weight"):
        if name not in names:
            raise FormatError(f"read as torchvision, the tensors do not fit: missing {name}.")
    width, channels, *patch = shape("conv_proj.weight")
    numbers = [re.match(r"encoder\.layers\.encoder_layer_(\d+)\.", name) for name in names]
    depth = 1 + max(int(m[1]) for m in numbers if m)
    mlp_dim = shape(f"{FIRST}mlp.0.weight")[0]
    hinted = archive.hints.get("num_heads")
    heads = hinted or infer_num_heads(width, mlp_dim)
    if heads is None:
        raise FormatError(
            "read as torchvision: the file does not store the number of heads, and it cannot be guessed for width "
            f"{width}; pass num_heads=..."
        )
    grid = _grid(shape("encoder.pos_embedding")[1], (patch[0], patch[1]), archive.hints.get("image_size"))
    config = ViTConfig(
        image_size=(grid[0] * patch[0], grid[1] * patch[1]),
        patch_size=(patch[0], patch[1]),
        channels=channels,
        width=width,
        depth=depth,
        num_heads=heads,
        mlp_dim=mlp_dim,
        num_classes=shape("heads.head.weight")[0] if "heads.head.weight" in names else 0,
        pre_logits=shape("heads.pre_logits.weight")[0] if "heads.pre_logits.weight" in names else 0,
        activation="gelu",
        norm_eps=1e-6,
        resample="torchvision",
    )
    preprocess, note = _preprocess(config)
    assumed = f"the file does not store the number of heads: {heads} are assumed, as in published models of this width."
    notes = [
        note,
        *([] if hinted else [assumed]),
        *(["the file does not store class names."] if config.num_classes else []),
    ]
    return ModelInfo(
        config=config,
        preprocess=preprocess,
        task="classify" if config.num_classes else "embed",
        origin=archive.source,
        notes=tuple(notes),
    )


def _grid(rows: int, patch: tuple[int, int], hinted: Pair | None) -> tuple[int, int]:
    """Rows and columns of patches: from the caller's image size if that fits, else square."""
    if hinted is not None:
        height, width = pair(hinted)
        grid = height // patch[0], width // patch[1]
        if math.prod(grid) == rows - 1:
            return grid
    side = math.isqrt(rows - 1)
    if side * side != rows - 1 or not side:
        raise FormatError(
            f"read as torchvision: encoder.pos_embedding has {rows} rows, which is not a square grid plus a class "
            "token; pass image_size=(height, width)."
        )
    return side, side


def _preprocess(config: ViTConfig) -> tuple[PreprocessConfig, str]:
    """The transforms of torchvision's published weights of this shape, and a note."""
    size, patch = pair(config.image_size), pair(config.patch_size)
    if size[0] in SWAG_SIZES and size[0] == size[1]:
        swag = PUBLISHED.replace(image_size=size, resize_to=size[0], interpolation="bicubic")
        note = f"the file does not store preprocessing: SWAG's at {size[0]} px is assumed."
        return preprocess_for_channels(swag, config.channels), note
    (width, side), short = LARGE
    default = PUBLISHED.replace(resize_to=short) if (config.width, patch[0]) == (width, side) else PUBLISHED
    note = (
        "the file does not store preprocessing: torchvision's default is assumed (SWAG's linear weights need bicubic "
        "interpolation, resized to the crop size)."
    )
    return preprocess_for_size(default, pair(config.image_size), config.channels), note


def unsupported_parts(info: ModelInfo) -> list[str]:
    config = info.config
    if not isinstance(config, ViTConfig):
        return [KINDS[type(config)]]
    patch = pair(config.patch_size)
    parts = {
        "a ResNet stem": config.stem is not None,
        f"{config.channels} channels (torchvision has 3)": config.channels != 3,
        f"a patch of {patch[0]}x{patch[1]}, which is not square": patch[0] != patch[1],
        "a network without a class token": not config.class_token,
        "sincos-2d positions": config.position == "sincos-2d",
        "a network without positions": config.position == "none",
        "a class token without a position": config.class_token and not config.position_on_class,
        "a network without a head": not config.num_classes,
    }
    return parts_beyond_original(config) + [name for name, present in parts.items() if present]


def inexact_conventions(info: ModelInfo) -> list[str]:
    """Values fixed in torchvision's code that differ, and what its files do not store."""
    config = info.config
    assert isinstance(config, ViTConfig)
    assumed = infer_num_heads(config.width, config.mlp_dim)
    parts = {
        GELU_NAMES.get(config.activation, ""): config.activation != "gelu",
        f"norm_eps={config.norm_eps}": config.norm_eps != 1e-6,
        f"num_heads={config.num_heads}": config.num_heads != assumed,
        UNCOVERED_BORDER: config.uncovered == "ignore",
    }
    return [name for name, present in parts.items() if present]


def write(path: Path, tensors: Mapping[str, Tensor], info: ModelInfo, overwrite: bool) -> None:
    """Write a state dict for `VisionTransformer(...).load_state_dict`."""
    write_torch(path, tensors, overwrite=overwrite)


TORCHVISION = Format(
    "torchvision", detect, infer_info, table, write, unsupported_parts, inexact_conventions, normalize_name
)
