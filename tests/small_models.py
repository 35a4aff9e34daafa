"""Small models with random weights, for tests of everything around the network."""

from __future__ import annotations

from typing import Any

import numpy as np
from compare import randomized
from PIL import Image

import vitrail
from vitrail.config import NetConfig, PreprocessConfig, StemConfig, ViTConfig
from vitrail.models import build
from vitrail.weights.model_info import ModelInfo

LABELS = ("cat", "dog", "bird", "fish", "frog")
FORMATS = {
    "vitrail": "model",
    "timm": "model",
    "huggingface": "model",
    "torchvision": "model.pth",
    "google": "model.npz",
    "big_vision": "model.npz",
    "facebook": "model.pth",
}
"""Each writable format -> the file name used in tests."""
ONE_BLOCK: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "width": 128,
    "depth": 1,
    "num_heads": 2,
    "mlp_dim": 192,
    "num_classes": len(LABELS),
}
"""Fields of a one-block ViTConfig."""


def small(**changes: Any) -> ViTConfig:
    """A config of 32 x 32 pixels, 16 patches and two blocks that most formats can express."""
    return ViTConfig(**ONE_BLOCK | {"depth": 2, "mlp_dim": 256, "activation": "gelu", "resample": "timm"} | changes)


POOLS = {
    "token": small(),
    "registers": small(num_registers=3),
    "distilled": small(distilled=True),
    "gap": small(pool="gap", class_token=False),
    "token+gap": small(pool="token+gap"),
    "map": small(pool="map", class_token=False),
    "coca": small(pool="coca", pool_width=6, pool_heads=3),
    "hybrid": small(image_size=64, patch_size=1, stem=StemConfig(layers=(1, 1), width_factor=0.5)),
}
"""A config of each kind of pooling, of extra tokens, and of a hybrid."""


def model(config: NetConfig, **info: Any) -> vitrail.Model:
    """A Model with random weights; keywords are fields of its ModelInfo."""
    labels = LABELS if config.num_classes == len(LABELS) else None
    values = {"preprocess": PreprocessConfig(image_size=config.image_size), "labels": labels}
    return vitrail.Model(randomized(build(config)), ModelInfo(config=config, **values | info))


def gradient(width: int = 50, height: int = 40) -> Image.Image:
    """An image in which every pixel differs from its neighbors."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([x, y, 255 - x], -1).astype(np.uint8))
