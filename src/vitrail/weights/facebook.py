"""Facebook's own .pth files where they differ from timm's names: DINOv2, DeiT-III, DINO and MAE in full.

DeiT, DINO's backbone and MAE's encoder have timm's names and are read as such.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from vitrail.config import BiTConfig, ViTConfig
from vitrail.models.model_names import infer_num_heads
from vitrail.weights import timm
from vitrail.weights.archive import Archive
from vitrail.weights.format import Format
from vitrail.weights.google import EDGE
from vitrail.weights.model_info import ModelInfo, default_preprocess, family_conventions
from vitrail.weights.renaming import POSITION, POSITION_NAMES, TOKENS, AnyConfig, RenameTable, Rule, weight_and_bias
from vitrail.weights.writers import write_torch

OURS_TO_DINOV2 = {"reg_token": "register_tokens", ".mlp.fc1.": ".mlp.w12.", ".mlp.fc2.": ".mlp.w3."}
OURS_TO_DEIT3 = {".ls1.gamma": ".gamma_1", ".ls2.gamma": ".gamma_2"}
MAE_DECODER = ("mask_token", "decoder_*")
MARKS = re.compile(
    r"mask_token|register_tokens|decoder_embed\.\w+|blocks\.(\d+\.gamma_[12]|\d+\.mlp\.w(12|3)\.\w+|\d+\.\d+\.norm1\.\w+)"
)
"""Names that timm does not have: the last are of blocks in chunks."""

Code = Literal["DINOv2", "DeiT-III", "MAE, DINO, DeiT"]


def code_of(config: ViTConfig) -> Code:
    """The code base whose names a network of this config has."""
    if config.layer_scale is not None and not config.num_positioned_prefix_tokens:
        return "DeiT-III"
    return "DINOv2" if config.layer_scale is not None or config.num_registers else "MAE, DINO, DeiT"


def _spelled(rules: list[Rule], spelling: Mapping[str, str]) -> list[Rule]:
    """timm's rules with other names on their side."""

    def spell(name: str) -> str:
        for timms, theirs in spelling.items():
            name = name.replace(timms, theirs)
        return name

    return [replace(r, theirs=spell(r.theirs)) for r in rules if isinstance(r.theirs, str)]


def table(config: AnyConfig) -> RenameTable:
    assert isinstance(config, ViTConfig)
    # A token is the same normalized before or after it is picked; only MAE's mean has a norm of its own.
    norm = weight_and_bias("fc_norm" if config.pool_norm == "after" and config.pool == "gap" else "norm", "norm")
    placed = [Rule("reg_token", "registers", TOKENS), Rule("pos_embed", POSITION_NAMES, POSITION)]
    rules = [*timm.TOKENS_RULES, *placed, *timm.ENDS, *norm, *timm.BLOCK]
    code = code_of(config)
    if code == "DeiT-III":
        return RenameTable(f"facebook ({code})", _spelled(rules, OURS_TO_DEIT3))
    if code == "DINOv2":
        swiglu = config.activation == "swiglu"
        spelling = {k: v for k, v in OURS_TO_DINOV2.items() if swiglu or "mlp" not in k}
        return RenameTable(f"facebook ({code})", _spelled(rules, spelling), ("mask_token",))
    return RenameTable(f"facebook ({code})", rules, MAE_DECODER)


def recognize(archive: Archive) -> str | None:
    for prefix in ("", "module.", "backbone.", "module.backbone."):
        names = archive.strip_prefix(prefix).tensors
        if "cls_token" not in names or "patch_embed.proj.weight" not in names:
            continue
        head = prefix.replace("backbone.", "head.last_layer.")  # DINO's, beside its backbone
        dino = prefix != head and any(n.startswith(head) for n in archive.tensors)
        if dino or any(MARKS.fullmatch(name) for name in names):
            return prefix
    return None


def unchunked(name: str) -> str:
    """DINOv2 trained with FSDP keeps its blocks in chunks: blocks.CHUNK.LAYER.norm1."""
    return re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", name)


def describe(archive: Archive) -> ModelInfo:
    """Shapes as timm's names have them, conventions as the family's own code does."""
    spelling = {v: k for k, v in (OURS_TO_DINOV2 | OURS_TO_DEIT3).items()}

    def as_timm(name: str) -> str:
        for theirs, timms in spelling.items():
            name = name.replace(theirs, timms)
        return name

    info = timm.describe(replace(archive, tensors=archive.tensors.rename(as_timm), sidecars={}))
    assert isinstance(info.config, ViTConfig)
    family = _family(archive, info.config)
    config = info.config.replace(**family_conventions(family, info.config))
    notes = [n for n in info.notes if "preprocessing" not in n]
    if any(name.startswith("decoder_") for name in archive.tensors):
        notes.append("left aside: the decoder.")
    return info.replace(config=config, family=family, preprocess=default_preprocess(family, config), notes=tuple(notes))


def _family(archive: Archive, config: ViTConfig) -> str:
    names = archive.tensors
    if any(name.endswith((".gamma_1", ".gamma_2")) for name in names):
        return "DeiT3"
    if any(name.startswith("decoder_") for name in names):
        return "MAE"
    marked = config.layer_scale is not None or any(MARKS.fullmatch(name) for name in names)
    return "DINOv2" if marked else "DINO"


def cannot(info: ModelInfo) -> list[str]:
    config = info.config
    if isinstance(config, BiTConfig):
        return ["a BiT ResNet"]
    code, grid = code_of(config), config.grid
    wrong = {
        f"{config.position} positions": config.position not in ("none", "learned-1d"),
        "a network without positions": config.position == "none",
        "positions added at the layers": config.position == "learned-1d" and config.resolved_position_at != "stem",
        f"a grid of {grid[0]}x{grid[1]} patches, which is not square": grid[0] != grid[1],
        "a network without class token": not config.class_token,
        "a hybrid's stem": config.stem is not None,
        "an attention pool": config.pool in ("map", "coca"),
        "class token and mean side by side": config.pool == "token+gap",
        "the tanh layer before the head": bool(config.pre_logits),
        "a norm before the blocks": config.pre_norm,
        "a network without a final norm": config.pool_norm == "none",
        "qk-norm": config.qk_norm,
        "RMSNorm": config.norm == "rms",
        "a patch projection without bias": not config.patch_bias,
        "a head without bias": bool(config.num_classes) and not config.head_bias,
        "SwiGLU outside DINOv2": config.activation == "swiglu" and code != "DINOv2",
        "registers without a position on the class token": bool(config.num_registers)
        and not config.num_positioned_prefix_tokens,
        "a mean over patches normalized first": config.pool == "gap" and config.pool_norm == "before",
        f"a mean over patches in {code}": config.pool == "gap" and code != "MAE, DINO, DeiT",
        f"a distillation token in {code}": config.distilled and code != "MAE, DINO, DeiT",
        "a distillation token without a position": config.distilled and not config.position_on_class,
        f"attention and MLP outputs without bias in {code}": not config.proj_bias and code != "DINOv2",
        "a head in DINOv2": bool(config.num_classes) and code == "DINOv2",
        f"a SwiGLU of width {config.mlp_dim}, no multiple of 8": config.activation == "swiglu"
        and config.mlp_dim % 8 > 0,
    }
    return [name for name, is_so in wrong.items() if is_so]


def drift(info: ModelInfo) -> list[str]:
    """What their code has fixed, and what a bare file cannot tell."""
    config = info.config
    assert isinstance(config, ViTConfig)
    guessed = infer_num_heads(config.width, config.mlp_dim)
    drifts = []
    if config.activation not in ("gelu", "swiglu"):
        drifts.append(f"{config.activation} (their code computes the exact GELU)")
    if config.norm_eps != 1e-6:
        drifts.append(f"a norm epsilon of {config.norm_eps:g} (their code has 1e-6)")
    if config.num_heads != guessed:
        drifts.append(f"num_heads={config.num_heads} (a file does not say how many)")
    if config.uncovered == "ignore":
        drifts.append(EDGE)
    return drifts


def write(path: Path, tensors: Mapping[str, Tensor], info: ModelInfo, overwrite: bool) -> None:
    """A plain state dict, which their `load_state_dict` takes."""
    assert isinstance(info.config, ViTConfig)
    if code_of(info.config) == "DINOv2":  # whose code has one; it stands for what is hidden in training
        tensors = {**tensors, "mask_token": torch.zeros_like(tensors["cls_token"][0])}
    write_torch(path, tensors, overwrite=overwrite)


FACEBOOK = Format(
    name="facebook",
    detect=recognize,
    infer_info=describe,
    table=table,
    write=write,
    unsupported_parts=cannot,
    inexact_conventions=drift,
    ignored_outside=("head.*", "module.head.*", "dino_head.*", "ibot_head.*", "dino_loss.*", "ibot_patch_loss.*"),
    normalize_name=unchunked,
)
