"""Google's `.npz` files: the original ViT and AugReg, including hybrids, and big_vision.

The original code and big_vision give most tensors the same name. They differ in how the modules of a block are
numbered and in where position embeddings are stored; `ViTNaming` holds these differences, and each gives a rename
table. The class token has a position embedding in the original and none in big_vision.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.config import StemConfig, ViTConfig, pair
from vitrail.errors import FormatError
from vitrail.weights.archive import Archive
from vitrail.weights.family_defaults import default_preprocess
from vitrail.weights.format import KINDS, Format, Writer
from vitrail.weights.model_info import ModelInfo
from vitrail.weights.renaming import (
    CLASS_TOKEN,
    HWIO_TO_OIHW,
    IDENTITY,
    POSITION,
    POSITION_NAMES,
    TRANSPOSE,
    AnyConfig,
    RenameTable,
    Rule,
    Transform,
    as_vit,
    single_tensor,
)
from vitrail.weights.writers import write_npz

# D width, H heads, K = D // H, N patches

ORIGINAL_POSITION = "Transformer/posembed_input/pos_embedding"
EXTRA_TENSORS = ("opt/*", "opt_state/*", "chrono/*", "step", "params/txt/*", "txt/*", "params/t", "params/b", "t", "b")
"""Not part of the network: optimizer state, training progress, a text tower, and the logit scale and bias."""


@dataclass(frozen=True, kw_only=True)
class ViTNaming:
    """The names that differ between the original code and big_vision."""

    name: str
    family: str
    """A key of FAMILIES."""
    attention_index: int
    norm2_index: int
    mlp_index: int
    """Indices in the module names of a block's attention, second norm and MLP."""
    position_name: str
    is_tower: bool = False
    """Whether this is the image tower of an image-text model, under a prefix that ends in img/."""
    stacked: bool = False
    """Whether the tensors of all blocks are stacked along a first axis, as `nn.scan` stores them."""

    @property
    def is_original(self) -> bool:
        """Whether these are the names of the original code rather than big_vision's."""
        return self.position_name == ORIGINAL_POSITION

    @property
    def block(self) -> str:
        return "Transformer/encoderblock/" if self.stacked else "Transformer/encoderblock_{i}/"

    @property
    def first_block(self) -> str:
        return self.block.format(i=0)

    @property
    def first_query(self) -> str:
        """Name of the first block's query kernel, whose shape contains the number of heads."""
        return f"{self.first_block}MultiHeadDotProductAttention_{self.attention_index}/query/kernel"


ORIGINAL_NAMING = ViTNaming(
    name="google", family="ViT", attention_index=1, norm2_index=2, mlp_index=3, position_name=ORIGINAL_POSITION
)
BIG_VISION_NAMING = ViTNaming(
    name="big_vision", family="BV", attention_index=0, norm2_index=1, mlp_index=0, position_name="pos_embedding"
)
TOWER_NAMING = replace(BIG_VISION_NAMING, family="SigLIP", is_tower=True)

NEW_TO_OLD_INDICES = {
    "MultiHeadDotProductAttention_0/": "MultiHeadDotProductAttention_1/",
    "LayerNorm_1/": "LayerNorm_2/",
    "MlpBlock_0/": "MlpBlock_3/",
}
"""Older Flax versions number all modules of a block in one sequence; newer ones number each class separately."""


def normalize_original_name(name: str) -> str:
    """Names written by newer Flax versions -> those of the published files."""
    for new, old in NEW_TO_OLD_INDICES.items():
        name = re.sub(rf"^(Transformer/encoderblock_\d+/){new}", rf"\1{old}", name)
    return name


def normalize_big_vision_name(name: str) -> str:
    """Names from before 2022 (positions inside the encoder, attention pooling without a module) -> current names."""
    if name == "probe" or name.startswith(("MlpBlock_0/", "MultiHeadDotProductAttention_0/", "LayerNorm_0/")):
        return f"MAPHead_0/{name}"
    return "pos_embedding" if name == "Transformer/pos_embedding" else name


HEADS_KERNEL = Transform(
    lambda t, _: [torch.cat([k.flatten(1).mT for k in t])],
    lambda t, c: [k.mT.unflatten(1, (as_vit(c).num_heads, -1)) for k in t[0].split(as_vit(c).width)],
)
"""Query, key and value kernels (or some of them), each D H K <-> concatenated, each D D."""
HEADS_BIAS = Transform(
    lambda t, _: [torch.cat([b.flatten() for b in t])],
    lambda t, c: [b.unflatten(0, (as_vit(c).num_heads, -1)) for b in t[0].split(as_vit(c).width)],
)
OUT_KERNEL = Transform(
    lambda t, _: [t[0].flatten(0, 1).mT],
    lambda t, c: [t[0].mT.unflatten(0, (as_vit(c).num_heads, -1))],
)
"""H K D <-> D D."""
GROUP_NORM = single_tensor(lambda t: t.reshape(-1), lambda t: t)
"""C <- C, or 1 1 1 C as written by Flax before 0.3.6."""


def norm_rules(theirs: str, ours: str, via: Transform = IDENTITY) -> list[Rule]:
    return [Rule(f"{theirs}/scale", f"{ours}.weight", via), Rule(f"{theirs}/bias", f"{ours}.bias", via)]


def dense_rules(theirs: str, ours: str) -> list[Rule]:
    return [Rule(f"{theirs}/kernel", f"{ours}.weight", TRANSPOSE), Rule(f"{theirs}/bias", f"{ours}.bias")]


def qkv_rules(theirs: str, parts: Sequence[str], ours: str) -> list[Rule]:
    """Rules for query, key and value projections (or some of them), concatenated on our side."""
    return [
        Rule(tuple(f"{theirs}/{part}/kernel" for part in parts), f"{ours}.weight", HEADS_KERNEL),
        Rule(tuple(f"{theirs}/{part}/bias" for part in parts), f"{ours}.bias", HEADS_BIAS),
    ]


def out_rules(theirs: str, ours: str) -> list[Rule]:
    """Rules for an attention's output projection."""
    return [Rule(f"{theirs}/out/kernel", f"{ours}.weight", OUT_KERNEL), Rule(f"{theirs}/out/bias", f"{ours}.bias")]


ENDS = [
    Rule("embedding/kernel", "patch.weight", HWIO_TO_OIHW),
    Rule("embedding/bias", "patch.bias"),
    Rule("cls", "class_token", CLASS_TOKEN),
    *norm_rules("Transformer/encoder_norm", "norm"),
    *dense_rules("pre_logits", "pre_logits"),
    *dense_rules("head", "head"),
]
MAP = [
    Rule("MAPHead_0/probe", "pool.probe", CLASS_TOKEN),
    *qkv_rules("MAPHead_0/MultiHeadDotProductAttention_0", ["query"], "pool.q"),
    *qkv_rules("MAPHead_0/MultiHeadDotProductAttention_0", ["key", "value"], "pool.kv"),
    *out_rules("MAPHead_0/MultiHeadDotProductAttention_0", "pool.out"),
    *norm_rules("MAPHead_0/LayerNorm_0", "pool.norm"),
    *dense_rules("MAPHead_0/MlpBlock_0/Dense_0", "pool.mlp.up"),
    *dense_rules("MAPHead_0/MlpBlock_0/Dense_1", "pool.mlp.down"),
]
UNIT, OUR_UNIT = "block{s1}/unit{u1}/", "stem.stages.{s}.{u}."
STEM = [
    Rule("conv_root/kernel", "stem.root.conv.weight", HWIO_TO_OIHW),
    *norm_rules("gn_root", "stem.root.norm", GROUP_NORM),
    *(Rule(f"{UNIT}conv{n}/kernel", f"{OUR_UNIT}conv{n}.weight", HWIO_TO_OIHW) for n in (1, 2, 3)),
    *(rule for n in (1, 2, 3) for rule in norm_rules(f"{UNIT}gn{n}", f"{OUR_UNIT}norm{n}", GROUP_NORM)),
    Rule(f"{UNIT}conv_proj/kernel", f"{OUR_UNIT}project.conv.weight", HWIO_TO_OIHW),
    *norm_rules(f"{UNIT}gn_proj", f"{OUR_UNIT}project.norm", GROUP_NORM),
]


def block_rules(naming: ViTNaming) -> list[Rule]:
    attention = f"{naming.block}MultiHeadDotProductAttention_{naming.attention_index}"
    return [
        *norm_rules(f"{naming.block}LayerNorm_0", "blocks.{i}.norm1"),
        *qkv_rules(attention, ["query", "key", "value"], "blocks.{i}.attention.qkv"),
        *out_rules(attention, "blocks.{i}.attention.out"),
        *norm_rules(f"{naming.block}LayerNorm_{naming.norm2_index}", "blocks.{i}.norm2"),
        *dense_rules(f"{naming.block}MlpBlock_{naming.mlp_index}/Dense_0", "blocks.{i}.mlp.up"),
        *dense_rules(f"{naming.block}MlpBlock_{naming.mlp_index}/Dense_1", "blocks.{i}.mlp.down"),
    ]


def stack_blocks(rule: Rule, depth: int) -> Rule:
    """A rule for one block -> a rule for all blocks, stacked along a first axis on their side."""

    def read(tensors: Sequence[Tensor], config: AnyConfig) -> list[Tensor]:
        return [rule.transform.read(layer, config)[0] for layer in zip(*tensors, strict=True)]

    def write(tensors: Sequence[Tensor], config: AnyConfig) -> list[Tensor]:
        layers = [rule.transform.write([t], config) for t in tensors]
        return [torch.stack(parts) for parts in zip(*layers, strict=True)]

    return Rule(rule.theirs, tuple(str(rule.ours).format(i=i) for i in range(depth)), Transform(read, write))


def table(naming: ViTNaming, config: AnyConfig) -> RenameTable:
    rules = block_rules(naming)
    if naming.stacked:
        rules = [stack_blocks(rule, as_vit(config).depth) for rule in rules]
    position = Rule(naming.position_name, POSITION_NAMES, POSITION)
    return RenameTable(naming.name, [*ENDS, position, *(STEM if naming.is_original else MAP), *rules], EXTRA_TENSORS)


def detect(naming: ViTNaming, archive: Archive) -> str | None:
    """The prefix of the names, the shortest that fits; optimizer moments, which have the same names, are ignored."""
    names, prefixes = archive.tensors, []
    old = f"{naming.first_block}MultiHeadDotProductAttention_1/query/kernel"
    new = f"{naming.first_block}MultiHeadDotProductAttention_0/query/kernel"
    for name in names:
        ending = next((e for e in (old, new) if name.endswith(e)), None)
        prefix = name.removesuffix(ending) if ending else ""
        kernel = f"{prefix}embedding/kernel"
        if ending is None or kernel not in names or len(archive.shape(kernel)) != 4:
            continue
        # Newer Flax numbers both alike; only the original has its position embedding in a module of its own.
        original = ending == old or f"{prefix}{ORIGINAL_POSITION}" in names
        moments = prefix.startswith("opt") and prefix != "opt/target/"
        if original == naming.is_original and prefix.endswith("img/") == naming.is_tower and not moments:
            prefixes.append(prefix)
    return min(prefixes, key=len, default=None)


class ShapeReader:
    """Shapes of an archive by name; raises FormatError for a missing tensor or another rank."""

    def __init__(self, archive: Archive, format_name: str) -> None:
        self.archive, self.format_name = archive, format_name

    def __contains__(self, name: str) -> bool:
        return name in self.archive.tensors

    def __call__(self, name: str, rank: int) -> tuple[int, ...]:
        if name not in self:
            raise FormatError(f"read as {self.format_name}, the tensors do not fit: missing {name}.")
        shape = self.archive.shape(name)
        if len(shape) != rank:
            raise FormatError(f"read as {self.format_name}: {name} has shape {shape}, expected {rank} dimensions.")
        return shape

    def stage_depths(self) -> tuple[int, ...]:
        """Number of units in each stage of a ResNet."""
        matches = [re.match(r"block(\d+)/unit(\d+)/", name) for name in self.archive.tensors]
        units = {(int(m[1]), int(m[2])) for m in matches if m}
        stages = max((s for s, _ in units), default=0)
        return tuple(sum(s == stage for s, _ in units) for stage in range(1, stages + 1))


def infer_info(naming: ViTNaming, archive: Archive) -> ModelInfo:
    shapes = ShapeReader(archive, naming.name)
    options = _encoder(naming, shapes) | _ends(naming, shapes)
    position, notes = _position(naming, shapes, options)
    config = ViTConfig(**options | position)
    if config.num_classes and is_zero(archive, "head"):
        notes.append(
            "all weights of the head are zero, as in some published ImageNet-21k files: predictions are meaningless."
        )
    return ModelInfo(
        config=config,
        preprocess=default_preprocess(naming.family, config),
        family=naming.family,
        task="classify" if config.num_classes and not naming.is_tower else "embed",
        origin=archive.source,
        notes=tuple(notes),
    )


def _encoder(naming: ViTNaming, shapes: ShapeReader) -> dict[str, Any]:
    *stack, width, heads, _ = shapes(naming.first_query, 3 + naming.stacked)
    numbers = [re.match(r"Transformer/encoderblock_(\d+)/", name) for name in shapes.archive.tensors]
    return {
        "width": width,
        "num_heads": heads,
        "depth": stack[0] if stack else 1 + max(int(m[1]) for m in numbers if m),
        "mlp_dim": shapes(f"{naming.first_block}MlpBlock_{naming.mlp_index}/Dense_0/kernel", 2 + naming.stacked)[-1],
        "activation": "gelu-tanh",
        "norm_eps": 1e-6,
        "resample": "google",
    }


def _ends(naming: ViTNaming, shapes: ShapeReader) -> dict[str, Any]:
    """Options for stem, patches, pooling and head."""
    *patch, channels, _ = shapes("embedding/kernel", 4)
    stem, token = None, "cls" in shapes
    if naming.is_original and "conv_root/kernel" in shapes:
        *_, channels, base = shapes("conv_root/kernel", 4)
        stem = StemConfig(layers=shapes.stage_depths(), width_factor=base / 64)  # defaults: the original's conventions
    return {
        "patch_size": tuple(patch),
        "stem": stem,
        "channels": channels,
        "class_token": token,
        "pool": "map" if "MAPHead_0/probe" in shapes else "token" if token else "gap",
        "pre_logits": shapes("pre_logits/kernel", 2)[1] if "pre_logits/kernel" in shapes else 0,
        "num_classes": shapes("head/kernel", 2)[1] if "head/kernel" in shapes else 0,
    }


def _position(naming: ViTNaming, shapes: ShapeReader, options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Options for position embedding and image size, and notes on what was assumed."""
    stride = options["stem"].stride if options["stem"] else 1
    sides = [side * stride for side in options["patch_size"]]  # pixels of the image covered by one patch
    hinted = shapes.archive.hints.get("image_size")
    if naming.position_name not in shapes:
        size = pair(hinted) if hinted else tuple(max(round(224 / side), 1) * side for side in sides)
        note = f"the file stores no position embedding and therefore no image size: {size[0]}x{size[1]} is assumed."
        values = {"position": "none" if naming.is_original else "sincos-2d", "image_size": size}
        return values, [] if hinted else [note]
    rows, token = shapes(naming.position_name, 3)[1], options["class_token"]
    for placed in (0,) if not token else (1,) if naming.is_original else (1, 0):
        # Without a class token the field has no effect and keeps its default.
        class_position = {"position_on_class": bool(placed)} if token else {}
        if hinted and math.prod(-(-i // s) for i, s in zip(pair(hinted), sides, strict=True)) == rows - placed:
            return {"image_size": pair(hinted), **class_position}, []
        side = math.isqrt(max(rows - placed, 0))
        if side and side * side == rows - placed:
            return {"image_size": tuple(side * s for s in sides), **class_position}, []
    raise FormatError(
        f"read as {naming.name}: {naming.position_name} has {rows} rows, which is not a square grid"
        f"{' plus a class token' if token else ''}, and the file does not store the shape of other grids; "
        "pass image_size=(height, width)."
    )


def is_zero(archive: Archive, layer: str) -> bool:
    """Whether a layer is all zeros. The bias is checked first: the kernel of an ImageNet-21k head is large."""
    names = [name for name in (f"{layer}/bias", f"{layer}/kernel") if name in archive.tensors]
    return not any(bool(archive.tensors[name].any()) for name in names)


def parts_beyond_original(config: ViTConfig) -> list[str]:
    """Descriptions of the parts of a network that the original ViT does not have."""
    grid, learned = config.grid, config.position == "learned-1d"
    parts = {
        "registers": config.num_registers > 0,
        "keys without bias": config.qkv_bias and not config.key_bias,
        "LayerScale": config.layer_scale is not None,
        "a distillation token": config.distilled,
        "qk-norm": config.qk_norm,
        "RMSNorm": config.norm == "rms",
        "SwiGLU": config.activation == "swiglu",
        "a norm before the first block": config.pre_norm,
        "a patch projection without bias": not config.patch_bias,
        "query, key and value projections without bias": not config.qkv_bias,
        "attention and MLP outputs without bias": not config.proj_bias,
        "a head without bias": config.num_classes > 0 and not config.head_bias,
        f"{config.position} positions": config.position in ("learned-2d", "relative", "rope-2d"),
        "position embeddings added at every layer": (learned or config.position == "sincos-2d")
        and config.resolved_position_at != "stem",
        f"a grid of {grid[0]}x{grid[1]} patches, which is not square": learned and grid[0] != grid[1],
        # for one token, norm and pooling commute
        "a norm after pooling": config.pool_norm == "after" and config.pool != "token",
        "a network without a final norm": config.pool_norm == "none",
        f"pool={config.pool!r}": config.pool in ("token+gap", "coca"),
        f"a class token beside pool={config.pool!r}": config.class_token and config.pool in ("gap", "map"),
    }
    return [name for name, present in parts.items() if present]


def unsupported_parts(naming: ViTNaming, info: ModelInfo) -> list[str]:
    config = info.config
    if not isinstance(config, ViTConfig):
        return [KINDS[type(config)]]
    learned = config.class_token and config.position == "learned-1d"
    parts = {
        "sincos-2d positions": naming.is_original and config.position == "sincos-2d",
        "pool='map'": naming.is_original and config.pool == "map",
        "a class token without a position": naming.is_original and learned and not config.position_on_class,
        "a ResNet stem": not naming.is_original and config.stem is not None,
        "a network without positions": not naming.is_original and config.position == "none",
        "a class token with a position": not naming.is_original and learned and config.position_on_class,
    }
    return parts_beyond_original(config) + [name for name, present in parts.items() if present]


GELU_NAMES = {"gelu": "the exact GELU", "gelu-tanh": "the tanh form of GELU", "gelu-quick": "QuickGELU"}
UNCOVERED_BORDER = "an image whose border is not covered by patches"


def inexact_conventions(info: ModelInfo) -> list[str]:
    """Values fixed in Google's code that differ from the config's."""
    config, default = as_vit(info.config), StemConfig()
    stem = config.stem or default
    parts = {
        GELU_NAMES.get(config.activation, ""): config.activation != "gelu-tanh",
        f"norm_eps={config.norm_eps}": config.norm_eps != 1e-6,
        UNCOVERED_BORDER: config.uncovered == "ignore",
        f"the stem's norm_eps={stem.norm_eps}": stem.norm_eps != default.norm_eps,
        "the weight standardization of the stem": (stem.standardize, stem.standardize_eps)
        != (default.standardize, default.standardize_eps),
    }
    return [name for name, present in parts.items() if present]


def npz_writer(prefix: str) -> Writer:
    def write(path: Path, tensors: Mapping[str, Tensor], info: ModelInfo, overwrite: bool) -> list[str]:
        """Write one .npz file with arrays in C order, as in the published files."""
        return write_npz(path, {prefix + name: t.contiguous() for name, t in tensors.items()}, overwrite=overwrite)

    return write


def make_format(naming: ViTNaming, normalize_name: Callable[[str], str], write: Writer | None = None) -> Format:
    return Format(
        name=naming.name,
        detect=partial(detect, naming),
        infer_info=partial(infer_info, naming),
        table=partial(table, naming),
        write=write,
        unsupported_parts=partial(unsupported_parts, naming),
        inexact_conventions=inexact_conventions,
        ignored_outside=EXTRA_TENSORS,
        normalize_name=normalize_name,
        config_types=(ViTConfig,),
    )


GOOGLE = make_format(ORIGINAL_NAMING, normalize_original_name, npz_writer(""))
BIG_VISION = make_format(BIG_VISION_NAMING, normalize_big_vision_name, npz_writer("params/"))
BIG_VISION_SCAN = make_format(replace(BIG_VISION_NAMING, stacked=True), normalize_big_vision_name)
BIG_VISION_TOWER = make_format(TOWER_NAMING, normalize_big_vision_name)
BIG_VISION_TOWER_SCAN = make_format(replace(TOWER_NAMING, stacked=True), normalize_big_vision_name)
FORMATS = (GOOGLE, BIG_VISION, BIG_VISION_SCAN, BIG_VISION_TOWER, BIG_VISION_TOWER_SCAN)
"""The first two can be written. The others are read only: stacked blocks (`nn.scan`) and SigLIP's image tower."""
