"""The settings from which experiments derive their arms, for each scale.

tiny    a ViT of width 64 on scikit-learn's 1,797 digits of 8 px: seconds per run on one CPU core
gpu     a ViT of width 128 on CIFAR-10: seconds per run, many runs at a time on one GPU
paper   the paper's B/16 on ImageNet-21k, for those who have the data: checked by a dry run
"""

from __future__ import annotations

from typing import Any

from vitrail.config import (
    AugmentConfig,
    DataConfig,
    OptimConfig,
    PreprocessConfig,
    ScheduleConfig,
    TrainConfig,
    ViTConfig,
    epochs,
    pair,
)
from vitrail.config.image import preprocess_for_size
from vitrail.recipes.cifar10 import MEAN, STD
from vitrail.recipes.digits import small_gray_vit
from vitrail.recipes.imagenet import SHARDS, SHARDS_21K, imagenet21k_b16
from vitrail.reproduction.arm import Scale

LEARNING_RATES: dict[Scale, tuple[float, ...]] = {
    "tiny": (3e-3, 1e-3, 1e-2),
    "gpu": (2e-3, 1e-3, 4e-3),
    "paper": (1e-3, 3e-4, 3e-3),
}
"""The learning rates that every arm may choose from, the most likely first."""

NOMINAL_IMAGES = {"digits": 1_437, "mnist": 60_000, "cifar10": 50_000, SHARDS: 1_281_167, SHARDS_21K: 14_000_000}
"""Training images of each dataset, for estimates where the data is not on this machine."""


def base_config(scale: Scale, data: DataConfig | None = None, **changes: Any) -> TrainConfig:
    """The settings of a scale. `data` replaces its data; `changes` replace fields of TrainConfig.

    A part of the training images is held out to select learning rates, so that the test images are used once.
    """
    config = {"tiny": _digits, "gpu": _cifar10, "paper": imagenet21k_b16}[scale]()
    chosen = config.data if data is None else data
    if chosen.held_out is None:
        chosen = chosen.replace(held_out={"tiny": 0.2, "gpu": 0.1, "paper": 0.001}[scale])
    return config.replace(
        **{
            "data": chosen.to_dict(),
            "keep": "last",
            "grad_accum_steps": 8 if scale == "paper" else 1,
            "evaluate_every": None,
            "checkpoint_every": epochs(10),
            "compare": (),
            **changes,
        }
    )


def recipe_config(recipe: TrainConfig, scale: Scale, data: DataConfig | None = None) -> TrainConfig:
    """A recipe's settings, prepared for an experiment as those of a scale are."""
    fields = ("model", "preprocess", "augment", "objective", "optim", "schedule", "duration", "batch_size", "classify")
    changes = {name: getattr(recipe, name) for name in (*fields, "masked_patch", "ema", "compile")}
    return base_config(scale, recipe.data if data is None else data, **changes)


def vary_model(config: TrainConfig, **fields: Any) -> TrainConfig:
    """The settings with fields of the network replaced; the preprocessing follows its image size."""
    assert config.model is not None
    model = config.model.replace(**fields)
    changes: dict[str, Any] = {"model": model.to_dict()}
    if config.preprocess is not None:
        changes["preprocess"] = config.preprocess.replace(image_size=model.image_size).to_dict()
    return config.replace(**changes)


def at_size(config: TrainConfig, size: int) -> TrainConfig:
    """The settings at another image size, with the preprocessing's margin and the random shifts in proportion."""
    assert config.model is not None
    assert config.preprocess is not None
    pad = config.augment.pad
    if config.augment.crop == "pad":
        pad = max(round(pad * size / pair(config.preprocess.image_size)[0]), 1)
    return config.replace(
        model=config.model.replace(image_size=size),
        preprocess=preprocess_for_size(config.preprocess, (size, size), config.model.channels).to_dict(),
        augment=config.augment.replace(pad=pad).to_dict(),
    )


def _digits() -> TrainConfig:
    return TrainConfig(
        model=small_gray_vit(image_size=8, patch_size=2, depth=4, mlp_dim=128),
        preprocess=PreprocessConfig(image_size=8, mean=(0.5,), std=(0.5,)),
        data=DataConfig(source="digits"),
        augment=AugmentConfig(scale=(0.7, 1.0), ratio=(0.85, 1.18), flip=0.0),
        optim=OptimConfig(lr=3e-3, weight_decay=0.05),
        schedule=ScheduleConfig(kind="cosine", warmup=epochs(4)),
        duration=epochs(40),
        batch_size=128,
    )


def _cifar10() -> TrainConfig:
    return TrainConfig(
        model=ViTConfig(
            image_size=32, patch_size=4, num_classes=0, width=128, depth=4, num_heads=2, mlp_dim=512, activation="gelu"
        ),
        preprocess=PreprocessConfig(image_size=32, mean=MEAN, std=STD),
        data=DataConfig(source="cifar10"),
        augment=AugmentConfig(crop="pad", pad=4, flip=0.5),
        optim=OptimConfig(lr=2e-3, weight_decay=0.05),
        schedule=ScheduleConfig(kind="cosine", warmup=epochs(1)),
        duration=epochs(10),
        batch_size=512,
        compile=True,
    )
