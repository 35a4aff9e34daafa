"""The library and model named by the JSON files beside the weights. They take precedence over tensor names."""

from __future__ import annotations

from typing import Any, NamedTuple

from vitrail.config import pair
from vitrail.config.image import CLIP_MEAN, CLIP_STD
from vitrail.weights.archive import Archive
from vitrail.weights.native import HEADER


class StatedModel(NamedTuple):
    """The model named by a sidecar file."""

    library: str = ""
    """The name of a format; "" if no sidecar file names a model."""
    model: str = ""
    """timm's architecture, or transformers' model_type."""
    file: str = ""


def stated_model(archive: Archive) -> StatedModel:
    """The library and model named by config.json, or by open_clip_config.json with a timm image tower."""
    config = _sidecar_dict(archive, "config.json")
    if HEADER in archive.metadata or config.get("format") == "vitrail":
        return StatedModel("vitrail", "model", "config.json")
    if "architecture" in config and config.get("model_type", "timm_wrapper") == "timm_wrapper":
        return StatedModel("timm", str(config["architecture"]).partition(".")[0], "config.json")
    if config.get("model_type"):
        return StatedModel("huggingface", str(config["model_type"]), "config.json")
    if tower := open_clip_tower(archive).get("timm_model_name"):
        return StatedModel("timm", str(tower), "open_clip_config.json")
    return StatedModel()


def open_clip_tower(archive: Archive) -> dict[str, Any]:
    """The image tower's section of open_clip_config.json; empty if there is none."""
    model = _sidecar_dict(archive, "open_clip_config.json").get("model_cfg")
    vision = model.get("vision_cfg") if isinstance(model, dict) else None
    return vision if isinstance(vision, dict) else {}


def open_clip_pretrained_cfg(archive: Archive) -> dict[str, Any]:
    """open_clip's preprocessing in the form of timm's pretrained_cfg."""
    config, tower = _sidecar_dict(archive, "open_clip_config.json"), open_clip_tower(archive)
    preprocess_cfg = config.get("preprocess_cfg")
    preprocess_cfg = preprocess_cfg if isinstance(preprocess_cfg, dict) else {}
    size = tower.get("image_size", 224)
    return {
        "input_size": (3, *pair(size if isinstance(size, int) else tuple(size))),
        "mean": preprocess_cfg.get("mean") or CLIP_MEAN,
        "std": preprocess_cfg.get("std") or CLIP_STD,
        "interpolation": preprocess_cfg.get("interpolation") or "bicubic",
        "crop_pct": 1.0,
        "crop_mode": "squash" if preprocess_cfg.get("resize_mode") == "squash" else "center",
    }


def _sidecar_dict(archive: Archive, name: str) -> dict[str, Any]:
    content = archive.sidecars.get(name)
    return content if isinstance(content, dict) else {}
