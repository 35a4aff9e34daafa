"""Which library and model the JSON files beside the weights name. Where they name one, they decide, not the tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

from vitrail.config import pair
from vitrail.config.image import CLIP_MEAN, CLIP_STD
from vitrail.weights.archive import Archive
from vitrail.weights.native import HEADER


class StatedModel(NamedTuple):
    """What a sidecar says the weights are."""

    library: str = ""
    """The name of a format; "" where no sidecar names a model."""
    model: str = ""
    """timm's architecture, or transformers' model_type."""
    file: str = ""


def stated_model(archive: Archive) -> StatedModel:
    """The library and the model that config.json names, or open_clip_config.json where its tower is timm's."""
    whole = _dict(archive, "config.json")
    if HEADER in archive.metadata or whole.get("format") == "vitrail":
        return StatedModel("vitrail", "model", "config.json")
    if "architecture" in whole and whole.get("model_type", "timm_wrapper") == "timm_wrapper":
        return StatedModel("timm", str(whole["architecture"]).partition(".")[0], "config.json")
    if whole.get("model_type"):
        return StatedModel("huggingface", str(whole["model_type"]), "config.json")
    if tower := open_clip_tower(archive).get("timm_model_name"):
        return StatedModel("timm", str(tower), "open_clip_config.json")
    return StatedModel()


def open_clip_tower(archive: Archive) -> dict[str, Any]:
    """The image tower's part of open_clip_config.json; empty without one."""
    model = _dict(archive, "open_clip_config.json").get("model_cfg")
    vision = model.get("vision_cfg") if isinstance(model, dict) else None
    return vision if isinstance(vision, dict) else {}


def open_clip_pretrained_cfg(archive: Archive) -> dict[str, Any]:
    """How open_clip prepares images, in the words of timm's pretrained_cfg."""
    whole, tower = _dict(archive, "open_clip_config.json"), open_clip_tower(archive)
    stated = whole.get("preprocess_cfg")
    stated = stated if isinstance(stated, dict) else {}
    size = tower.get("image_size", 224)
    return {
        "input_size": (3, *pair(size if isinstance(size, int) else tuple(size))),
        "mean": stated.get("mean") or CLIP_MEAN,
        "std": stated.get("std") or CLIP_STD,
        "interpolation": stated.get("interpolation") or "bicubic",
        "crop_pct": 1.0,
        "crop_mode": "squash" if stated.get("resize_mode") == "squash" else "center",
    }


def _dict(archive: Archive, name: str) -> dict[str, Any]:
    found = archive.sidecars.get(name)
    return found if isinstance(found, dict) else {}
