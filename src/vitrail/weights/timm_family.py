"""The model family of a bare file with timm's names, from its training script's arguments and from its tensors.

Many projects use timm's names and preprocess images in different ways. The file's own name is not used.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any

from vitrail.config import ViTConfig, pair
from vitrail.weights.archive import Archive
from vitrail.weights.unsupported import reject_architecture

_SIZES = (
    "tiny|xsmall|small|wee|little|mediumd?|betwixt|base|large|huge|giant|giantopt|gigantic|so150m2?|so400m|intern300m"
)
SUPPORTED_ARCHS = re.compile(
    rf"vit_({_SIZES})_patch\d+(_(plus|clip|quickgelu|siglip|dinov2|tipsv2|gap|map|reg\d|36x1|\d+|miil))*"
    r"|vit_(tiny|small|base|large)_r(26|50)?_s\d+(_p8)?_\d+|eva_large_patch14_\d+|flexivit_(small|base|large)"
    r"|vit_(tiny|small(_plus)?|base|large|huge_plus|7b|giant)_patch16_(dinov3|lingbot)(_qkvb)?"
    r"|swin_(tiny|small|base|large)_patch4_window\d+_\d+|swin_s3_(tiny|small|base)_224"
    r"|swinv2_(tiny|small|base|large)_window\d+(to\d+)?_\d+(to\d+)?"
    r"|test_vit[24]?|deit3?_(tiny|small|medium|base|large|huge)(_distilled)?_patch\d+_\d+|resnetv2_\d+x\d_bit"
)
"""timm architectures that vitrail supports: the plain VisionTransformer, DeiT, hybrids, BiT and Swin."""
FAMILY_WORDS = (
    ("dinov3", "DINOv3"),
    ("tipsv2", "TIPSv2"),
    ("dinov2", "DINOv2"),
    ("dino", "DINO"),
    ("deit3", "DeiT3"),
    ("deit", "DeiT"),
    ("ijepa", "IJEPA"),
    ("mae", "MAE"),
    ("siglip", "SigLIP"),
    ("clip", "CLIP"),
)
"""Words in an architecture, a tag or a script's arguments -> the family; the first match decides."""
SCRIPT_ARGS = (({"norm_pix_loss"}, "MAE"), ({"blr", "nb_classes"}, "MAE"), ({"teacher_temp"}, "DINO"))
"""Sets of arguments that only one project's scripts have -> the family."""


def script_args(archive: Archive) -> dict[str, Any]:
    """Command-line arguments that a training script stored in the checkpoint."""
    args = archive.extras.get("args")
    return args if isinstance(args, dict) else {}


def arch_from_script(archive: Archive) -> tuple[str, str, dict[str, Any]]:
    """(architecture, "", model arguments) from the training script's arguments; empty if they name no architecture."""
    args = script_args(archive)
    for stated in (archive.extras.get("arch"), args.get("model")):
        if isinstance(stated, str):
            name = stated.rpartition("/")[2].partition(".")[0]  # as in hf-hub:timm/NAME.TAG
            reject_architecture(name)
            if SUPPORTED_ARCHS.fullmatch(name):
                kwargs, pool = args.get("model_kwargs"), args.get("gp")
                kwargs = kwargs if isinstance(kwargs, dict) else {}
                return name, "", kwargs | ({"global_pool": pool} if pool else {})
    return "", "", {}


def infer_family(archive: Archive, sidecar_text: str, config: ViTConfig) -> str:
    """The family: from the architecture and tag in a sidecar, else the script's arguments, else the tensors."""
    if sidecar_text:
        return _family_in_text(sidecar_text.lower()) or "ViT"
    args = script_args(archive)
    for names, family in SCRIPT_ARGS:
        if names <= args.keys():
            return family
    for text in (args.get("model"), args.get("arch"), archive.extras.get("arch"), args.get("finetune")):
        if family := _family_in_text(PurePath(str(text)).name.lower()):
            return family
    return _family_by_tensors(archive, config)


def _family_in_text(text: str) -> str:
    return next((family for word, family in FAMILY_WORDS if word in text), "")


def _family_by_tensors(archive: Archive, config: ViTConfig) -> str:
    """The family whose published files have these tensors and these top-level keys."""
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
        return "MAE" if _has_sincos_positions(archive, config) else "DINO"
    return "DeiT" if "model" in sections else "ViT"


def _has_sincos_positions(archive: Archive, config: ViTConfig) -> bool:
    """Whether the positions are MAE's fixed sines and cosines: then every row has the same norm."""
    if config.position == "none":
        return False
    rows = archive.tensors["pos_embed"].flatten(0, -2)[config.num_positioned_prefix_tokens :].float()
    return bool(((rows.square().sum(-1) / (config.width / 2) - 1).abs() < 1e-3).all())
