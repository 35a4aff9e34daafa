"""timm's ViT, DeiT, hybrid and BiT models, as files or repositories."""

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
from vitrail.storage.atomic_write import new_folder, write_json
from vitrail.weights import timm_config
from vitrail.weights.archive import Archive
from vitrail.weights.family_defaults import default_preprocess, family_conventions
from vitrail.weights.format import Format, header_metadata
from vitrail.weights.model_info import ModelInfo
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
    as_vit,
    weight_and_bias,
)
from vitrail.weights.timm_family import infer_family, script_args
from vitrail.weights.writers import write_safetensors

# R registers, D width


def _read_registers(tensors: Any, config: AnyConfig) -> list[Tensor]:
    """In timm registers may have a position embedding; ours have none, so it is added to the register."""
    assert isinstance(config, ViTConfig)
    tokens, table = (t.flatten(0, 1) for t in tensors)  # R D, rows D
    if len(table) == config.num_positioned_prefix_tokens + math.prod(config.grid):
        return [tokens, *POSITION.read([table[None]], config)]
    first, last = config.num_positioned_prefix_tokens, config.num_positioned_prefix_tokens + config.num_registers
    position = table[first:last]
    rest = torch.cat([table[:first], table[last:]])[None]
    tokens = torch.where(position == 0, tokens, tokens + position)  # keeps -0.0, which -0.0 + 0.0 would turn into 0.0
    return [tokens, *POSITION.read([rest], config)]


def _write_registers(tensors: Any, config: AnyConfig) -> list[Tensor]:
    """Where timm's class token has a position embedding, so do its registers: zeros are written."""
    tokens, *prefix, table = tensors
    zeros = [torch.zeros_like(tokens)] if prefix else []
    return [tokens[None], torch.cat([*prefix, *zeros, table.flatten(0, 1)])[None]]


REGISTERS_AND_POSITION = Transform(_read_registers, _write_registers)


TOKEN_RULES = [Rule("cls_token", "class_token", CLASS_TOKEN), Rule("dist_token", "distill_token", CLASS_TOKEN)]
POSITION_RULES = [Rule("reg_token", "registers", TOKENS), Rule("pos_embed", POSITION_NAMES, POSITION)]
REGISTER_RULES = [Rule(("reg_token", "pos_embed"), ("registers", *POSITION_NAMES), REGISTERS_AND_POSITION)]

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


def resnet_rules(theirs: str, ours: str) -> list[Rule]:
    """Rules for the units of a ResNet: three convolutions and three norms each."""
    unit = [(f"{part}{n}", f"{part}{n}") for n in (1, 2, 3) for part in ("conv", "norm")]
    rules = [
        r
        for a, b in unit
        for r in weight_and_bias(f"{theirs}stages.{{s}}.blocks.{{u}}.{a}", f"{ours}stages.{{s}}.{{u}}.{b}")
    ]
    return [r for r in rules if "conv" not in str(r.ours) or "bias" not in str(r.ours)]


def root_rules(theirs: str) -> list[Rule]:
    return [Rule(f"{theirs}conv.weight", "stem.root.conv.weight"), *weight_and_bias(f"{theirs}norm", "stem.root.norm")]


ROOT_ALONE = root_rules("patch_embed.backbone.")
"""Rules for a stem without stages."""
STEM = [
    *root_rules("patch_embed.backbone.stem."),
    *resnet_rules("patch_embed.backbone.", "stem."),
    Rule(
        "patch_embed.backbone.stages.{s}.blocks.{u}.downsample.conv.weight", "stem.stages.{s}.{u}.project.conv.weight"
    ),
    *weight_and_bias("patch_embed.backbone.stages.{s}.blocks.{u}.downsample.norm", "stem.stages.{s}.{u}.project.norm"),
]

BIT = [
    Rule("stem.conv.weight", "root.weight"),
    *resnet_rules("", ""),
    Rule("stages.{s}.blocks.{u}.downsample.conv.weight", "stages.{s}.{u}.project.weight"),
    *weight_and_bias("norm", "norm"),
    Rule("head.fc.weight", "head.weight", CONV1X1_TO_LINEAR),
    Rule("head.fc.bias", "head.bias"),
]


def table(config: AnyConfig) -> RenameTable:
    if isinstance(config, BiTConfig):
        return RenameTable("timm", BIT)
    config = as_vit(config)
    norm = "fc_norm" if config.pool_norm == "after" and not config.distilled else "norm"
    positions = REGISTER_RULES if config.num_registers and config.position == "learned-1d" else POSITION_RULES
    stem = ROOT_ALONE if config.stem and not config.stem.layers else STEM
    ignore = () if config.pre_logits else ("pre_logits.*",)
    return RenameTable("timm", [*TOKEN_RULES, *positions, *ENDS, *weight_and_bias(norm, "norm"), *BLOCK, *stem], ignore)


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


def detect(archive: Archive) -> str | None:
    for prefix in PREFIXES:
        names = {n.removeprefix(prefix) for n in archive.tensors if n.startswith(prefix)}
        # Two are enough: a file that lacks one tensor is read, and the error names the missing one.
        if len(names.intersection(ANCHORS)) > 1 or len(names.intersection(BIT_ANCHORS)) > 1:
            return prefix
    return None


def infer_info(archive: Archive) -> ModelInfo:
    stated = timm_config.TimmConfig.from_archive(archive)
    if any(name in archive.tensors for name in BIT_ANCHORS):
        return _bit_info(archive, stated)
    config, notes = _vit_config(archive, stated)
    family = infer_family(archive, f"{stated.arch}.{stated.tag}" if stated.pretrained_cfg else "", config)
    if not stated.pretrained_cfg:  # not a timm repository: positions are resized as in the family's own code
        config = config.replace(resample=family_conventions(family, config).get("resample", "timm"))
    default = default_preprocess(family, config, "timm")
    if not stated.pretrained_cfg:
        script_values = {name: script_args(archive).get(name) for name in ("mean", "std")}
        default = default.replace(
            **{
                n: tuple(v)
                for n, v in script_values.items()
                if isinstance(v, list | tuple) and len(v) == len(default.mean)
            }
        )
    preprocess, from_file = stated.preprocess(config, default)
    notes += stated.notes
    if not from_file:
        notes.append(
            f"the file does not store preprocessing; {family}'s default is used: {preprocess.summary()}. "
            "Pass --family NAME (family=... in Python) if it belongs to another family."
        )
    labels = stated.labels(config.num_classes)
    projects = (
        family == "CLIP" and config.num_classes in CLIP_EMBED_DIM.values() and not labels and not stated.tag_has("ft")
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


def _vit_config(archive: Archive, stated: timm_config.TimmConfig) -> tuple[ViTConfig, list[str]]:
    names, notes = archive.tensors, []
    width = _shape(archive, "blocks.0.norm1.weight")[0]
    depth = 1 + max(int(n.split(".")[1]) for n in names if n.startswith("blocks."))
    up, down = _shape(archive, "blocks.0.mlp.fc1.weight")[0], _shape(archive, "blocks.0.mlp.fc2.weight")[1]
    patch = _shape(archive, "patch_embed.proj.weight")[2:]
    root = next((n for n in STEM_ROOTS if n in names), None)
    stem = _stem_config(archive, root) if root else None
    first = root or "patch_embed.proj.weight"
    head = next((archive.shape(n) for n in ("head.weight", "head.bias") if n in names), None)
    inside = {n.split(".", 2)[2] for n in names if n.startswith("blocks.")}  # of any block, since one may lack a tensor
    pre_norm = bool(stated.args.get("pre_norm", "norm_pre.weight" in names))
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
        "patch_bias": not pre_norm or "patch_embed.proj.bias" in names,  # with pre_norm timm has no bias
        "qkv_bias": "attn.qkv.bias" in inside,
        "proj_bias": bool({"attn.proj.bias", "mlp.fc1.bias", "mlp.fc2.bias"} & inside),
        "qk_norm": "attn.q_norm.weight" in inside,
        "layer_scale": 1e-5 if {"ls1.gamma", "ls2.gamma"} & inside else None,
        "pre_norm": pre_norm,
        "pre_logits": archive.shape("pre_logits.fc.weight")[0] if head and "pre_logits.fc.weight" in names else 0,
        "resample": "timm",
        "stem": stem,
    }
    options |= _pooling(archive, stated)
    stated.check_sizes(
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
            "read as timm: the model has registers and a distillation token, which timm does not support together."
        )
    decided_by_args = ("qkv_bias", "proj_bias", "qk_norm")  # the arguments decide, since a tensor may be missing
    options |= {name: bool(stated.args[name]) for name in decided_by_args if name in stated.args}
    options |= _positions(archive, stated, options)
    if (classes := stated.config_json.get("num_classes")) not in (None, options["num_classes"]):
        stated.notes.append(f"config.json has num_classes={classes}, but the head has {options['num_classes']}.")
    resembled = _resembles(archive, options)
    options |= stated.activation_and_eps(swiglu=up == 2 * down, resembled=resembled)
    options["layer_scale"] = options["layer_scale"] and (stated.args.get("init_values") or options["layer_scale"])
    options["num_heads"], note = stated.num_heads(width, down, archive, resembled)
    notes += [note] if note else []
    config = ViTConfig(**options)
    rows = archive.shape("pos_embed")[1] if "pos_embed" in names else 0
    if config.num_registers and rows > config.num_positioned_prefix_tokens + math.prod(config.grid):
        notes.append("the position embeddings of the registers are added to the registers.")
    return config, notes


def _shape(archive: Archive, name: str) -> tuple[int, ...]:
    if name not in archive.tensors:
        raise FormatError(f"read as timm, the tensors do not fit: missing {name}.")
    return archive.shape(name)


def _resembles(archive: Archive, options: dict[str, Any]) -> str:
    """The model whose image tower has the same tensors: "CLIP", "SigLIP" (with or without its pooling) or ""."""
    if options["pre_norm"]:
        return "CLIP"
    plain = not (options["class_token"] or options["num_registers"] or options["layer_scale"] or options["stem"])
    is_ijepa = {"target_encoder", "predictor"} <= set(archive.extras.get("sections", ()))
    return "SigLIP" if plain and options["qkv_bias"] and options["pool_norm"] == "before" and not is_ijepa else ""


def _pooling(archive: Archive, stated: timm_config.TimmConfig) -> dict[str, Any]:
    names = archive.tensors
    modules = {n.split(".")[0] for n in names}
    norm = "after" if "fc_norm" in modules else "before" if "norm" in modules else "none"
    if "attn_pool.latent" in names or stated.global_pool == "map":
        return {"pool": "map", "pool_norm": norm}
    token = "cls_token" in names and (stated.global_pool or ("avg" if norm == "after" else "token")) == "token"
    return {"pool": "token" if token else "gap", "pool_norm": norm}


def _positions(archive: Archive, stated: timm_config.TimmConfig, options: dict[str, Any]) -> dict[str, Any]:
    """Options for image size and class token position, from the number of rows of pos_embed."""
    per_patch = [side * (options["stem"].stride if options["stem"] else 1) for side in options["patch_size"]]
    size = stated.image_size
    if "pos_embed" not in archive.tensors:
        if stated.hints.get("position", stated.args.get("pos_embed", "learn")) not in ("none", "", None):
            raise FormatError(
                "read as timm: pos_embed is missing. Models with rotary or relative positions are not supported; "
                "pass position='none' if this model has no positions at all."
            )
        if size and not options["stem"] and any(s % p for s, p in zip(size, per_patch, strict=True)):
            return {"image_size": size, "uncovered": "ignore"}
        return {"image_size": size or tuple(math.ceil(224 / p) * p for p in per_patch)}
    rows = archive.shape("pos_embed")[1]
    special = options["class_token"] + options["distilled"]
    choices = sorted({special, 0, special + options["num_registers"]}, key=lambda p: p != special)
    for placed in choices:
        if size and math.prod(-(-s // p) for s, p in zip(size, per_patch, strict=True)) == rows - placed:
            return {"image_size": size, **_class_position(placed, special)}
        if size and not options["stem"] and _count_whole_patches(size, per_patch) == rows - placed:
            return {"image_size": size, "uncovered": "ignore", **_class_position(placed, special)}
    for placed in choices:
        side = math.isqrt(max(rows - placed, 0))
        if side and side * side == rows - placed:
            image = tuple(side * p for p in per_patch)
            if size:
                stated.notes.append(
                    f"the stated image size is {_format_size(size)}, but the positions are for {_format_size(image)}: "
                    "the latter is used."
                )
            elif placed < special and stated.hints.get("family") != "DeiT3":
                # (side - 1) x (side + 1) patches with a class token have as many
                stated.notes.append(
                    f"the positions are assumed to be for {_format_size(image)}, with none for the class token; pass "
                    "image_size=(height, width) if that is wrong."
                )
            return {"image_size": image, **_class_position(placed, special)}
    raise FormatError(
        f"read as timm: pos_embed has {rows} rows, which is not a square grid with {special} special tokens, "
        "and the file does not store the image size; pass image_size=(height, width)."
    )


def _format_size(size: tuple[int, ...]) -> str:
    return "x".join(map(str, size))


def _count_whole_patches(size: tuple[int, int], patch: list[int]) -> int:
    """Number of whole patches: a convolution ignores the rest of the image."""
    return (size[0] // patch[0]) * (size[1] // patch[1])


def _class_position(placed: int, special: int) -> dict[str, bool]:
    # Without a class token the field has no effect and keeps its default.
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


def _bit_info(archive: Archive, stated: timm_config.TimmConfig) -> ModelInfo:
    units = {tuple(map(int, n.split(".")[1:4:2])) for n in archive.tensors if n.startswith("stages.")}
    config = BiTConfig(
        channels=_shape(archive, "stem.conv.weight")[1],
        num_classes=archive.shape("head.fc.weight")[0] if "head.fc.weight" in archive.tensors else 0,
        layers=tuple(sum(s == stage for s, _ in units) for stage in range(1 + max(s for s, _ in units))),
        width_factor=_shape(archive, "stem.conv.weight")[0] / 64,
        standardize_eps=1e-8,
        image_size=stated.image_size or 224,
    )
    preprocess, from_file = stated.preprocess(config, default_preprocess("BiT", config))
    default_note = f"the file does not store preprocessing; BiT's default is used: {preprocess.summary()}."
    notes = stated.notes if from_file else [default_note]
    return ModelInfo(
        config=config,
        preprocess=preprocess,
        labels=stated.labels(config.num_classes),
        family="BiT",
        task="classify" if config.num_classes else "embed",
        origin=archive.source,
        notes=tuple(notes),
    )


def unsupported_parts(info: ModelInfo) -> list[str]:
    return timm_config.unsupported_parts(info.config)


def inexact_conventions(info: ModelInfo) -> list[str]:
    return timm_config.inexact_conventions(info.config)


def write(path: Path, tensors: Mapping[str, Tensor], info: ModelInfo, overwrite: bool) -> None:
    """Write a folder for `timm.create_model("local-dir:PATH", pretrained=True)`, or one .safetensors file with
    the config in its header."""
    if path.suffix == ".safetensors":
        write_safetensors(
            path, tensors, header_metadata({"config.json": timm_config.config_json(info)}), overwrite=overwrite
        )
        return
    with new_folder(path, overwrite=overwrite) as folder:
        write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
        write_json(folder / "config.json", timm_config.config_json(info))


IGNORED = ("head.*", "module.head.*", "visual.head.*", "text.*", "logit_scale", "logit_bias")
TIMM_FORMAT = Format(
    "timm", detect, infer_info, table, write, unsupported_parts, inexact_conventions, ignored_outside=IGNORED
)
