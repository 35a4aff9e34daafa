"""BiT ResNets in Google's `.npz` files: the paper's and big_vision's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vitrail.config import BiTConfig, ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.family_defaults import default_preprocess
from vitrail.weights.format import Format
from vitrail.weights.google import EXTRA_TENSORS, ShapeReader, dense_rules, norm_rules, npz_writer
from vitrail.weights.model_info import ModelInfo
from vitrail.weights.renaming import FLATTEN, HWIO_TO_OIHW, AnyConfig, RenameTable, Rule, single_tensor

# C channels of the last feature map

DEFAULT_IMAGE_SIZE = 224
"""A convolutional network's file does not store an image size."""

UNIT, OUR_UNIT = "block{s1}/unit{u1:02d}/", "stages.{s}.{u}."
HEAD = single_tensor(lambda t: t.flatten(0, 2).mT, lambda t: t.mT[None, None])
"""Kernel of a 1x1 convolution (1 1 C num_classes) <-> weight of a linear layer (num_classes C)."""


def _paper_norm(theirs: str, ours: str) -> list[Rule]:
    return [Rule(f"{theirs}/gamma", f"{ours}.weight"), Rule(f"{theirs}/beta", f"{ours}.bias")]


def _paper_convolutions() -> Iterator[Rule]:
    """Rules for a unit's three convolutions and the norms before them."""
    for n, letter in enumerate("abc", start=1):
        yield from _paper_norm(f"{UNIT}{letter}/group_norm", f"{OUR_UNIT}norm{n}")
        yield Rule(f"{UNIT}{letter}/standardized_conv2d/kernel", f"{OUR_UNIT}conv{n}.weight", HWIO_TO_OIHW)


def _big_vision_convolutions() -> Iterator[Rule]:
    for n in (1, 2, 3):
        yield from norm_rules(f"{UNIT}gn{n}", f"{OUR_UNIT}norm{n}", FLATTEN)
        yield Rule(f"{UNIT}conv{n}/kernel", f"{OUR_UNIT}conv{n}.weight", HWIO_TO_OIHW)


@dataclass(frozen=True, kw_only=True)
class BiTNaming:
    """The names used by one code base, and `root_pad`, the one convention that differs."""

    name: str
    prefix: str
    """Prefix of every name when written."""
    root_pad: str
    """See BiTConfig."""
    head_rank: int
    """Number of dimensions of the head's kernel."""
    rules: Sequence[Rule]

    def their_name(self, ours: str) -> str:
        """The name of a tensor in this code base; for a tensor of every unit, that of the first unit."""
        return str(next(rule.theirs for rule in self.rules if rule.ours == ours)).format(s1=1, u1=1)


PAPER_RULES = [
    Rule("root_block/standardized_conv2d/kernel", "root.weight", HWIO_TO_OIHW),
    *_paper_convolutions(),
    Rule(f"{UNIT}a/proj/standardized_conv2d/kernel", f"{OUR_UNIT}project.weight", HWIO_TO_OIHW),
    *_paper_norm("group_norm", "norm"),
    Rule("head/conv2d/kernel", "head.weight", HEAD),
    Rule("head/conv2d/bias", "head.bias"),
]
BIG_VISION_RULES = [
    Rule("root_block/conv_root/kernel", "root.weight", HWIO_TO_OIHW),
    *_big_vision_convolutions(),
    Rule(f"{UNIT}conv_proj/kernel", f"{OUR_UNIT}project.weight", HWIO_TO_OIHW),
    *norm_rules("norm-pre-head", "norm", FLATTEN),
    *dense_rules("head", "head"),
]
PAPER_NAMING = BiTNaming(name="google", prefix="resnet/", root_pad="zero", head_rank=4, rules=PAPER_RULES)
BIG_VISION_NAMING = BiTNaming(name="big_vision", prefix="params/", root_pad="none", head_rank=2, rules=BIG_VISION_RULES)


def normalize_name(name: str) -> str:
    """Remove the number that some of the paper's files add to convolutions: standardized_conv2d_3."""
    return re.sub(r"/standardized_conv2d_\d+/", "/standardized_conv2d/", name)


def detect(naming: BiTNaming, archive: Archive) -> str | None:
    """The prefix of the names, the shortest that fits; optimizer moments, which have the same names, are ignored."""
    names = {normalize_name(name) for name in archive.tensors}
    root, second = naming.their_name("root.weight"), naming.their_name(f"{OUR_UNIT}norm1.weight")
    prefixes = [name.removesuffix(root) for name in names if name.endswith(root)]
    prefixes = [p for p in prefixes if p + second in names and (not p.startswith("opt") or p == "opt/target/")]
    return min(prefixes, key=len, default=None)


def infer_info(naming: BiTNaming, archive: Archive) -> ModelInfo:
    shapes = ShapeReader(archive, naming.name)
    *_, channels, base = shapes(naming.their_name("root.weight"), 4)
    head = naming.their_name("head.weight")
    options: dict[str, Any] = {
        "image_size": DEFAULT_IMAGE_SIZE,
        "channels": channels,
        "num_classes": shapes(head, naming.head_rank)[-1] if head in shapes else 0,
        "layers": shapes.stage_depths(),
        "width_factor": base / 64,
        "root_pad": naming.root_pad,
    }
    config = BiTConfig(**options)
    return ModelInfo(
        config=config,
        preprocess=default_preprocess("BiT", config),
        family="BiT",
        task="classify" if config.num_classes else "embed",
        origin=archive.source,
        notes=(f"the file does not store an image size: {DEFAULT_IMAGE_SIZE} is assumed; BiT accepts any size.",),
    )


def table(naming: BiTNaming, _: AnyConfig) -> RenameTable:
    return RenameTable(naming.name, naming.rules, EXTRA_TENSORS)


def unsupported_parts(info: ModelInfo) -> list[str]:
    return ["a Vision Transformer"] if isinstance(info.config, ViTConfig) else []


def inexact_conventions(naming: BiTNaming, info: ModelInfo) -> list[str]:
    """Values fixed in Google's code that differ from the config's."""
    config, default = info.config, BiTConfig()
    assert isinstance(config, BiTConfig)
    root_pad = config.root_pad
    parts = {
        f"norm_eps={config.norm_eps}": config.norm_eps != default.norm_eps,
        f"standardize_eps={config.standardize_eps}": config.standardize_eps != default.standardize_eps,
        f"root_pad={root_pad!r}": root_pad != naming.root_pad,
    }
    return [name for name, present in parts.items() if present]


def make_format(naming: BiTNaming) -> Format:
    return Format(
        name=naming.name,
        detect=partial(detect, naming),
        infer_info=partial(infer_info, naming),
        table=partial(table, naming),
        write=npz_writer(naming.prefix),
        unsupported_parts=unsupported_parts,
        inexact_conventions=partial(inexact_conventions, naming),
        ignored_outside=EXTRA_TENSORS,
        normalize_name=normalize_name,
        config_types=(BiTConfig,),
    )


BIT_GOOGLE = make_format(PAPER_NAMING)
BIT_BIG_VISION = make_format(BIG_VISION_NAMING)
FORMATS = (BIT_GOOGLE, BIT_BIG_VISION)
