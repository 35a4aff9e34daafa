"""BiT's ResNets as Google stores them: the paper's `.npz` files, and big_vision's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vitrail.config import BiTConfig, ViTConfig
from vitrail.weights.archive import Archive
from vitrail.weights.format import Format
from vitrail.weights.google import OUTSIDE, Shapes, dense, norm, writer
from vitrail.weights.model_info import ModelInfo, default_preprocess
from vitrail.weights.renaming import FLATTEN, HWIO_TO_OIHW, AnyConfig, RenameTable, Rule, single_tensor

# C channels of the last map

ASSUMED = 224
"""A file of convolutions does not say how large its images were."""

UNIT, OUR_UNIT = "block{s1}/unit{u1:02d}/", "stages.{s}.{u}."
HEAD = single_tensor(lambda t: t.flatten(0, 2).mT, lambda t: t.mT[None, None])
"""1 1 C classes, a convolution <-> a matrix."""


def _paper_norm(theirs: str, ours: str) -> list[Rule]:
    return [Rule(f"{theirs}/gamma", f"{ours}.weight"), Rule(f"{theirs}/beta", f"{ours}.bias")]


def _paper_step(letter: str, n: int) -> list[Rule]:
    """One of a unit's three norms and the convolution after it."""
    kernel = Rule(f"{UNIT}{letter}/standardized_conv2d/kernel", f"{OUR_UNIT}conv{n}.weight", HWIO_TO_OIHW)
    return [*_paper_norm(f"{UNIT}{letter}/group_norm", f"{OUR_UNIT}norm{n}"), kernel]


def _big_vision_step(n: int) -> list[Rule]:
    kernel = Rule(f"{UNIT}conv{n}/kernel", f"{OUR_UNIT}conv{n}.weight", HWIO_TO_OIHW)
    return [*norm(f"{UNIT}gn{n}", f"{OUR_UNIT}norm{n}", FLATTEN), kernel]


@dataclass(frozen=True, kw_only=True)
class Naming:
    """The names of one code base, and the one thing it computes differently."""

    name: str
    prefix: str
    """Stands before every name."""
    root: str
    marks: str
    """With `root`, tells this naming."""
    head: str
    rank: int
    """Dimensions of the head's kernel."""
    root_pad: str
    """See BiTConfig."""
    rules: Sequence[Rule]


PAPER = Naming(
    name="google",
    prefix="resnet/",
    root="root_block/standardized_conv2d/kernel",
    marks="block1/unit01/a/group_norm/gamma",
    head="head/conv2d/kernel",
    rank=4,
    root_pad="zero",
    rules=[
        Rule("root_block/standardized_conv2d/kernel", "root.weight", HWIO_TO_OIHW),
        *_paper_step("a", 1),
        *_paper_step("b", 2),
        *_paper_step("c", 3),
        Rule(f"{UNIT}a/proj/standardized_conv2d/kernel", f"{OUR_UNIT}project.weight", HWIO_TO_OIHW),
        *_paper_norm("group_norm", "norm"),
        Rule("head/conv2d/kernel", "head.weight", HEAD),
        Rule("head/conv2d/bias", "head.bias"),
    ],
)
BIG = Naming(
    name="big_vision",
    prefix="params/",
    root="root_block/conv_root/kernel",
    marks="block1/unit01/gn1/scale",
    head="head/kernel",
    rank=2,
    root_pad="none",
    rules=[
        Rule("root_block/conv_root/kernel", "root.weight", HWIO_TO_OIHW),
        *_big_vision_step(1),
        *_big_vision_step(2),
        *_big_vision_step(3),
        Rule(f"{UNIT}conv_proj/kernel", f"{OUR_UNIT}project.weight", HWIO_TO_OIHW),
        *norm("norm-pre-head", "norm", FLATTEN),
        *dense("head", "head"),
    ],
)


def spelling(name: str) -> str:
    """Some of the paper's files number their convolutions: standardized_conv2d_3."""
    return re.sub(r"/standardized_conv2d_\d+/", "/standardized_conv2d/", name)


def recognize(naming: Naming, archive: Archive) -> str | None:
    """The shortest prefix that fits; an optimizer's moments look like networks and are passed over."""
    names = {spelling(name) for name in archive.tensors}
    found = [name.removesuffix(naming.root) for name in names if name.endswith(naming.root)]
    found = [p for p in found if p + naming.marks in names and (not p.startswith("opt") or p == "opt/target/")]
    return min(found, key=len, default=None)


def describe(naming: Naming, archive: Archive) -> ModelInfo:
    shapes = Shapes(archive, naming.name)
    *_, channels, base = shapes(naming.root, 4)
    options: dict[str, Any] = {
        "image_size": ASSUMED,
        "channels": channels,
        "num_classes": shapes(naming.head, naming.rank)[-1] if naming.head in shapes else 0,
        "layers": shapes.units(),
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
        notes=(f"the image's size is not stored: {ASSUMED} assumed, and BiT takes any.",),
    )


def table(naming: Naming, _: AnyConfig) -> RenameTable:
    return RenameTable(naming.name, naming.rules, OUTSIDE)


def cannot(info: ModelInfo) -> list[str]:
    return ["a Vision Transformer"] if isinstance(info.config, ViTConfig) else []


def drift(naming: Naming, info: ModelInfo) -> list[str]:
    """What the code that reads these files has fixed."""
    config, usual = info.config, BiTConfig()
    assert isinstance(config, BiTConfig)
    root_pad = config.root_pad
    parts = {
        f"norm_eps={config.norm_eps}": config.norm_eps != usual.norm_eps,
        f"standardize_eps={config.standardize_eps}": config.standardize_eps != usual.standardize_eps,
        f"root_pad={root_pad!r}": root_pad != naming.root_pad,
    }
    return [name for name, there in parts.items() if there]


def format_of(naming: Naming) -> Format:
    return Format(
        name=naming.name,
        detect=partial(recognize, naming),
        infer_info=partial(describe, naming),
        table=partial(table, naming),
        write=writer(naming.prefix),
        unsupported_parts=cannot,
        inexact_conventions=partial(drift, naming),
        ignored_outside=OUTSIDE,
        normalize_name=spelling,
    )


BIT_GOOGLE = format_of(PAPER)
BIT_BIG_VISION = format_of(BIG)
FORMATS = (BIT_GOOGLE, BIT_BIG_VISION)
