"""Families of public Vision Transformers, and how each differs from the original.

A family is a set of conventions that a checkpoint's tensors do not show (which GELU, which epsilon, how
positions are resampled, the preprocessing). `verified_against` states what this project's tests compare
the family's outputs with: its authors' code, or the most used reimplementation where that does not run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vitrail.config import NetConfig, PreprocessConfig, SwinConfig, ViTConfig
from vitrail.config.image import CLIP_MEAN, CLIP_STD, IMAGENET_MEAN, IMAGENET_STD


@dataclass(frozen=True)
class Family:
    """Settings that differ from ViTConfig's defaults, and the default preprocessing."""

    title: str
    config_overrides: dict[str, Any] = field(default_factory=dict)
    preprocess: PreprocessConfig = field(default_factory=PreprocessConfig)
    """At 224 pixels."""
    crop_fraction: Callable[[int], float] | None = None
    """Image size -> crop size / resized short side (timm's crop_pct); None: no crop."""
    eval_image_size: int | None = None
    """Image size in evaluation, where it differs from that of the position embeddings."""
    verified_against: str = ""


ORIGINAL = PreprocessConfig(antialias=False)
BIG_VISION = PreprocessConfig(resize="short", resize_to=256, interpolation="area", crop_rounding="floor")
DEIT = PreprocessConfig(resize="short", resize_to=256, interpolation="bicubic", mean=IMAGENET_MEAN, std=IMAGENET_STD)
DEIT3 = DEIT.replace(resize_to=224)
CLIP = PreprocessConfig(resize="short", resize_to=224, interpolation="bicubic", mean=CLIP_MEAN, std=CLIP_STD)
SIGLIP = PreprocessConfig(interpolation="bicubic")
BIT = PreprocessConfig(antialias=False)

# Exact GELU, and bicubic resampling without antialias, as in DeiT's and MAE's code.
_TORCH = {"activation": "gelu", "resample": "huggingface"}
_DINO = {"activation": "gelu", "resample": "dinov2", "num_classes": 0}


def _crop_875(size: int) -> float:
    return 0.875


def _no_crop(size: int) -> float:
    return 1.0


def _mae_crop(size: int) -> float:
    return 0.875 if size <= 224 else 1.0


def timm_crop_fraction(size: int) -> float:
    """timm's crop_pct for its own ViTs: 0.9 at 224, 1.0 from 384."""
    return 0.9 if size < 384 else 1.0


TIMM = Family(
    "ViT as timm prepares it",
    preprocess=PreprocessConfig(resize="short", resize_to=248, interpolation="bicubic"),
    crop_fraction=timm_crop_fraction,
)

FAMILIES: dict[str, Family] = {
    "ViT": Family(
        "original ViT and augreg (Dosovitskiy et al. 2020, Steiner et al. 2021)",
        preprocess=ORIGINAL,
        verified_against="golden outputs of google-research/vision_transformer; timm; transformers; torchvision",
    ),
    "BV": Family(
        "big_vision's ViT (Beyer et al. 2022: gap, sin-cos positions)",
        {"class_token": False, "pool": "gap", "position": "sincos-2d"},
        preprocess=BIG_VISION,
        crop_fraction=_crop_875,
        verified_against="golden outputs of google-research/big_vision",
    ),
    "DeiT": Family(
        "DeiT, plain and distilled (Touvron et al. 2020)",
        _TORCH,
        preprocess=DEIT,
        crop_fraction=_crop_875,
        verified_against="timm (the authors build on it); transformers",
    ),
    "DeiT3": Family(
        "DeiT-III (Touvron et al. 2022)",
        _TORCH | {"layer_scale": 1e-6, "position_on_class": False},
        preprocess=DEIT3,
        crop_fraction=_no_crop,
        verified_against="timm",
    ),
    "MAE": Family(
        "masked autoencoders (He et al. 2021)",
        _TORCH | {"num_classes": 0},
        preprocess=DEIT,
        crop_fraction=_mae_crop,
        verified_against="timm; transformers",
    ),
    "IJEPA": Family(
        "I-JEPA (Assran et al. 2023)",
        _TORCH | {"num_classes": 0, "class_token": False, "pool": "gap"},
        preprocess=DEIT,
        crop_fraction=_crop_875,
        verified_against="transformers",
    ),
    "DINO": Family(
        "DINO (Caron et al. 2021)",
        _DINO,
        preprocess=DEIT,
        crop_fraction=_crop_875,
        verified_against="timm; transformers",
    ),
    "DINOv2": Family(
        "DINOv2, with and without registers (Oquab et al. 2023, Darcet et al. 2023)",
        _DINO | {"layer_scale": 1e-5},
        preprocess=DEIT,
        crop_fraction=_crop_875,
        eval_image_size=224,
        verified_against="timm; transformers",
    ),
    "TIPSv2": Family(
        "TIPSv2's image towers (Google 2026)",
        {"activation": "gelu", "resample": "tipsv2", "num_classes": 0, "layer_scale": 1.0, "num_registers": 1},
        preprocess=PreprocessConfig(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)),
        verified_against="timm; transformers",
    ),
    "DINOv3": Family(
        "DINOv3 (Siméoni et al. 2025), EUPE, LingBot-Vision",
        {
            "activation": "gelu",
            "num_classes": 0,
            "layer_scale": 1e-5,
            "position": "rope-2d",
            "num_registers": 4,
            "norm_eps": 1e-5,
            "key_bias": False,
        },
        preprocess=PreprocessConfig(mean=IMAGENET_MEAN, std=IMAGENET_STD),
        verified_against="golden outputs of facebookresearch/dinov3; timm; transformers",
    ),
    "CLIP": Family(
        "CLIP's image towers (Radford et al. 2021)",
        {
            "activation": "gelu-quick",
            "norm_eps": 1e-5,
            "pre_norm": True,
            "patch_bias": False,
            "head_bias": False,
            "resample": "timm",
        },
        preprocess=CLIP,
        crop_fraction=_no_crop,
        verified_against="golden outputs of openai/CLIP and mlfoundations/open_clip; timm; transformers",
    ),
    "SigLIP": Family(
        "SigLIP's image towers (Zhai et al. 2023)",
        {"class_token": False, "pool": "map", "num_classes": 0, "resample": "timm"},
        preprocess=SIGLIP,
        verified_against="timm; transformers",
    ),
    "BiT": Family(
        "BiT's ResNets (Kolesnikov et al. 2019)",
        preprocess=BIT,
        verified_against="golden outputs of google-research/big_vision; timm; transformers",
    ),
    "Swin": Family(
        "Swin Transformer (Liu et al. 2021)",
        preprocess=DEIT,
        crop_fraction=_crop_875,
        verified_against="golden outputs of microsoft/Swin-Transformer; timm; transformers; torchvision",
    ),
    "SwinV2": Family(
        "Swin Transformer V2 (Liu et al. 2021)",
        {"version": 2},
        preprocess=DEIT,
        crop_fraction=_crop_875,
        verified_against="golden outputs of microsoft/Swin-Transformer; timm; transformers; torchvision",
    ),
}


def default_family(config: NetConfig) -> str:
    """The family of a new network: its conventions and preprocessing."""
    if isinstance(config, ViTConfig):
        return "DeiT" if config.distilled else "ViT"
    if isinstance(config, SwinConfig):
        return "Swin" if config.version == 1 else "SwinV2"
    return "BiT"
