"""timm's pretrained_cfg: the preprocessing and the names of the first and last layer, as in its config.json."""

from __future__ import annotations

import math
from typing import Any

from vitrail.config import pair
from vitrail.weights.model_info import ModelInfo


def pretrained_cfg(
    info: ModelInfo, first: str, classifier: str | list[str], *, fixed_input_size: bool = True
) -> dict[str, Any]:
    """The pretrained_cfg of a model whose first convolution and classifier have these names in timm."""
    config, preprocess = info.config, info.preprocess
    size = pair(preprocess.image_size)
    cfg: dict[str, Any] = {
        "tag": "vitrail",
        "input_size": [config.channels, *size],
        "fixed_input_size": fixed_input_size,
        "interpolation": "box" if preprocess.interpolation == "area" else preprocess.interpolation,
        "crop_pct": _crop_pct(min(size), preprocess.resize_to),
        "crop_mode": "center" if preprocess.resize == "short" else "squash",
        "mean": list(preprocess.mean),
        "std": list(preprocess.std),
        "num_classes": config.num_classes,
        "license": "",
        "first_conv": first,
        "classifier": classifier,
    }
    if config.channels != 3:
        cfg.pop("first_conv")  # timm would convert its filters as if they had three channels
    return cfg


def _crop_pct(crop: int, resize_to: int | None) -> float:
    """The shortest decimal for which timm (floor(crop / crop_pct)) gives this resize."""
    if resize_to is None or resize_to == crop:
        return 1.0
    rounded = (round(crop / (resize_to + 0.5), digits) for digits in range(1, 12))
    return next((r for r in rounded if r and math.floor(crop / r) == resize_to), crop / (resize_to + 0.5))
