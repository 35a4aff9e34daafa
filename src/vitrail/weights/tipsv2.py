"""TIPSv2's image towers (google/tipsv2-*): Google's names, which transformers' repositories have too.

The network is DINOv2's with one register, which is trained as a second class token. Its images are not normalized, and
positions are resampled bilinearly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.config import PreprocessConfig, ViTConfig, pair
from vitrail.errors import FormatError
from vitrail.models.model_names import infer_num_heads
from vitrail.weights import facebook
from vitrail.weights import huggingface_preprocess as processor
from vitrail.weights.archive import Archive
from vitrail.weights.family_defaults import default_preprocess
from vitrail.weights.format import Format, write_folder
from vitrail.weights.huggingface_config import BACKBONES, HuggingFaceConfig
from vitrail.weights.model_info import ModelInfo
from vitrail.weights.renaming import AnyConfig, RenameTable, Rule, as_vit

RENAMES = {".mlp.fc1.": ".mlp.c_fc.", ".mlp.fc2.": ".mlp.c_proj."}
"""Names that differ from DINOv2's, in networks without SwiGLU."""
PREFIXES = ("", "vision_encoder.")


def table(config: AnyConfig) -> RenameTable:
    """DINOv2's own table with the renames."""

    def rename(rule: Rule) -> Rule:
        theirs = rule.theirs
        for name, renamed in RENAMES.items():
            theirs = theirs.replace(name, renamed) if isinstance(theirs, str) else theirs
        return replace(rule, theirs=theirs)

    return RenameTable("huggingface (TIPSv2)", [rename(rule) for rule in facebook.table(config).rules], ("mask_token",))


def detect(archive: Archive) -> str | None:
    """The prefix of files with DINOv2's tensors and either TIPSv2's own names or one register (DINOv2 has four)."""
    for prefix in PREFIXES:
        names = archive.strip_prefix(prefix).tensors
        if not {"cls_token", "register_tokens", "pos_embed", "blocks.0.ls1.gamma"} <= set(names):
            continue
        own = prefix or "blocks.0.mlp.c_fc.weight" in names
        if own or archive.strip_prefix(prefix).shape("register_tokens")[1] == 1:
            return prefix
    return None


def infer_info(archive: Archive) -> ModelInfo:
    hf_config = HuggingFaceConfig.from_archive(archive, BACKBONES["tipsv2"])
    config, notes = _config(archive, hf_config)
    content = processor.find_processor_json(archive)
    preprocess: PreprocessConfig
    if content is None:
        preprocess = default_preprocess("TIPSv2", config)
        notes.append(f"the file does not store preprocessing; TIPSv2's default is used: {preprocess.summary()}.")
    else:
        preprocess, more = processor.read_preprocess(content, "tipsv2", pair(config.image_size), config.channels)
        notes += more
    return ModelInfo(
        config=config, preprocess=preprocess, family="TIPSv2", task="embed", origin=archive.source, notes=tuple(notes)
    )


def _config(archive: Archive, hf_config: HuggingFaceConfig) -> tuple[ViTConfig, list[str]]:
    names = archive.tensors
    gated = "blocks.0.mlp.w3.weight" in names
    down = f"blocks.0.mlp.{'w3' if gated else 'c_proj'}.weight"
    for name in ("patch_embed.proj.weight", down):
        if name not in names:
            raise FormatError(f"read as huggingface (TIPSv2), the tensors do not fit: missing {name}.")
    width, channels, *sides = archive.shape("patch_embed.proj.weight")
    patch = sides[0], sides[1]
    mlp_dim, registers = archive.shape(down)[1], archive.shape("register_tokens")[1]
    blocks = [int(name.split(".")[1]) for name in names if name.startswith("blocks.")]
    depth = 1 + max(blocks)
    hf_config.check_sizes(hidden_size=width, num_hidden_layers=depth, num_channels=channels, patch_size=patch)
    heads = archive.hints.get("num_heads") or hf_config.get("num_attention_heads") or infer_num_heads(width, mlp_dim)
    if not heads:
        raise FormatError(f"the file does not store the number of heads at width {width}; pass num_heads=...")
    note = f"{heads} heads of width {width // heads} are assumed; pass num_heads=... if that is wrong."
    options: dict[str, Any] = hf_config.conventions() | {
        "image_size": hf_config.image_size(patch, archive.shape("pos_embed")[1] - 1),
        "patch_size": patch,
        "channels": channels,
        "num_classes": 0,
        "width": width,
        "depth": depth,
        "num_heads": int(heads),
        "mlp_dim": mlp_dim,
        "num_registers": registers,
        "qkv_bias": "blocks.0.attn.qkv.bias" in names,
        "layer_scale": float(hf_config.get("layerscale_value", default=1.0)),
    }
    config = ViTConfig(**options | ({"activation": "swiglu"} if gated else {}))
    return config, [] if hf_config.model_type else [note]


def unsupported_parts(info: ModelInfo) -> list[str]:
    config = as_vit(info.config)
    rows, columns = pair(config.image_size)
    parts = {
        "a head": bool(config.num_classes),
        "a network without registers": not config.num_registers,
        "an image that is not square": rows != columns,
        "SwiGLU whose hidden dimension is not 2/3 of an MLP's": config.activation == "swiglu"
        and config.mlp_dim != _swiglu_dim(config.width, _mlp_ratio(config)),
    }
    missing = facebook.unsupported_parts(info.replace(config=config.replace(num_classes=0)))
    return [*missing, *(name for name, present in parts.items() if present)]


def _swiglu_dim(width: int, ratio: float) -> int:
    """Hidden dimension of transformers' SwiGLU."""
    return -(-int(int(width * ratio) * 2 / 3) // 8) * 8


def _mlp_ratio(config: ViTConfig) -> float:
    """`mlp_ratio` of transformers' config, from which it computes the hidden dimension."""
    if config.activation != "swiglu":
        return config.mlp_dim / config.width
    return config.mlp_dim * 3 / 2 / config.width


def write(path: Path, tensors: Mapping[str, Tensor], info: ModelInfo, overwrite: bool) -> None:
    """Write a folder for `Tipsv2VisionModel.from_pretrained`."""
    config = as_vit(info.config)
    rows, columns = pair(config.patch_size)
    content: dict[str, Any] = {
        "architectures": ["Tipsv2VisionModel"],
        "model_type": "tipsv2_vision_model",
        "hidden_size": config.width,
        "mlp_ratio": _mlp_ratio(config),
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.num_heads,
        "num_register_tokens": config.num_registers,
        "num_channels": config.channels,
        "image_size": pair(config.image_size)[0],
        "patch_size": rows if rows == columns else [rows, columns],
        "hidden_act": "gelu",
        "use_swiglu_ffn": config.activation == "swiglu",
        "layer_norm_eps": config.norm_eps,
        "qkv_bias": config.qkv_bias,
        "layerscale_value": config.layer_scale,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "drop_path_rate": config.drop_path,
        "torch_dtype": str(next(iter(tensors.values())).dtype).removeprefix("torch."),
    }
    preprocess = processor.preprocessor_json(info.preprocess, "vit")
    mask = torch.zeros_like(tensors["cls_token"][0])
    sidecars = {"config.json": content, "preprocessor_config.json": preprocess}
    write_folder(path, {**tensors, "mask_token": mask}, sidecars, overwrite)


TIPSV2 = Format(
    "huggingface",
    detect,
    infer_info,
    table,
    write,
    unsupported_parts,
    ignored_outside=("text_encoder.*", "temperature"),
    config_types=(ViTConfig,),
    accepts=lambda config: isinstance(config, ViTConfig) and config.resample == "tipsv2",
)
