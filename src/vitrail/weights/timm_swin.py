"""timm's Swin Transformers, versions 1 and 2 and Swin-S3, as files or repositories."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.config import SwinConfig, pair
from vitrail.errors import FormatError
from vitrail.models.model_names import config_from_name
from vitrail.models.published_models import PUBLISHED_MODELS
from vitrail.storage.atomic_write import new_folder, write_json
from vitrail.weights import timm_config
from vitrail.weights.archive import Archive
from vitrail.weights.family_defaults import default_preprocess
from vitrail.weights.format import Format, header_metadata
from vitrail.weights.microsoft import HINTS
from vitrail.weights.model_info import ModelInfo
from vitrail.weights.swin_config import inexact_conventions, infer_config, is_swin, swin_info, unsupported_parts
from vitrail.weights.swin_names import TIMM_NAMES
from vitrail.weights.timm import PREFIXES
from vitrail.weights.timm_pretrained_cfg import pretrained_cfg
from vitrail.weights.writers import write_safetensors

WINDOW_IN_NAME = re.compile(r"^swinv2_\w+_window(?P<window>\d+)(to(?P<tuned>\d+))?_")
PRETRAINED_WINDOWS = (12, 12, 12, 6)
"""Of window12to16 and window12to24: the window is 12, and 6 on the last map at 192 pixels."""
FIXED_ARGS = {"head_dim": None, "always_partition": False, "norm_layer": None, "act_layer": "gelu"}
"""Arguments that must have these values."""
ARGS = re.compile(
    "img_size|patch_size|in_chans|num_classes|global_pool|embed_dim|depths|num_heads|window_size|strict_img_size"
    "|mlp_ratio|qkv_bias|pretrained_window_sizes|weight_init|((proj|attn)_)?drop_rate|drop_path_rate"
)


def detect(archive: Archive) -> str | None:
    for prefix in PREFIXES:
        inside = archive.strip_prefix(prefix)
        if is_swin(inside, TIMM_NAMES) and "layers.0.downsample.reduction.weight" not in inside.tensors:
            return prefix
    return None


def infer_info(archive: Archive) -> ModelInfo:
    stated = timm_config.TimmConfig.from_archive(archive)
    _check_args(stated)
    config, notes = infer_config(archive, TIMM_NAMES, _stated_fields(stated, archive))
    default = default_preprocess("Swin", config).replace(**_timm_crop(config))
    preprocess, from_file = stated.preprocess(config, default)
    if not from_file:
        notes.append(f"the file does not store preprocessing; timm's default is used: {preprocess.summary()}.")
    if (classes := stated.config_json.get("num_classes")) not in (None, config.num_classes):
        notes.append(f"config.json has num_classes={classes}, but the head has {config.num_classes}.")
    return swin_info(archive, config, preprocess, [*notes, *stated.notes], stated.labels(config.num_classes))


def _timm_crop(config: SwinConfig) -> dict[str, Any]:
    """timm resizes the short side to 1 / 0.9 of the crop, from 384 pixels on to the crop itself."""
    height, width = pair(config.image_size)
    return {"resize_to": int(min(height, width) / 0.9) if height == width and height < 384 else None}


def _check_args(stated: timm_config.TimmConfig) -> None:
    for name, value in stated.args.items():
        fixed = name in FIXED_ARGS and value in (None, FIXED_ARGS[name])
        if not fixed and not ARGS.fullmatch(name):
            raise FormatError(f"timm's {stated.arch} with {name}={value!r} is not supported.")


def _stated_fields(stated: timm_config.TimmConfig, archive: Archive) -> dict[str, Any]:
    """Fields of SwinConfig from the architecture and its arguments, else from the caller."""
    fields = {name: archive.hints[name] for name in HINTS if name in archive.hints}
    if stated.pretrained_cfg and (size := stated.image_size):
        fields["image_size"] = size
    if match := WINDOW_IN_NAME.match(stated.arch):
        fields["window_size"] = int(match["tuned"] or match["window"])
        if match["tuned"]:
            fields["pretrained_window_sizes"] = PRETRAINED_WINDOWS
    for name in ("window_size", "pretrained_window_sizes"):
        if (value := stated.args.get(name)) is not None:
            fields[name] = tuple(value) if isinstance(value, list | tuple) else value
    if "windows_in_use" in stated.config_json:
        fields["windows_in_use"] = stated.config_json["windows_in_use"]
    if not any(fields.get("pretrained_window_sizes", ())):
        fields.pop("pretrained_window_sizes", None)
    return fields


def architecture(config: SwinConfig) -> str:
    """The timm architecture with these sizes, else one whose arguments can express them."""
    sizes = ("version", "width", "depths", "num_heads", "window_size", "image_size", "pretrained_window_sizes")
    for model in PUBLISHED_MODELS:
        if model.family in ("Swin", "SwinV2"):
            published = config_from_name(model.name)
            if all(getattr(published, name) == getattr(config, name) for name in sizes):
                return model.aliases[0]
    return "swin_tiny_patch4_window7_224" if config.version == 1 else "swinv2_tiny_window8_256"


def config_json(info: ModelInfo) -> dict[str, Any]:
    """The contents of config.json as timm writes it."""
    config = info.config
    assert isinstance(config, SwinConfig)
    windows = [size[0] for size in config.window_sizes]
    args: dict[str, Any] = {
        "img_size": list(pair(config.image_size)),
        "in_chans": config.channels,
        "embed_dim": config.width,
        "depths": list(config.depths),
        "num_heads": list(config.num_heads),
        "window_size": windows if config.stage_window_sizes else windows[0],
        "mlp_ratio": config.mlp_ratio,
        "qkv_bias": config.qkv_bias,
        "patch_size": pair(config.patch_size)[0],
    }
    if config.version == 2:
        args["pretrained_window_sizes"] = list(config.pretrained_window_sizes or [0] * len(config.depths))
    values: dict[str, Any] = {
        "architecture": architecture(config),
        "num_classes": config.num_classes,
        "num_features": config.pooled_width,
        "global_pool": "avg",
        "pretrained_cfg": pretrained_cfg(info, "patch_embed.proj", "head.fc"),
        "model_args": args,
    }
    return values if info.labels is None else values | {"label_names": list(info.labels)}


def write(path: Path, tensors: Mapping[str, Tensor], info: ModelInfo, overwrite: bool) -> None:
    """Write a folder for `timm.create_model("local-dir:PATH", pretrained=True)`, or one .safetensors file with
    the config in its header."""
    if path.suffix == ".safetensors":
        write_safetensors(path, tensors, header_metadata({"config.json": config_json(info)}), overwrite=overwrite)
        return
    with new_folder(path, overwrite=overwrite) as folder:
        write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
        write_json(folder / "config.json", config_json(info))


def timm_unsupported(info: ModelInfo) -> list[str]:
    config = info.config
    assert isinstance(config, SwinConfig)
    parts = {
        "a patch that is not square": len(set(pair(config.patch_size))) > 1,
        "a network without a head (timm takes such a file for its older layout)": not config.num_classes,
    }
    return [*unsupported_parts(TIMM_NAMES, info), *(name for name, present in parts.items() if present)]


TIMM_SWIN = Format(
    "timm",
    detect,
    infer_info,
    TIMM_NAMES.table,
    write,
    timm_unsupported,
    partial(inexact_conventions, TIMM_NAMES),
    config_types=(SwinConfig,),
)
