"""Hugging Face's preprocessor_config.json <-> PreprocessConfig."""

from __future__ import annotations

import math
import re
from typing import Any, Literal

from vitrail.config import Pair, PreprocessConfig, pair
from vitrail.config.image import CLIP_MEAN, CLIP_STD, HALF, IMAGENET_MEAN, IMAGENET_STD, preprocess_for_channels
from vitrail.weights.archive import Archive

RESAMPLE: dict[int, Literal["nearest", "lanczos", "bilinear", "bicubic", "area"]]
RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "area"}
"""Pillow's numbers of its resampling filters."""

_HALF = {"image_mean": HALF, "image_std": HALF}
_CLIP = {"image_mean": CLIP_MEAN, "image_std": CLIP_STD, "resample": 3, "size": {"shortest_edge": 224}}
_IMAGENET = {"image_mean": IMAGENET_MEAN, "image_std": IMAGENET_STD}
_CROP = {"do_center_crop": True, "crop_size": 224}
PROCESSOR_DEFAULTS: dict[str, dict[str, Any]] = {
    "ViT": {**_HALF, "size": {"height": 224, "width": 224}, "resample": 2},
    "DeiT": {**_HALF, **_CROP, "size": {"height": 256, "width": 256}, "resample": 3},
    "CLIP": {**_CLIP, **_CROP},
    "Bit": {**_CLIP, **_CROP},
    "DINOv3ViT": {**_IMAGENET, "size": {"height": 224, "width": 224}, "resample": 2},
    "Tipsv2": {**_HALF, "size": {"height": 448, "width": 448}, "resample": 2, "do_normalize": False},
    "Siglip": {**_HALF, "size": {"height": 224, "width": 224}, "resample": 3},
}
"""Defaults of each image processor class for values that the file omits."""
SHORT_SIDE = ("CLIP", "Bit", "Siglip")
"""Processors that take a single number as the length of the short side; for the others it is both sides."""
DEFAULT_PROCESSORS = {"vit": "ViT", "deit": "DeiT", "clip": "CLIP", "siglip": "Siglip", "swin": "ViT", "swinv2": "ViT"}
"""Backbone -> its default image processor; the others use Bit's."""


def find_processor_json(archive: Archive) -> dict[str, Any] | None:
    """The image processor's JSON: preprocessor_config.json, or its part of processor_config.json; None without one."""
    own = archive.sidecars.get("preprocessor_config.json")
    joint = archive.sidecars.get("processor_config.json")
    processor = own or (joint.get("image_processor") if isinstance(joint, dict) else None)
    return processor if isinstance(processor, dict) else None


def read_preprocess(
    content: dict[str, Any], backbone: str, image_size: tuple[int, int], channels: int
) -> tuple[PreprocessConfig, list[str]]:
    """PreprocessConfig of a file, for a network of this image size, and notes on what is not supported."""
    class_name = str(content.get("image_processor_type") or content.get("feature_extractor_type") or "")
    processor = re.sub(r"(ImageProcessor|FeatureExtractor)\w*$", "", class_name)
    processor = processor or DEFAULT_PROCESSORS.get(backbone, "Bit")
    defaults = PROCESSOR_DEFAULTS.get(processor, PROCESSOR_DEFAULTS["ViT"])
    values = defaults | {k: v for k, v in content.items() if v is not None}
    notes: list[str] = []
    if processor not in PROCESSOR_DEFAULTS:
        notes.append(
            f"preprocessor_config.json is for {class_name}: its sizes, mean and std are used; anything else that this "
            "class does is ignored."
        )
    size = _resize_options(values, processor in SHORT_SIDE, image_size, notes)
    mean, std = _mean_and_std(values)
    resample = values["resample"]
    if resample not in RESAMPLE:
        notes.append(f"preprocessor_config.json has resample={resample}, which is not supported: bilinear is used.")
    interpolation = RESAMPLE.get(resample, "bilinear")
    config = PreprocessConfig(**size, crop_rounding="floor", interpolation=interpolation, mean=mean, std=std)
    return preprocess_for_channels(config, channels), notes


def _resize_options(
    values: dict[str, Any], short: bool, image_size: tuple[int, int], notes: list[str]
) -> dict[str, Any]:
    if not values.get("do_resize", True):
        notes.append("preprocessor_config.json has do_resize=false; images are squashed to the model's size.")
        return {"image_size": image_size, "resize": "squash"}
    size = _size(values["size"], short)
    crop = _pair(values["crop_size"]) if values.get("do_center_crop") and values.get("crop_size") else None
    if "shortest_edge" in size:
        if crop is None:
            notes.append("preprocessor_config.json does not crop; images are center-cropped to the model's size.")
        return {"image_size": crop or image_size, "resize": "short", "resize_to": int(size["shortest_edge"])}
    if "height" not in size:
        notes.append(f"preprocessor_config.json has an unsupported size ({size}); images are squashed.")
        return {"image_size": image_size, "resize": "squash"}
    whole = int(size["height"]), int(size["width"])
    if crop is None or crop == whole:
        return {"image_size": whole, "resize": "squash"}
    enlarged, side = min(whole), min(crop)
    if (crop[0] * enlarged // side, crop[1] * enlarged // side) != whole:
        notes.append(
            f"preprocessor_config.json crops {crop} from {whole}, which is unsupported: images are squashed to {crop}."
        )
        return {"image_size": crop, "resize": "squash"}
    return {"image_size": crop, "resize": "squash", "resize_to": enlarged}


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


def _mean_and_std(values: dict[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std for pixel values in [0, 1], whatever range the file uses."""
    scale = 1.0
    if not values.get("do_rescale", True):
        scale = 255.0
    elif (factor := values.get("rescale_factor")) is not None:
        scale = 1.0 if math.isclose(factor * 255, 1, rel_tol=1e-6) else factor * 255
    mean, std = values["image_mean"], values["image_std"]
    if not values.get("do_normalize", True):
        mean, std = [0.0] * len(mean), [1.0] * len(mean)
    return tuple(m / scale for m in mean), tuple(s / scale for s in std)


def preprocessor_json(preprocess: PreprocessConfig, backbone: str) -> dict[str, Any]:
    """The contents of preprocessor_config.json; transformers always antialiases and rounds a crop's offset down."""
    crop = pair(preprocess.image_size)
    values: dict[str, Any] = {"do_resize": True}
    if preprocess.resize == "short":
        processor = "CLIP" if backbone == "clip" else "Bit"
        values["size"] = {"shortest_edge": preprocess.resize_to or max(crop)}
    elif preprocess.resize_to in (None, min(crop)):
        processor = "Siglip" if backbone == "siglip" else "ViT"
        values["size"] = _box(crop)
    else:
        processor, enlarged = "DeiT", preprocess.resize_to or 0
        values["size"] = _box((crop[0] * enlarged // min(crop), crop[1] * enlarged // min(crop)))
    if processor in ("CLIP", "Bit", "DeiT"):
        values |= {"do_center_crop": True, "crop_size": _box(crop)}
    return values | {
        "image_processor_type": f"{processor}ImageProcessor",
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
