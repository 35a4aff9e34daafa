"""Google's `.npz` files: the original ViT and augreg, hybrids included, and big_vision.

The original code and big_vision give most tensors the same name. They differ in how the parts of a
block are numbered and in where the positions stand; `Naming` holds that, and a table is made from
each. They also differ in the class token, which has a position in the original and none in
big_vision.
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

from vitrail.config import BiTConfig, StemConfig, ViTConfig, pair
from vitrail.errors import FormatError
from vitrail.weights.archive import Archive
from vitrail.weights.format import Format, Writer
from vitrail.weights.model_info import ModelInfo, default_preprocess
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

POSEMBED = "Transformer/posembed_input/pos_embedding"
OUTSIDE = ("opt/*", "opt_state/*", "chrono/*", "step", "params/txt/*", "txt/*", "params/t", "params/b", "t", "b")
"""Not the network: an optimizer, a clock, a text tower and the temperature it is compared at."""


@dataclass(frozen=True, kw_only=True)
class Naming:
    """What tells the writers of these files apart."""

    name: str
    family: str
    """A key of FAMILIES."""
    attention: int
    norm: int
    mlp: int
    """Numbers of a block's attention, second norm and MLP."""
    position: str
    tower: bool = False
    """The image tower of a file with two, under a prefix that ends in img/."""
    stacked: bool = False
    """All blocks in one tensor, one above the other, as a scan over them wants it."""

    @property
    def original(self) -> bool:
        """The original code, not big_vision."""
        return self.position == POSEMBED

    @property
    def block(self) -> str:
        return "Transformer/encoderblock/" if self.stacked else "Transformer/encoderblock_{i}/"

    @property
    def first(self) -> str:
        return self.block.format(i=0)

    @property
    def query(self) -> str:
        """The first block's, whose shape tells the heads."""
        return f"{self.first}MultiHeadDotProductAttention_{self.attention}/query/kernel"


ORIGINAL = Naming(name="google", family="ViT", attention=1, norm=2, mlp=3, position=POSEMBED)
BIG = Naming(name="big_vision", family="BV", attention=0, norm=1, mlp=0, position="pos_embedding")
TOWER = replace(BIG, family="SigLIP", tower=True)

RENUMBERED = {
    "MultiHeadDotProductAttention_0/": "MultiHeadDotProductAttention_1/",
    "LayerNorm_1/": "LayerNorm_2/",
    "MlpBlock_0/": "MlpBlock_3/",
}
"""Flax once numbered the parts of a block in turn; now it numbers each kind by itself."""


def original_spelling(name: str) -> str:
    """The published files' names for what today's Flax writes."""
    for new, old in RENUMBERED.items():
        name = re.sub(rf"^(Transformer/encoderblock_\d+/){new}", rf"\1{old}", name)
    return name


def big_vision_spelling(name: str) -> str:
    """Today's names for those of before 2022: positions inside the encoder, an attention pool without a module."""
    if name == "probe" or name.startswith(("MlpBlock_0/", "MultiHeadDotProductAttention_0/", "LayerNorm_0/")):
        return f"MAPHead_0/{name}"
    return "pos_embedding" if name == "Transformer/pos_embedding" else name


HEADS_KERNEL = Transform(
    lambda t, _: [torch.cat([k.flatten(1).mT for k in t])],
    lambda t, c: [k.mT.unflatten(1, (as_vit(c).num_heads, -1)) for k in t[0].split(as_vit(c).width)],
)
"""D H K for each of query, key and value that is there <-> one above the other, each D D."""
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
"""C; Flax before 0.3.6 wrote 1 1 1 C."""


def norm(theirs: str, ours: str, via: Transform = IDENTITY) -> list[Rule]:
    return [Rule(f"{theirs}/scale", f"{ours}.weight", via), Rule(f"{theirs}/bias", f"{ours}.bias", via)]


def dense(theirs: str, ours: str) -> list[Rule]:
    return [Rule(f"{theirs}/kernel", f"{ours}.weight", TRANSPOSE), Rule(f"{theirs}/bias", f"{ours}.bias")]


def asking(theirs: str, parts: Sequence[str], ours: str) -> list[Rule]:
    """Some of an attention's query, key and value."""
    return [
        Rule(tuple(f"{theirs}/{part}/kernel" for part in parts), f"{ours}.weight", HEADS_KERNEL),
        Rule(tuple(f"{theirs}/{part}/bias" for part in parts), f"{ours}.bias", HEADS_BIAS),
    ]


def answer(theirs: str, ours: str) -> list[Rule]:
    """An attention's output."""
    return [Rule(f"{theirs}/out/kernel", f"{ours}.weight", OUT_KERNEL), Rule(f"{theirs}/out/bias", f"{ours}.bias")]


ENDS = [
    Rule("embedding/kernel", "patch.weight", HWIO_TO_OIHW),
    Rule("embedding/bias", "patch.bias"),
    Rule("cls", "class_token", CLASS_TOKEN),
    *norm("Transformer/encoder_norm", "norm"),
    *dense("pre_logits", "pre_logits"),
    *dense("head", "head"),
]
MAP = [
    Rule("MAPHead_0/probe", "pool.probe", CLASS_TOKEN),
    *asking("MAPHead_0/MultiHeadDotProductAttention_0", ["query"], "pool.q"),
    *asking("MAPHead_0/MultiHeadDotProductAttention_0", ["key", "value"], "pool.kv"),
    *answer("MAPHead_0/MultiHeadDotProductAttention_0", "pool.out"),
    *norm("MAPHead_0/LayerNorm_0", "pool.norm"),
    *dense("MAPHead_0/MlpBlock_0/Dense_0", "pool.mlp.up"),
    *dense("MAPHead_0/MlpBlock_0/Dense_1", "pool.mlp.down"),
]
UNIT, OUR_UNIT = "block{s1}/unit{u1}/", "stem.stages.{s}.{u}."
STEM = [
    Rule("conv_root/kernel", "stem.root.conv.weight", HWIO_TO_OIHW),
    *norm("gn_root", "stem.root.norm", GROUP_NORM),
    *(Rule(f"{UNIT}conv{n}/kernel", f"{OUR_UNIT}conv{n}.weight", HWIO_TO_OIHW) for n in (1, 2, 3)),
    *(rule for n in (1, 2, 3) for rule in norm(f"{UNIT}gn{n}", f"{OUR_UNIT}norm{n}", GROUP_NORM)),
    Rule(f"{UNIT}conv_proj/kernel", f"{OUR_UNIT}project.conv.weight", HWIO_TO_OIHW),
    *norm(f"{UNIT}gn_proj", f"{OUR_UNIT}project.norm", GROUP_NORM),
]


def blocks(naming: Naming) -> list[Rule]:
    attention = f"{naming.block}MultiHeadDotProductAttention_{naming.attention}"
    return [
        *norm(f"{naming.block}LayerNorm_0", "blocks.{i}.norm1"),
        *asking(attention, ["query", "key", "value"], "blocks.{i}.attention.qkv"),
        *answer(attention, "blocks.{i}.attention.out"),
        *norm(f"{naming.block}LayerNorm_{naming.norm}", "blocks.{i}.norm2"),
        *dense(f"{naming.block}MlpBlock_{naming.mlp}/Dense_0", "blocks.{i}.mlp.up"),
        *dense(f"{naming.block}MlpBlock_{naming.mlp}/Dense_1", "blocks.{i}.mlp.down"),
    ]


def stacked(rule: Rule, depth: int) -> Rule:
    """A rule for one block -> a rule for all of them, stacked along a first axis on their side."""

    def read(tensors: Sequence[Tensor], config: AnyConfig) -> list[Tensor]:
        return [rule.transform.read(layer, config)[0] for layer in zip(*tensors, strict=True)]

    def write(tensors: Sequence[Tensor], config: AnyConfig) -> list[Tensor]:
        layers = [rule.transform.write([t], config) for t in tensors]
        return [torch.stack(parts) for parts in zip(*layers, strict=True)]

    return Rule(rule.theirs, tuple(str(rule.ours).format(i=i) for i in range(depth)), Transform(read, write))


def table(naming: Naming, config: AnyConfig) -> RenameTable:
    rules = blocks(naming)
    if naming.stacked:
        rules = [stacked(rule, as_vit(config).depth) for rule in rules]
    position = Rule(naming.position, POSITION_NAMES, POSITION)
    return RenameTable(naming.name, [*ENDS, position, *(STEM if naming.original else MAP), *rules], OUTSIDE)


def recognize(naming: Naming, archive: Archive) -> str | None:
    """The shortest prefix that fits; an optimizer's moments look like networks and are passed over."""
    names, found = archive.tensors, []
    old = f"{naming.first}MultiHeadDotProductAttention_1/query/kernel"
    new = f"{naming.first}MultiHeadDotProductAttention_0/query/kernel"
    for name in names:
        ending = next((e for e in (old, new) if name.endswith(e)), None)
        prefix = name.removesuffix(ending) if ending else ""
        kernel = f"{prefix}embedding/kernel"
        if ending is None or kernel not in names or len(archive.shape(kernel)) != 4:
            continue
        # Both number alike today; the original has its positions in a module of their own.
        original = ending == old or f"{prefix}{POSEMBED}" in names
        moments = prefix.startswith("opt") and prefix != "opt/target/"
        if original == naming.original and prefix.endswith("img/") == naming.tower and not moments:
            found.append(prefix)
    return min(found, key=len, default=None)


class Shapes:
    """Shapes by name, with an error that says what is missing or has another rank."""

    def __init__(self, archive: Archive, read_as: str) -> None:
        self.archive, self.read_as = archive, read_as

    def __contains__(self, name: str) -> bool:
        return name in self.archive.tensors

    def __call__(self, name: str, rank: int) -> tuple[int, ...]:
        if name not in self:
            raise FormatError(f"read as {self.read_as}, the tensors do not fit: missing {name}.")
        shape = self.archive.shape(name)
        if len(shape) != rank:
            raise FormatError(f"read as {self.read_as}: {name} has shape {shape}, wanted {rank} dimensions.")
        return shape

    def units(self) -> tuple[int, ...]:
        """How many units each stage of a ResNet has."""
        found = [re.match(r"block(\d+)/unit(\d+)/", name) for name in self.archive.tensors]
        units = {(int(m[1]), int(m[2])) for m in found if m}
        stages = max((s for s, _ in units), default=0)
        return tuple(sum(s == stage for s, _ in units) for stage in range(1, stages + 1))


def describe(naming: Naming, archive: Archive) -> ModelInfo:
    shapes = Shapes(archive, naming.name)
    options = _encoder(naming, shapes) | _ends(naming, shapes)
    position, notes = _position(naming, shapes, options)
    config = ViTConfig(**options | position)
    if config.num_classes and is_zero(archive, "head"):
        notes.append("the head is zero, as in some published ImageNet-21k files: its classes mean nothing.")
    return ModelInfo(
        config=config,
        preprocess=default_preprocess(naming.family, config),
        family=naming.family,
        task="classify" if config.num_classes and not naming.tower else "embed",
        origin=archive.source,
        notes=tuple(notes),
    )


def _encoder(naming: Naming, shapes: Shapes) -> dict[str, Any]:
    *stack, width, heads, _ = shapes(naming.query, 3 + naming.stacked)
    numbers = [re.match(r"Transformer/encoderblock_(\d+)/", name) for name in shapes.archive.tensors]
    return {
        "width": width,
        "num_heads": heads,
        "depth": stack[0] if stack else 1 + max(int(m[1]) for m in numbers if m),
        "mlp_dim": shapes(f"{naming.first}MlpBlock_{naming.mlp}/Dense_0/kernel", 2 + naming.stacked)[-1],
        "activation": "gelu-tanh",
        "norm_eps": 1e-6,
        "resample": "google",
    }


def _ends(naming: Naming, shapes: Shapes) -> dict[str, Any]:
    """Stem, patches, pooling, head."""
    *patch, channels, _ = shapes("embedding/kernel", 4)
    stem, token = None, "cls" in shapes
    if naming.original and "conv_root/kernel" in shapes:
        *_, channels, base = shapes("conv_root/kernel", 4)
        stem = StemConfig(layers=shapes.units(), width_factor=base / 64)  # its defaults are the original's conventions
    return {
        "patch_size": tuple(patch),
        "stem": stem,
        "channels": channels,
        "class_token": token,
        "pool": "map" if "MAPHead_0/probe" in shapes else "token" if token else "gap",
        "pre_logits": shapes("pre_logits/kernel", 2)[1] if "pre_logits/kernel" in shapes else 0,
        "num_classes": shapes("head/kernel", 2)[1] if "head/kernel" in shapes else 0,
    }


def _position(naming: Naming, shapes: Shapes, options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Kind of position and image size, and what was assumed about them."""
    stride = options["stem"].stride if options["stem"] else 1
    sides = [side * stride for side in options["patch_size"]]  # pixels of the image under one patch
    told = shapes.archive.hints.get("image_size")
    if naming.position not in shapes:
        image = pair(told) if told else tuple(max(round(224 / side), 1) * side for side in sides)
        note = f"no positions are stored, so neither is the image's size: {image[0]}x{image[1]} assumed."
        return {"position": "none" if naming.original else "sincos-2d", "image_size": image}, [] if told else [note]
    rows, token = shapes(naming.position, 3)[1], options["class_token"]
    for placed in (0,) if not token else (1,) if naming.original else (1, 0):
        # Without a class token there is nothing to place: the field keeps its default.
        on_class = {"position_on_class": bool(placed)} if token else {}
        if told and math.prod(-(-i // s) for i, s in zip(pair(told), sides, strict=True)) == rows - placed:
            return {"image_size": pair(told), **on_class}, []
        side = math.isqrt(max(rows - placed, 0))
        if side and side * side == rows - placed:
            return {"image_size": tuple(side * s for s in sides), **on_class}, []
    raise FormatError(
        f"read as {naming.name}: {naming.position} has {rows} rows, which are no square grid"
        f"{' and a class token' if token else ''}; the file does not keep the shape of any other: "
        "pass image_size=(height, width)."
    )


def is_zero(archive: Archive, layer: str) -> bool:
    """Whether a layer is all zeros; the bias first, since the kernel of an ImageNet-21k head is large."""
    names = [name for name in (f"{layer}/bias", f"{layer}/kernel") if name in archive.tensors]
    return not any(bool(archive.tensors[name].any()) for name in names)


def beyond_original(config: ViTConfig) -> list[str]:
    """Parts of a network that the original ViT does not have, by name."""
    grid, learned = config.grid, config.position == "learned-1d"
    parts = {
        "registers": config.num_registers > 0,
        "LayerScale": config.layer_scale is not None,
        "a distillation token": config.distilled,
        "qk-norm": config.qk_norm,
        "RMSNorm": config.norm == "rms",
        "SwiGLU": config.activation == "swiglu",
        "a norm before the first block": config.pre_norm,
        "a patch projection without bias": not config.patch_bias,
        "queries, keys and values without bias": not config.qkv_bias,
        "attention and MLP outputs without bias": not config.proj_bias,
        "a head without bias": config.num_classes > 0 and not config.head_bias,
        f"{config.position} positions": config.position in ("learned-2d", "relative", "rope-2d"),
        "positions at every layer": (learned or config.position == "sincos-2d")
        and config.resolved_position_at != "stem",
        f"a grid of {grid[0]}x{grid[1]} patches, which is not square": learned and grid[0] != grid[1],
        "a norm after pooling": config.pool_norm == "after" and config.pool != "token",  # a token's is the same
        "a network without a final norm": config.pool_norm == "none",
        f"pool={config.pool!r}": config.pool in ("token+gap", "coca"),
        f"a class token beside pool={config.pool!r}": config.class_token and config.pool in ("gap", "map"),
    }
    return [name for name, there in parts.items() if there]


def cannot(naming: Naming, info: ModelInfo) -> list[str]:
    config = info.config
    if isinstance(config, BiTConfig):
        return ["a BiT ResNet"]
    learned = config.class_token and config.position == "learned-1d"
    parts = {
        "sincos-2d positions": naming.original and config.position == "sincos-2d",
        "pool='map'": naming.original and config.pool == "map",
        "a class token without a position": naming.original and learned and not config.position_on_class,
        "a ResNet stem": not naming.original and config.stem is not None,
        "a network without positions": not naming.original and config.position == "none",
        "a class token with a position": not naming.original and learned and config.position_on_class,
    }
    return beyond_original(config) + [name for name, there in parts.items() if there]


GELUS = {"gelu": "the exact GELU", "gelu-tanh": "the tanh form of GELU", "gelu-quick": "QuickGELU"}


EDGE = "that an image's edge is left out"


def drift(info: ModelInfo) -> list[str]:
    """What the code that reads these files has fixed."""
    config, usual = as_vit(info.config), StemConfig()
    stem = config.stem or usual
    parts = {
        GELUS.get(config.activation, ""): config.activation != "gelu-tanh",
        f"norm_eps={config.norm_eps}": config.norm_eps != 1e-6,
        EDGE: config.uncovered == "ignore",
        f"the stem's norm_eps={stem.norm_eps}": stem.norm_eps != usual.norm_eps,
        "how the stem standardizes its kernels": (stem.standardize, stem.standardize_eps)
        != (usual.standardize, usual.standardize_eps),
    }
    return [name for name, there in parts.items() if there]


def writer(prefix: str) -> Writer:
    def write(path: Path, tensors: Mapping[str, Tensor], info: ModelInfo, overwrite: bool) -> list[str]:
        """One .npz, in C order as the originals' arrays are."""
        return write_npz(path, {prefix + name: t.contiguous() for name, t in tensors.items()}, overwrite=overwrite)

    return write


def format_of(naming: Naming, spelling: Callable[[str], str], write: Writer | None = None) -> Format:
    return Format(
        name=naming.name,
        detect=partial(recognize, naming),
        infer_info=partial(describe, naming),
        table=partial(table, naming),
        write=write,
        unsupported_parts=partial(cannot, naming),
        inexact_conventions=drift,
        ignored_outside=OUTSIDE,
        normalize_name=spelling,
    )


GOOGLE = format_of(ORIGINAL, original_spelling, writer(""))
BIG_VISION = format_of(BIG, big_vision_spelling, writer("params/"))
BIG_VISION_SCAN = format_of(replace(BIG, stacked=True), big_vision_spelling)
BIG_VISION_TOWER = format_of(TOWER, big_vision_spelling)
BIG_VISION_TOWER_SCAN = format_of(replace(TOWER, stacked=True), big_vision_spelling)
FORMATS = (GOOGLE, BIG_VISION, BIG_VISION_SCAN, BIG_VISION_TOWER, BIG_VISION_TOWER_SCAN)
"""Those after the first two are only read: blocks stacked by a scan, and SigLIP's image tower."""
