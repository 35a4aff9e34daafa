"""Facebook's .pth files whose names differ from timm's: DINOv2, DeiT-III, and complete DINO and MAE checkpoints.

DeiT, DINO's backbone and MAE's encoder use timm's names and are read by `weights.timm`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from vitrail.config import ViTConfig
from vitrail.models.model_names import infer_num_heads
from vitrail.weights import timm
from vitrail.weights.archive import Archive
from vitrail.weights.family_defaults import default_preprocess, family_conventions
from vitrail.weights.format import KINDS, Format
from vitrail.weights.google import UNCOVERED_BORDER
from vitrail.weights.model_info import ModelInfo
from vitrail.weights.renaming import POSITION, POSITION_NAMES, TOKENS, AnyConfig, RenameTable, Rule, weight_and_bias
from vitrail.weights.writers import write_torch

TIMM_TO_DINOV2 = {"reg_token": "register_tokens", ".mlp.fc1.": ".mlp.w12.", ".mlp.fc2.": ".mlp.w3."}
TIMM_TO_DEIT3 = {".ls1.gamma": ".gamma_1", ".ls2.gamma": ".gamma_2"}
MAE_DECODER = ("mask_token", "decoder_*")
DISTINCTIVE_NAMES = re.compile(
    r"mask_token|register_tokens|decoder_embed\.\w+|blocks\.(\d+\.gamma_[12]|\d+\.mlp\.w(12|3)\.\w+|\d+\.\d+\.norm1\.\w+)"
)
"""Names that timm does not use; the last alternative matches blocks in chunks."""

Codebase = Literal["DINOv2", "DeiT-III", "MAE, DINO, DeiT"]


def codebase_of(config: ViTConfig) -> Codebase:
    """The code base that names the tensors of a network of this config."""
    if config.layer_scale is not None and not config.num_positioned_prefix_tokens:
        return "DeiT-III"
    return "DINOv2" if config.layer_scale is not None or config.num_registers else "MAE, DINO, DeiT"


def _rename_theirs(rules: list[Rule], renames: Mapping[str, str]) -> list[Rule]:
    """timm's rules with timm's names replaced by this code base's."""

    def rename(name: str) -> str:
        for timm_name, theirs in renames.items():
            name = name.replace(timm_name, theirs)
        return name

    return [replace(r, theirs=rename(r.theirs)) for r in rules if isinstance(r.theirs, str)]


def table(config: AnyConfig) -> RenameTable:
    assert isinstance(config, ViTConfig)
    # A single token gives the same result normalized before or after pooling; only MAE's mean has its own norm.
    norm = weight_and_bias("fc_norm" if config.pool_norm == "after" and config.pool == "gap" else "norm", "norm")
    token_and_position = [Rule("reg_token", "registers", TOKENS), Rule("pos_embed", POSITION_NAMES, POSITION)]
    rules = [*timm.TOKEN_RULES, *token_and_position, *timm.ENDS, *norm, *timm.BLOCK]
    codebase = codebase_of(config)
    if codebase == "DeiT-III":
        return RenameTable(f"facebook ({codebase})", _rename_theirs(rules, TIMM_TO_DEIT3))
    if codebase == "DINOv2":
        swiglu = config.activation == "swiglu"
        renames = {k: v for k, v in TIMM_TO_DINOV2.items() if swiglu or "mlp" not in k}
        return RenameTable(f"facebook ({codebase})", _rename_theirs(rules, renames), ("mask_token",))
    return RenameTable(f"facebook ({codebase})", rules, MAE_DECODER)


def detect(archive: Archive) -> str | None:
    for prefix in ("", "module.", "backbone.", "module.backbone."):
        names = archive.strip_prefix(prefix).tensors
        if "cls_token" not in names or "patch_embed.proj.weight" not in names:
            continue
        head = prefix.replace("backbone.", "head.last_layer.")  # DINO's head, stored beside its backbone
        dino = prefix != head and any(n.startswith(head) for n in archive.tensors)
        if dino or any(DISTINCTIVE_NAMES.fullmatch(name) for name in names):
            return prefix
    return None


def remove_chunk(name: str) -> str:
    """Remove the chunk number that DINOv2 training with FSDP adds: blocks.CHUNK.LAYER.norm1 -> blocks.LAYER.norm1."""
    return re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", name)


def infer_info(archive: Archive) -> ModelInfo:
    """Sizes are read as from timm's names; conventions (epsilon, activation, resampling) are the family's own."""
    to_timm = {v: k for k, v in (TIMM_TO_DINOV2 | TIMM_TO_DEIT3).items()}

    def as_timm(name: str) -> str:
        for theirs, timm_name in to_timm.items():
            name = name.replace(theirs, timm_name)
        return name

    info = timm.infer_info(replace(archive, tensors=archive.tensors.rename(as_timm), sidecars={}))
    assert isinstance(info.config, ViTConfig)
    family = _family(archive, info.config)
    config = info.config.replace(**family_conventions(family, info.config))
    notes = [n for n in info.notes if "preprocessing" not in n]
    if any(name.startswith("decoder_") for name in archive.tensors):
        notes.append("not loaded: the decoder.")
    return info.replace(config=config, family=family, preprocess=default_preprocess(family, config), notes=tuple(notes))


def _family(archive: Archive, config: ViTConfig) -> str:
    names = archive.tensors
    if any(name.endswith((".gamma_1", ".gamma_2")) for name in names):
        return "DeiT3"
    if any(name.startswith("decoder_") for name in names):
        return "MAE"
    distinctive = config.layer_scale is not None or any(DISTINCTIVE_NAMES.fullmatch(name) for name in names)
    return "DINOv2" if distinctive else "DINO"


def unsupported_parts(info: ModelInfo) -> list[str]:
    config = info.config
    if not isinstance(config, ViTConfig):
        return [KINDS[type(config)]]
    codebase, grid = codebase_of(config), config.grid
    parts = {
        f"{config.position} positions": config.position not in ("none", "learned-1d"),
        "a network without positions": config.position == "none",
        "keys without bias": config.qkv_bias and not config.key_bias,
        "positions added at the layers": config.position == "learned-1d" and config.resolved_position_at != "stem",
        f"a grid of {grid[0]}x{grid[1]} patches, which is not square": grid[0] != grid[1],
        "a network without a class token": not config.class_token,
        "a ResNet stem": config.stem is not None,
        "an attention pool": config.pool in ("map", "coca"),
        "pool='token+gap'": config.pool == "token+gap",
        "a tanh layer before the head": bool(config.pre_logits),
        "a norm before the blocks": config.pre_norm,
        "a network without a final norm": config.pool_norm == "none",
        "qk-norm": config.qk_norm,
        "RMSNorm": config.norm == "rms",
        "a patch projection without bias": not config.patch_bias,
        "a head without bias": bool(config.num_classes) and not config.head_bias,
        "SwiGLU outside DINOv2": config.activation == "swiglu" and codebase != "DINOv2",
        "registers beside a class token without a position": bool(config.num_registers)
        and not config.num_positioned_prefix_tokens,
        "pool='gap' after the norm": config.pool == "gap" and config.pool_norm == "before",
        f"pool='gap' in {codebase}": config.pool == "gap" and codebase != "MAE, DINO, DeiT",
        f"a distillation token in {codebase}": config.distilled and codebase != "MAE, DINO, DeiT",
        "a distillation token without a position": config.distilled and not config.position_on_class,
        f"attention and MLP outputs without bias in {codebase}": not config.proj_bias and codebase != "DINOv2",
        "a head in DINOv2": bool(config.num_classes) and codebase == "DINOv2",
        f"a SwiGLU of width {config.mlp_dim}, which is not a multiple of 8": config.activation == "swiglu"
        and config.mlp_dim % 8 > 0,
    }
    return [name for name, present in parts.items() if present]


def inexact_conventions(info: ModelInfo) -> list[str]:
    """Values fixed in Facebook's code that differ, and what a bare state dict does not store."""
    config = info.config
    assert isinstance(config, ViTConfig)
    assumed = infer_num_heads(config.width, config.mlp_dim)
    differences = []
    if config.activation not in ("gelu", "swiglu"):
        differences.append(f"{config.activation} (their code computes the exact GELU)")
    if config.norm_eps != 1e-6:
        differences.append(f"a norm epsilon of {config.norm_eps:g} (their code has 1e-6)")
    if config.num_heads != assumed:
        differences.append(f"num_heads={config.num_heads} (the file does not store it)")
    if config.uncovered == "ignore":
        differences.append(UNCOVERED_BORDER)
    return differences


def write(path: Path, tensors: Mapping[str, Tensor], info: ModelInfo, overwrite: bool) -> None:
    """Write a plain state dict for `load_state_dict`."""
    assert isinstance(info.config, ViTConfig)
    if codebase_of(info.config) == "DINOv2":  # its code has a mask token, used in training only
        tensors = {**tensors, "mask_token": torch.zeros_like(tensors["cls_token"][0])}
    write_torch(path, tensors, overwrite=overwrite)


FACEBOOK = Format(
    "facebook",
    detect,
    infer_info,
    table,
    write,
    unsupported_parts,
    inexact_conventions,
    ignored_outside=("head.*", "module.head.*", "dino_head.*", "ibot_head.*", "dino_loss.*", "ibot_patch_loss.*"),
    normalize_name=remove_chunk,
)
