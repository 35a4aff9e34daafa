"""What a bare file with timm's names shows of its origin: the arguments of the script that wrote it, and its tensors.

Many projects build on timm's names, and prepare images in different ways. The name of the file is no evidence.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any

from vitrail.config import ViTConfig, pair
from vitrail.weights.archive import Archive
from vitrail.weights.unsupported import refuse_architecture

_SIZES = (
    "tiny|xsmall|small|wee|little|mediumd?|betwixt|base|large|huge|giant|giantopt|gigantic|so150m2?|so400m|intern300m"
)
PLAIN = re.compile(
    rf"vit_({_SIZES})_patch\d+(_(plus|clip|quickgelu|siglip|dinov2|tipsv2|gap|map|reg\d|36x1|\d+|miil))*"
    r"|vit_(tiny|small|base|large)_r(26|50)?_s\d+(_p8)?_\d+|eva_large_patch14_\d+|flexivit_(small|base|large)"
    r"|test_vit[24]?|deit3?_(tiny|small|medium|base|large|huge)(_distilled)?_patch\d+_\d+|resnetv2_\d+x\d_bit"
)
"""Architectures that vitrail builds: timm's plain VisionTransformer, its DeiTs, its hybrids and BiT."""
WORDS = (
    ("dinov2", "DINOv2"),
    ("dino", "DINO"),
    ("deit3", "DeiT3"),
    ("deit", "DeiT"),
    ("ijepa", "IJEPA"),
    ("mae", "MAE"),
    ("siglip", "SigLIP"),
    ("clip", "CLIP"),
)
"""Words of an architecture, a tag or a script's arguments -> the family; the first that is there decides."""
SCRIPTS = (({"norm_pix_loss"}, "MAE"), ({"blr", "nb_classes"}, "MAE"), ({"teacher_temp"}, "DINO"))
"""Arguments that only one project's scripts have."""


def arguments(archive: Archive) -> dict[str, Any]:
    """The command-line arguments that a training script kept beside its weights."""
    args = archive.extras.get("args")
    return args if isinstance(args, dict) else {}


def trained(archive: Archive) -> tuple[str, str, dict[str, Any]]:
    """timm's architecture, no tag, and its arguments, from the training script's own; empty where they name none."""
    args = arguments(archive)
    for stated in (archive.extras.get("arch"), args.get("model")):
        if isinstance(stated, str):
            name = stated.rpartition("/")[2].partition(".")[0]  # as in hf-hub:timm/NAME.TAG
            refuse_architecture(name)
            if PLAIN.fullmatch(name):
                given, pool = args.get("model_kwargs"), args.get("gp")
                return name, "", (given if isinstance(given, dict) else {}) | ({"global_pool": pool} if pool else {})
    return "", "", {}


def family_of(archive: Archive, stated: str, config: ViTConfig) -> str:
    """By the architecture and tag that a sidecar states, else by the script's arguments, else by the tensors."""
    if stated:
        return _worded(stated.lower()) or "ViT"
    args = arguments(archive)
    for names, family in SCRIPTS:
        if names <= args.keys():
            return family
    for said in (args.get("model"), args.get("arch"), archive.extras.get("arch"), args.get("finetune")):
        if family := _worded(PurePath(str(said)).name.lower()):
            return family
    return _resembled(archive, config)


def _worded(text: str) -> str:
    return next((family for word, family in WORDS if word in text), "")


def _resembled(archive: Archive, config: ViTConfig) -> str:
    """The family whose published files have these tensors, in a dictionary like this."""
    sections = archive.extras.get("sections", ())
    if config.pre_norm and not config.patch_bias:
        return "CLIP"
    if config.pool == "map":
        return "SigLIP"
    if config.distilled:
        return "DeiT"
    if config.layer_scale is not None:
        return "DINOv2" if pair(config.patch_size) == (14, 14) else "ViT"
    if not config.class_token:
        return "IJEPA" if {"target_encoder", "predictor"} <= set(sections) else "ViT"
    if config.pool == "gap" and config.pool_norm == "after":
        return "MAE"  # as fine-tuned
    if config.stem is None and not config.num_classes and not config.num_registers:
        return "MAE" if _sines(archive, config) else "DINO"
    return "DeiT" if "model" in sections else "ViT"


def _sines(archive: Archive, config: ViTConfig) -> bool:
    """Whether the positions are the fixed sines and cosines of MAE: pairs of them, so each row has the same norm."""
    if config.position == "none":
        return False
    rows = archive.tensors["pos_embed"].flatten(0, -2)[config.num_positioned_prefix_tokens :].float()
    return bool(((rows.square().sum(-1) / (config.width / 2) - 1).abs() < 1e-3).all())
