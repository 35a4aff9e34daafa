"""The public families of Vision Transformers: how each departs from the original.

A family is a set of conventions no tensor shows (which GELU, which epsilon, how positions are
resampled, how images are prepared), and where its checkpoints come from. `checked` says what
the family's numbers have been compared with by this project's tests: its authors' own code, or the
most used reimplementation where that code does not run here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vitrail.config import PreprocessConfig
from vitrail.config.image import CLIP_MEAN, CLIP_STD, IMAGENET_MEAN, IMAGENET_STD


@dataclass(frozen=True)
class Family:
    """Conventions that differ from ViTConfig's defaults, and the usual preprocessing."""

    title: str
    config_overrides: dict[str, Any] = field(default_factory=dict)
    preprocess: PreprocessConfig = field(default_factory=PreprocessConfig)
    """At 224 pixels."""
    crop_fraction: Callable[[int], float] | None = None
    """Share of the resized short side that the crop keeps, by the image's size; None: no crop."""
    eval_image_size: int | None = None
    """Pixels it is evaluated at, where those are not the size of its positions."""
    verified_against: str = ""


ORIGINAL = PreprocessConfig(antialias=False)
BIG_VISION = PreprocessConfig(resize="short", resize_to=256, interpolation="area", crop_rounding="floor")
DEIT = PreprocessConfig(resize="short", resize_to=256, interpolation="bicubic", mean=IMAGENET_MEAN, std=IMAGENET_STD)
DEIT3 = DEIT.replace(resize_to=224)
CLIP = PreprocessConfig(resize="short", resize_to=224, interpolation="bicubic", mean=CLIP_MEAN, std=CLIP_STD)
SIGLIP = PreprocessConfig(interpolation="bicubic")
BIT = PreprocessConfig(antialias=False)

# The exact GELU, and positions resized bicubically without antialias, as DeiT's and MAE's code does.
_TORCH = {"activation": "gelu", "resample": "huggingface"}
_DINO = {"activation": "gelu", "resample": "dinov2", "num_classes": 0}


def _eighths(size: int) -> float:
    return 0.875


def _all(size: int) -> float:
    return 1.0


def _mae(size: int) -> float:
    return 0.875 if size <= 224 else 1.0


def timm_crop_fraction(size: int) -> float:
    """What timm's own ViTs keep: 0.9 at 224, everything from 384 on."""
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
        crop_fraction=_eighths,
        verified_against="golden outputs of google-research/big_vision",
    ),
    "DeiT": Family(
        "DeiT, plain and distilled (Touvron et al. 2020)",
        _TORCH,
        preprocess=DEIT,
        crop_fraction=_eighths,
        verified_against="timm (the authors build on it); transformers",
    ),
    "DeiT3": Family(
        "DeiT-III (Touvron et al. 2022)",
        _TORCH | {"layer_scale": 1e-6, "position_on_class": False},
        preprocess=DEIT3,
        crop_fraction=_all,
        verified_against="timm",
    ),
    "MAE": Family(
        "masked autoencoders (He et al. 2021)",
        _TORCH | {"num_classes": 0},
        preprocess=DEIT,
        crop_fraction=_mae,
        verified_against="timm; transformers",
    ),
    "IJEPA": Family(
        "I-JEPA (Assran et al. 2023)",
        _TORCH | {"num_classes": 0, "class_token": False, "pool": "gap"},
        preprocess=DEIT,
        crop_fraction=_eighths,
        verified_against="transformers",
    ),
    "DINO": Family(
        "DINO (Caron et al. 2021)",
        _DINO,
        preprocess=DEIT,
        crop_fraction=_eighths,
        verified_against="timm; transformers",
    ),
    "DINOv2": Family(
        "DINOv2, with and without registers (Oquab et al. 2023, Darcet et al. 2023)",
        _DINO | {"layer_scale": 1e-5},
        preprocess=DEIT,
        crop_fraction=_eighths,
        eval_image_size=224,
        verified_against="timm; transformers",
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
        crop_fraction=_all,
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
}
