"""Facebook's own .pth files where they differ from timm's names: DINOv2, DeiT-III, MAE with decoder.

DeiT, DINO and MAE's encoder have timm's names and are read as such.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from vitrail.config import BiTConfig, ViTConfig
from vitrail.models.families import FAMILIES
from vitrail.weights import timm
from vitrail.weights.card import Card, preprocess_for
from vitrail.weights.files import Archive
from vitrail.weights.format import Format
from vitrail.weights.rules import POSITION, POSITION_NAMES, TOKENS, AnyConfig, Rule, Table
from vitrail.weights.write import write_torch

OURS_TO_DINOV2 = {"reg_token": "register_tokens", ".mlp.fc1.": ".mlp.w12.", ".mlp.fc2.": ".mlp.w3."}
OURS_TO_DEIT3 = {".ls1.gamma": ".gamma_1", ".ls2.gamma": ".gamma_2"}
MAE_DECODER = ("mask_token", "decoder_*")


def _spelled(rules: list[Rule], spelling: Mapping[str, str]) -> list[Rule]:
    """timm's rules with other names on their side."""

    def spell(name: str) -> str:
        for timms, theirs in spelling.items():
            name = name.replace(timms, theirs)
        return name

    return [replace(r, theirs=spell(r.theirs)) for r in rules if isinstance(r.theirs, str)]


def table(config: AnyConfig) -> Table:
    assert isinstance(config, ViTConfig)
    norm = timm.both("fc_norm" if config.pool_norm == "after" else "norm", "norm")
    placed = [Rule("reg_token", "registers", TOKENS), Rule("pos_embed", POSITION_NAMES, POSITION)]
    rules = [*timm.TOKENS_RULES, *placed, *timm.ENDS, *norm, *timm.BLOCK]
    if config.layer_scale is not None and not config.placed_prefix:
        return Table("facebook (DeiT-III)", _spelled(rules, OURS_TO_DEIT3))
    if config.layer_scale is not None or config.registers:
        swiglu = config.activation == "swiglu"
        spelling = {k: v for k, v in OURS_TO_DINOV2.items() if swiglu or "mlp" not in k}
        return Table("facebook (DINOv2)", _spelled(rules, spelling), ("mask_token",))
    return Table("facebook (MAE, DINO, DeiT)", rules, MAE_DECODER)


def recognise(archive: Archive) -> str | None:
    for prefix in ("", "module.", "backbone.", "module.backbone."):
        names = archive.under(prefix).tensors
        ours = "patch_embed.proj.weight" in names and "cls_token" in names
        marks = ("mask_token", "blocks.0.gamma_1", "register_tokens", "blocks.0.mlp.w12.weight")
        chunked = any(re.match(r"blocks\.\d+\.\d+\.norm1", n) for n in names)
        if ours and (chunked or any(mark in names for mark in marks)):
            return prefix
    return None


def unchunked(name: str) -> str:
    """DINOv2 trained with FSDP keeps its blocks in chunks: blocks.CHUNK.LAYER.norm1."""
    return re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", name)


def describe(archive: Archive) -> Card:
    """Shapes as timm's names have them, conventions as the family's own code does."""
    spelling = {v: k for k, v in (OURS_TO_DINOV2 | OURS_TO_DEIT3).items()}

    def as_timm(name: str) -> str:
        for theirs, timms in spelling.items():
            name = name.replace(theirs, timms)
        return name

    card = timm.describe(replace(archive, tensors=archive.tensors.renamed(as_timm), sidecars={}))
    assert isinstance(card.config, ViTConfig)
    names = archive.tensors
    family = "DeiT3" if "blocks.0.gamma_1" in names else "MAE" if "decoder_embed.weight" in names else "DINOv2"
    config = card.config
    if family == "DINOv2":
        config = config.but(resample="timm" if config.registers else "dinov2")
    notes = tuple(n for n in card.notes if "preprocessing" not in n)
    usual = preprocess_for(FAMILIES[family].preprocess, config)
    if family == "DINOv2":  # trained at 518, evaluated at 224
        usual = preprocess_for(FAMILIES[family].preprocess, config.but(image=224))
    return card.but(config=config, family=family, preprocess=usual, notes=notes)


def cannot(card: Card) -> list[str]:
    config = card.config
    if isinstance(config, BiTConfig):
        return ["a BiT ResNet"]
    wrong = {
        f"{config.position} positions": config.position != "learned-1d",
        "positions added at the layers": config.place != "stem",
        "a network without class token": not config.class_token,
        "a hybrid's stem": config.stem is not None,
        "an attention pool": config.pool == "map",
        "class token and mean side by side": config.pool == "token+gap",
        "the tanh layer before the head": bool(config.pre_logits),
        "a norm before the blocks": config.pre_norm,
        "qk-norm": config.qk_norm,
        "RMSNorm": config.norm == "rms",
        "a patch projection without bias": not config.patch_bias,
        "a head without bias": bool(config.classes) and not config.head_bias,
        "SwiGLU outside DINOv2": config.activation == "swiglu" and config.layer_scale is None,
        "registers without a position on the class token": bool(config.registers) and not config.placed_prefix,
        "a mean over patches normalised first": config.pool == "gap" and config.pool_norm == "before",
    }
    return [name for name, is_so in wrong.items() if is_so]


def drift(card: Card) -> list[str]:
    config = card.config
    assert isinstance(config, ViTConfig)
    drifts = []
    if config.activation not in ("gelu", "swiglu"):
        drifts.append(f"{config.activation} (their code computes the exact GELU)")
    if config.norm_eps != 1e-6:
        drifts.append(f"a norm epsilon of {config.norm_eps:g} (their code has 1e-6)")
    return drifts


def write(path: Path, tensors: Mapping[str, Tensor], card: Card, overwrite: bool) -> None:
    """A plain state dict, which their `load_state_dict` takes."""
    write_torch(path, tensors, overwrite=overwrite)


FACEBOOK = Format(
    name="facebook",
    recognise=recognise,
    describe=describe,
    table=table,
    write=write,
    cannot=cannot,
    drift=drift,
    outside=("head.*", "module.head.*", "dino_head.*", "ibot_head.*", "dino_loss.*", "ibot_patch_loss.*"),
    spelling=unchunked,
)
