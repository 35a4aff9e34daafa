"""Hugging Face's preprocessor_config.json <-> how images are prepared."""

from __future__ import annotations

import math
import re
from typing import Any, Literal

from vitrail.config import Pair, PreprocessConfig, pair
from vitrail.config.image import CLIP_MEAN, CLIP_STD, HALF
from vitrail.weights.archive import Archive
from vitrail.weights.model_info import preprocess_for_channels

RESAMPLE: dict[int, Literal["nearest", "lanczos", "bilinear", "bicubic", "area"]]
RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "area"}
"""Pillow's numbers."""

_HALF = {"image_mean": HALF, "image_std": HALF}
_CLIP = {"image_mean": CLIP_MEAN, "image_std": CLIP_STD, "resample": 3, "size": {"shortest_edge": 224}}
_CROP = {"do_center_crop": True, "crop_size": 224}
PROCESSORS: dict[str, dict[str, Any]] = {
    "ViT": {**_HALF, "size": {"height": 224, "width": 224}, "resample": 2},
    "DeiT": {**_HALF, **_CROP, "size": {"height": 256, "width": 256}, "resample": 3},
    "CLIP": {**_CLIP, **_CROP},
    "Bit": {**_CLIP, **_CROP},
    "Siglip": {**_HALF, "size": {"height": 224, "width": 224}, "resample": 3},
}
"""What each processor does where its file is silent."""
SHORT = ("CLIP", "Bit", "Siglip")
"""Processors that take a plain number for the short side; the others, for both sides."""
USUAL = {"vit": "ViT", "deit": "DeiT", "clip": "CLIP", "siglip": "Siglip"}
"""Kind of network -> the processor its config stands for; the others have Bit's."""


def said(archive: Archive) -> dict[str, Any] | None:
    """The processor's file, or its part of a file about images and words."""
    alone = archive.sidecars.get("preprocessor_config.json")
    joint = archive.sidecars.get("processor_config.json")
    found = alone or (joint.get("image_processor") if isinstance(joint, dict) else None)
    return found if isinstance(found, dict) else None


def read(
    stated: dict[str, Any], kind: str, image_size: tuple[int, int], channels: int
) -> tuple[PreprocessConfig, list[str]]:
    """As the file says, for a network of this own size; and what could not be followed."""
    named = str(stated.get("image_processor_type") or stated.get("feature_extractor_type") or "")
    name = re.sub(r"(ImageProcessor|FeatureExtractor)\w*$", "", named) or USUAL.get(kind, "Bit")
    values = PROCESSORS.get(name, PROCESSORS["ViT"]) | {k: v for k, v in stated.items() if v is not None}
    notes: list[str] = []
    if name not in PROCESSORS:
        notes.append(
            f"preprocessor_config.json is for {named}: its sizes, mean and std are followed, and nothing that only "
            "this class does."
        )
    size = _resizing(values, name in SHORT, image_size, notes)
    mean, std = _normalizing(values)
    resample = values["resample"]
    if resample not in RESAMPLE:
        notes.append(f"preprocessor_config.json asks for Pillow's filter {resample}: bilinear is used.")
    filtered = RESAMPLE.get(resample, "bilinear")
    config = PreprocessConfig(**size, crop_rounding="floor", interpolation=filtered, mean=mean, std=std)
    return preprocess_for_channels(config, channels), notes


def _resizing(values: dict[str, Any], short: bool, image_size: tuple[int, int], notes: list[str]) -> dict[str, Any]:
    if not values.get("do_resize", True):
        notes.append("preprocessor_config.json does not resize images; they are squashed to the network's own size.")
        return {"image_size": image_size, "resize": "squash"}
    size = _size(values["size"], short)
    crop = _pair(values["crop_size"]) if values.get("do_center_crop") and values.get("crop_size") else None
    if "shortest_edge" in size:
        if crop is None:
            notes.append("preprocessor_config.json does not crop; the middle of the network's own size is taken.")
        return {"image_size": crop or image_size, "resize": "short", "resize_to": int(size["shortest_edge"])}
    if "height" not in size:
        notes.append(f"preprocessor_config.json has a size vitrail does not know ({size}); images are squashed.")
        return {"image_size": image_size, "resize": "squash"}
    whole = int(size["height"]), int(size["width"])
    if crop is None or crop == whole:
        return {"image_size": whole, "resize": "squash"}
    grown, side = min(whole), min(crop)
    if (crop[0] * grown // side, crop[1] * grown // side) != whole:
        notes.append(f"preprocessor_config.json crops {crop} of {whole}; images are squashed to {crop}.")
        return {"image_size": crop, "resize": "squash"}
    return {"image_size": crop, "resize": "squash", "resize_to": grown}


def _size(size: Any, short: bool) -> dict[str, int]:
    if isinstance(size, dict):
        return {k: int(v) for k, v in size.items() if v is not None}
    if isinstance(size, int) and short:
        return {"shortest_edge": size}
    height, width = _pair(size)
    return {"height": height, "width": width}


def _pair(size: Any) -> tuple[int, int]:
    if isinstance(size, dict):
        return (size["height"], size["width"]) if "height" in size else pair(size["shortest_edge"])
    return pair(size if isinstance(size, int) else tuple(size))


def _normalizing(values: dict[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and spread of values in [0, 1], whatever range the file counts in."""
    scale = 1.0
    if not values.get("do_rescale", True):
        scale = 255.0
    elif (factor := values.get("rescale_factor")) is not None:
        scale = 1.0 if math.isclose(factor * 255, 1, rel_tol=1e-6) else factor * 255
    mean, std = values["image_mean"], values["image_std"]
    if not values.get("do_normalize", True):
        mean, std = [0.0] * len(mean), [1.0] * len(mean)
    return tuple(m / scale for m in mean), tuple(s / scale for s in std)


def written(preprocess: PreprocessConfig, kind: str) -> dict[str, Any]:
    """preprocessor_config.json; its library always antialiases, and always rounds a crop's place down."""
    crop = pair(preprocess.image_size)
    values: dict[str, Any] = {"do_resize": True}
    if preprocess.resize == "short":
        name = "CLIP" if kind == "clip" else "Bit"
        values["size"] = {"shortest_edge": preprocess.resize_to or max(crop)}
    elif preprocess.resize_to in (None, min(crop)):
        name = "Siglip" if kind == "siglip" else "ViT"
        values["size"] = _box(crop)
    else:
        name, grown = "DeiT", preprocess.resize_to or 0
        values["size"] = _box((crop[0] * grown // min(crop), crop[1] * grown // min(crop)))
    if name in ("CLIP", "Bit", "DeiT"):
        values |= {"do_center_crop": True, "crop_size": _box(crop)}
    return values | {
        "image_processor_type": f"{name}ImageProcessor",
        "do_convert_rgb": preprocess.channels == 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocess.mean),
        "image_std": list(preprocess.std),
        "resample": next(number for number, word in RESAMPLE.items() if word == preprocess.interpolation),
    }


def _box(size: Pair) -> dict[str, int]:
    height, width = pair(size)
    return {"height": height, "width": width}
