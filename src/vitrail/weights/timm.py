"""timm's names: its ViTs, DeiTs, hybrids and BiT ResNets, as files or as repositories."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.config import BiTConfig, StemConfig, ViTConfig
from vitrail.errors import FormatError
from vitrail.models.model_names import CLIP_EMBED_DIM
from vitrail.weights import timm_config
from vitrail.weights.archive import Archive
from vitrail.weights.format import Format, header_metadata
from vitrail.weights.model_info import ModelInfo, default_preprocess, family_conventions
from vitrail.weights.renaming import (
    CLASS_TOKEN,
    CONV1X1_TO_LINEAR,
    POSITION,
    POSITION_NAMES,
    TOKENS,
    AnyConfig,
    RenameTable,
    Rule,
    Transform,
    weight_and_bias,
)
from vitrail.weights.timm_evidence import arguments, family_of
from vitrail.weights.writers import new_folder, write_json, write_safetensors

# R registers, P special tokens with a position, N patches, D width


def _read_registers(tensors: Any, config: AnyConfig) -> list[Tensor]:
    """timm can give registers a position; ours have none, so it becomes part of the register."""
    assert isinstance(config, ViTConfig)
    tokens, table = (t.flatten(0, 1) for t in tensors)  # R D, rows D
    if len(table) == config.num_positioned_prefix_tokens + math.prod(config.grid):
        return [tokens, *POSITION.read([table[None]], config)]
    first, last = config.num_positioned_prefix_tokens, config.num_positioned_prefix_tokens + config.num_registers
    position = table[first:last]
    rest = torch.cat([table[:first], table[last:]])[None]
    tokens = torch.where(position == 0, tokens, tokens + position)  # -0 + 0 is another zero
    return [tokens, *POSITION.read([rest], config)]


def _write_registers(tensors: Any, config: AnyConfig) -> list[Tensor]:
    """Where timm's class token has a position its registers have too: zeros, which change nothing."""
    tokens, *prefix, table = tensors
    zeros = [torch.zeros_like(tokens)] if prefix else []
    return [tokens[None], torch.cat([*prefix, *zeros, table.flatten(0, 1)])[None]]


REGISTERS_AND_POSITION = Transform(_read_registers, _write_registers)


TOKENS_RULES = [Rule("cls_token", "class_token", CLASS_TOKEN), Rule("dist_token", "distill_token", CLASS_TOKEN)]
POSITION_RULES = [Rule("reg_token", "registers", TOKENS), Rule("pos_embed", POSITION_NAMES, POSITION)]
PLACED_REGISTERS = [Rule(("reg_token", "pos_embed"), ("registers", *POSITION_NAMES), REGISTERS_AND_POSITION)]

BLOCK = [
    *weight_and_bias("blocks.{i}.norm1", "blocks.{i}.norm1"),
    *weight_and_bias("blocks.{i}.attn.qkv", "blocks.{i}.attention.qkv"),
    *weight_and_bias("blocks.{i}.attn.q_norm", "blocks.{i}.attention.q_norm"),
    *weight_and_bias("blocks.{i}.attn.k_norm", "blocks.{i}.attention.k_norm"),
    *weight_and_bias("blocks.{i}.attn.proj", "blocks.{i}.attention.out"),
    *weight_and_bias("blocks.{i}.norm2", "blocks.{i}.norm2"),
    *weight_and_bias("blocks.{i}.mlp.fc1", "blocks.{i}.mlp.up"),
    *weight_and_bias("blocks.{i}.mlp.fc2", "blocks.{i}.mlp.down"),
    Rule("blocks.{i}.ls1.gamma", "blocks.{i}.scale1"),
    Rule("blocks.{i}.ls2.gamma", "blocks.{i}.scale2"),
]

ENDS = [
    *weight_and_bias("patch_embed.proj", "patch"),
    *weight_and_bias("norm_pre", "pre_norm"),
    Rule("attn_pool.latent", "pool.probe", CLASS_TOKEN),
    *weight_and_bias("attn_pool.q", "pool.q"),
    *weight_and_bias("attn_pool.kv", "pool.kv"),
    *weight_and_bias("attn_pool.proj", "pool.out"),
    *weight_and_bias("attn_pool.norm", "pool.norm"),
    *weight_and_bias("attn_pool.mlp.fc1", "pool.mlp.up"),
    *weight_and_bias("attn_pool.mlp.fc2", "pool.mlp.down"),
    *weight_and_bias("pre_logits.fc", "pre_logits"),
    *weight_and_bias("head", "head"),
    *weight_and_bias("head_dist", "head_distill"),
]


def resnet(theirs: str, ours: str) -> list[Rule]:
    """Units of a ResNet: three convolutions, three norms."""
    unit = [(f"{part}{n}", f"{part}{n}") for n in (1, 2, 3) for part in ("conv", "norm")]
    rules = [
        r
        for a, b in unit
        for r in weight_and_bias(f"{theirs}stages.{{s}}.blocks.{{u}}.{a}", f"{ours}stages.{{s}}.{{u}}.{b}")
    ]
    return [r for r in rules if "conv" not in str(r.ours) or "bias" not in str(r.ours)]


def root(theirs: str) -> list[Rule]:
    return [Rule(f"{theirs}conv.weight", "stem.root.conv.weight"), *weight_and_bias(f"{theirs}norm", "stem.root.norm")]


ROOT_ALONE = root("patch_embed.backbone.")
"""timm's name for a stem without stages."""
STEM = [
    *root("patch_embed.backbone.stem."),
    *resnet("patch_embed.backbone.", "stem."),
    Rule(
        "patch_embed.backbone.stages.{s}.blocks.{u}.downsample.conv.weight", "stem.stages.{s}.{u}.project.conv.weight"
    ),
    *weight_and_bias("patch_embed.backbone.stages.{s}.blocks.{u}.downsample.norm", "stem.stages.{s}.{u}.project.norm"),
]

BIT = [
    Rule("stem.conv.weight", "root.weight"),
    *resnet("", ""),
    Rule("stages.{s}.blocks.{u}.downsample.conv.weight", "stages.{s}.{u}.project.weight"),
    *weight_and_bias("norm", "norm"),
    Rule("head.fc.weight", "head.weight", CONV1X1_TO_LINEAR),
    Rule("head.fc.bias", "head.bias"),
]


def table(config: AnyConfig) -> RenameTable:
    if isinstance(config, BiTConfig):
        return RenameTable("timm", BIT)
    norm = "fc_norm" if config.pool_norm == "after" and not config.distilled else "norm"
    placed = PLACED_REGISTERS if config.num_registers and config.position == "learned-1d" else POSITION_RULES
    stem = ROOT_ALONE if config.stem and not config.stem.layers else STEM
    ignore = () if config.pre_logits else ("pre_logits.*",)
    return RenameTable("timm", [*TOKENS_RULES, *placed, *ENDS, *weight_and_bias(norm, "norm"), *BLOCK, *stem], ignore)


PREFIXES = (
    "",
    "module.",
    "_orig_mod.",
    "model.",
    "backbone.",
    "module.backbone.",
    "visual.trunk.",
    "module.visual.trunk.",
    "timm_model.",
)
ANCHORS = ("patch_embed.proj.weight", "blocks.0.norm1.weight", "blocks.0.attn.qkv.weight")
BIT_ANCHORS = ("stem.conv.weight", "stages.0.blocks.0.norm1.weight", "stages.0.blocks.0.conv1.weight")


def recognize(archive: Archive) -> str | None:
    for prefix in PREFIXES:
        names = {n.removeprefix(prefix) for n in archive.tensors if n.startswith(prefix)}
        # Two will do: a file that lacks one of its tensors is told so, by name.
        if len(names.intersection(ANCHORS)) > 1 or len(names.intersection(BIT_ANCHORS)) > 1:
            return prefix
    return None


def describe(archive: Archive) -> ModelInfo:
    said = timm_config.Said.of(archive)
    if any(name in archive.tensors for name in BIT_ANCHORS):
        return _describe_bit(archive, said)
    config, notes = _vit_config(archive, said)
    family = family_of(archive, f"{said.arch}.{said.tag}" if said.cfg else "", config)
    if not said.cfg:  # not timm's own repository: resized as the code that made it does
        config = config.replace(resample=family_conventions(family, config).get("resample", "timm"))
    usual = default_preprocess(family, config, "timm")
    if not said.cfg:
        given = {name: arguments(archive).get(name) for name in ("mean", "std")}
        usual = usual.replace(
            **{n: tuple(v) for n, v in given.items() if isinstance(v, list | tuple) and len(v) == len(usual.mean)}
        )
    preprocess, heard = said.preprocess(config, usual)
    notes += said.notes
    if not heard:
        notes.append(
            f"preprocessing is not in the file; as usual for {family}: {preprocess.summary()}. "
            "If it is of another, pass --family NAME (family=... in Python)."
        )
    labels = said.labels(config.num_classes)
    projects = (
        family == "CLIP" and config.num_classes in CLIP_EMBED_DIM.values() and not labels and not said.tag_has("ft")
    )
    embeds = not config.num_classes or projects
    return ModelInfo(
        config=config,
        preprocess=preprocess,
        labels=labels,
        family=family,
        task="embed" if embeds else "classify",
        origin=archive.source,
        notes=tuple(notes),
    )


def _vit_config(archive: Archive, said: timm_config.Said) -> tuple[ViTConfig, list[str]]:
    names, notes = archive.tensors, []
    width = _shape(archive, "blocks.0.norm1.weight")[0]
    depth = 1 + max(int(n.split(".")[1]) for n in names if n.startswith("blocks."))
    up, down = _shape(archive, "blocks.0.mlp.fc1.weight")[0], _shape(archive, "blocks.0.mlp.fc2.weight")[1]
    patch = _shape(archive, "patch_embed.proj.weight")[2:]
    root = next((n for n in STEM_ROOTS if n in names), None)
    stem = _stem_config(archive, root) if root else None
    first = root or "patch_embed.proj.weight"
    head = next((archive.shape(n) for n in ("head.weight", "head.bias") if n in names), None)
    inside = {n.split(".", 2)[2] for n in names if n.startswith("blocks.")}  # of any block: one may lack a tensor
    pre_norm = bool(said.args.get("pre_norm", "norm_pre.weight" in names))
    options: dict[str, Any] = {
        "patch_size": patch,
        "channels": archive.shape(first)[1],
        "num_classes": head[0] if head else 0,
        "width": width,
        "depth": depth,
        "mlp_dim": down,
        "class_token": "cls_token" in names,
        "distilled": "dist_token" in names,
        "num_registers": archive.shape("reg_token")[1] if "reg_token" in names else 0,
        "position": "learned-1d" if "pos_embed" in names else "none",
        "norm": "layer" if {"norm1.bias", "norm2.bias"} & inside else "rms",
        "patch_bias": not pre_norm or "patch_embed.proj.bias" in names,  # timm has one or the other
        "qkv_bias": "attn.qkv.bias" in inside,
        "proj_bias": bool({"attn.proj.bias", "mlp.fc1.bias", "mlp.fc2.bias"} & inside),
        "qk_norm": "attn.q_norm.weight" in inside,
        "layer_scale": 1e-5 if {"ls1.gamma", "ls2.gamma"} & inside else None,
        "pre_norm": pre_norm,
        "pre_logits": archive.shape("pre_logits.fc.weight")[0] if head and "pre_logits.fc.weight" in names else 0,
        "resample": "timm",
        "stem": stem,
    }
    options |= _pooling(archive, said)
    said.agrees(
        embed_dim=width,
        depth=depth,
        patch_size=patch,
        in_chans=options["channels"],
        class_token=options["class_token"],
        reg_tokens=options["num_registers"],
        pre_norm=pre_norm,
        fc_norm=options["pool_norm"] == "after",
    )
    if options["distilled"] and options["num_registers"]:
        raise FormatError(
            "read as timm, it has registers beside a distillation token, which timm's code does not read."
        )
    stated = ("qkv_bias", "proj_bias", "qk_norm")  # by the arguments, where a tensor is missing
    options |= {name: bool(said.args[name]) for name in stated if name in said.args}
    options |= _positions(archive, said, options)
    if (classes := said.whole.get("num_classes")) not in (None, options["num_classes"]):
        said.notes.append(f"config.json says num_classes={classes}, and the head has {options['num_classes']}.")
    looks = _resembles(archive, options)
    options |= said.conventions(swiglu=up == 2 * down, looks=looks)
    options["layer_scale"] = options["layer_scale"] and (said.args.get("init_values") or options["layer_scale"])
    options["num_heads"], note = said.heads(width, down, archive, looks)
    notes += [note] if note else []
    config = ViTConfig(**options)
    rows = archive.shape("pos_embed")[1] if "pos_embed" in names else 0
    if config.num_registers and rows > config.num_positioned_prefix_tokens + math.prod(config.grid):
        notes.append("positions of registers, which ours do not have, were added to the registers themselves.")
    return config, notes


def _shape(archive: Archive, name: str) -> tuple[int, ...]:
    if name not in archive.tensors:
        raise FormatError(f"read as timm, the tensors do not fit: missing {name}.")
    return archive.shape(name)


def _resembles(archive: Archive, options: dict[str, Any]) -> str:
    """Whose image tower these tensors fit as well: CLIP's, SigLIP's with or without its pool, or neither."""
    if options["pre_norm"]:
        return "CLIP"
    plain = not (options["class_token"] or options["num_registers"] or options["layer_scale"] or options["stem"])
    known = {"target_encoder", "predictor"} <= set(archive.extras.get("sections", ()))  # I-JEPA's own file
    return "SigLIP" if plain and options["qkv_bias"] and options["pool_norm"] == "before" and not known else ""


def _pooling(archive: Archive, said: timm_config.Said) -> dict[str, Any]:
    names = archive.tensors
    found = {n.split(".")[0] for n in names}
    norm = "after" if "fc_norm" in found else "before" if "norm" in found else "none"
    if "attn_pool.latent" in names or said.global_pool == "map":
        return {"pool": "map", "pool_norm": norm}
    token = "cls_token" in names and (said.global_pool or ("avg" if norm == "after" else "token")) == "token"
    return {"pool": "token" if token else "gap", "pool_norm": norm}


def _positions(archive: Archive, said: timm_config.Said, options: dict[str, Any]) -> dict[str, Any]:
    """Image size and whether the class token has a position, from the table's rows."""
    per_patch = [side * (options["stem"].stride if options["stem"] else 1) for side in options["patch_size"]]
    size = said.image
    if "pos_embed" not in archive.tensors:
        if said.told.get("position", said.args.get("pos_embed", "learn")) not in ("none", "", None):
            raise FormatError(
                "read as timm, pos_embed is missing, and networks with rotary or relative positions are not read; "
                "pass position='none' if this one has no positions at all."
            )
        return {"image_size": size or tuple(math.ceil(224 / p) * p for p in per_patch)}
    rows = archive.shape("pos_embed")[1]
    special = options["class_token"] + options["distilled"]
    choices = sorted({special, 0, special + options["num_registers"]}, key=lambda p: p != special)
    for placed in choices:
        if size and math.prod(-(-s // p) for s, p in zip(size, per_patch, strict=True)) == rows - placed:
            return {"image_size": size, **_on_class(placed, special)}
        if size and not options["stem"] and _floored(size, per_patch) == rows - placed:
            return {"image_size": size, "uncovered": "ignore", **_on_class(placed, special)}
    for placed in choices:
        side = math.isqrt(max(rows - placed, 0))
        if side and side * side == rows - placed:
            image = tuple(side * p for p in per_patch)
            if size:
                said.notes.append(f"{_by(size)} is stated, and the positions are taken to be for {_by(image)}.")
            elif placed < special and said.told.get("family") != "DeiT3":
                # as many as (side - 1) x (side + 1) patches have with a class token
                said.notes.append(
                    f"the positions are taken to be for {_by(image)}, and none for the class token; pass "
                    "image_size=(height, width) if that is wrong."
                )
            return {"image_size": image, **_on_class(placed, special)}
    raise FormatError(
        f"read as timm, pos_embed has {rows} rows: no square grid with {special} special tokens, "
        "and the file does not say the image's size; pass image_size=(height, width)."
    )


def _by(size: tuple[int, ...]) -> str:
    return "x".join(map(str, size))


def _floored(size: tuple[int, int], patch: list[int]) -> int:
    """Patches of an image whose edge a convolution leaves out."""
    return (size[0] // patch[0]) * (size[1] // patch[1])


def _on_class(placed: int, special: int) -> dict[str, bool]:
    # Without a class token there is nothing to place: the field keeps its default.
    return {"position_on_class": placed > 0} if special else {}


STEM_ROOTS = ("patch_embed.backbone.stem.conv.weight", "patch_embed.backbone.conv.weight")


def _stem_config(archive: Archive, root: str) -> StemConfig:
    prefix = "patch_embed.backbone.stages."
    units = {tuple(map(int, n.removeprefix(prefix).split(".")[:3:2])) for n in archive.tensors if n.startswith(prefix)}
    stages = 1 + max((s for s, _ in units), default=-1)
    return StemConfig(
        layers=tuple(sum(s == stage for s, _ in units) for stage in range(stages)),
        width_factor=archive.shape(root)[0] / 64,
        norm_eps=1e-5,
        standardize="var",
        standardize_eps=1e-8,
    )


def _describe_bit(archive: Archive, said: timm_config.Said) -> ModelInfo:
    units = {tuple(map(int, n.split(".")[1:4:2])) for n in archive.tensors if n.startswith("stages.")}
    config = BiTConfig(
        channels=_shape(archive, "stem.conv.weight")[1],
        num_classes=archive.shape("head.fc.weight")[0] if "head.fc.weight" in archive.tensors else 0,
        layers=tuple(sum(s == stage for s, _ in units) for stage in range(1 + max(s for s, _ in units))),
        width_factor=_shape(archive, "stem.conv.weight")[0] / 64,
        standardize_eps=1e-8,
        image_size=said.image or 224,
    )
    preprocess, heard = said.preprocess(config, default_preprocess("BiT", config))
    notes = said.notes if heard else [f"preprocessing is not in the file; as usual for BiT: {preprocess.summary()}."]
    return ModelInfo(
        config=config,
        preprocess=preprocess,
        labels=said.labels(config.num_classes),
        family="BiT",
        task="classify" if config.num_classes else "embed",
        origin=archive.source,
        notes=tuple(notes),
    )


def cannot(info: ModelInfo) -> list[str]:
    return timm_config.cannot(info.config)


def drift(info: ModelInfo) -> list[str]:
    return timm_config.drift(info.config)


def write(path: Path, tensors: Mapping[str, Tensor], info: ModelInfo, overwrite: bool) -> None:
    """A repository folder for `timm.create_model("local-dir:PATH", pretrained=True)`; a file name
    that ends in .safetensors gives one file, which keeps the config in its header."""
    if path.suffix == ".safetensors":
        write_safetensors(
            path, tensors, header_metadata({"config.json": timm_config.written(info)}), overwrite=overwrite
        )
        return
    with new_folder(path, overwrite=overwrite) as folder:
        write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
        write_json(folder / "config.json", timm_config.written(info))


TIMM_FORMAT = Format(
    name="timm",
    detect=recognize,
    infer_info=describe,
    table=table,
    write=write,
    unsupported_parts=cannot,
    inexact_conventions=drift,
    ignored_outside=("head.*", "module.head.*", "visual.head.*", "text.*", "logit_scale", "logit_bias"),
)
