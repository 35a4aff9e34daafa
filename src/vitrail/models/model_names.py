"""Model names -> configs: the paper's names, and those of other libraries.

A name is `[STEM+]FAMILY-SIZE/PATCH[-OPTION][@IMAGE]`: ViT-B/16, ViT-L/16@384, R50+ViT-B/16,
DeiT-S/16-distilled, DINOv2-B/14-reg, BiT-R50x1. Any size, patch and image combine; `published_models.py`
lists those with public weights. Swin Transformers: Swin-T, Swin-B@384, SwinV2-B-w16, SwinV2-B-w12to24 (pre-trained with
windows of 12, fine-tuned with 24), Swin-S3-T.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from vitrail.config import BiTConfig, NetConfig, StemConfig, SwinConfig, ViTConfig, pair
from vitrail.config.sizes import DINOV2_G, DINOV3_SIZES, SIGLIP2_G, SIZES
from vitrail.errors import NotFoundError, did_you_mean
from vitrail.models.families import FAMILIES
from vitrail.models.published_models import PUBLISHED_MODELS, PublishedModel
from vitrail.plugins import load_plugin, plugin_errors, plugin_names

_PUBLISHED = {(size.width, size.mlp_dim): size.num_heads for size in (SIGLIP2_G, DINOV2_G, *SIZES.values())}


def infer_num_heads(width: int, mlp: int) -> int | None:
    """Number of heads where a file does not state it: that of a published size, else a head dimension of 64."""
    return _PUBLISHED.get((width, mlp)) or (width // 64 if width % 64 == 0 else None)


def is_published_size(width: int, mlp: int) -> bool:
    return (width, mlp) in _PUBLISHED


STEMS = {
    ("R", 16): ((), 8),
    ("R26", 32): ((2, 2, 2, 2), 1),
    ("R50", 16): ((3, 4, 9), 1),
    ("R50", 32): ((3, 4, 6, 3), 1),
}
"""Stem and the number after the slash -> blocks per stage, and patch size on the feature map."""

BIT_LAYERS = {"R50": (3, 4, 6, 3), "R101": (3, 4, 23, 3), "R152": (3, 8, 36, 3)}
CLIP_EMBED_DIM = {"B": 512, "B+": 640, "L": 768, "H": 1024, "g": 1024, "G": 1280}
"""Dimension of CLIP's joint embedding space."""

NAME = re.compile(
    r"(?:(?P<stem>R\d*)\+)?(?P<family>[A-Za-z]+\w*)-(?P<size>[A-Za-z]\w*?\+?|7B)/(?P<patch>\d+)"
    r"(?:-(?P<option>distilled|reg|gap|tok|map))?(?:@(?P<image>\d+(?:x\d+)?))?",
    re.IGNORECASE,
)
BIT_NAME = re.compile(r"BiT-(?P<depth>R\d+)x(?P<width>\d+)(?:@(?P<image>\d+(?:x\d+)?))?", re.IGNORECASE)

SWIN_NAME = re.compile(
    r"Swin(?P<v2>V2)?-(?P<searched>S3-)?(?P<size>[A-Z])(?:-w(?:(?P<trained>\d+)to)?(?P<window>\d+))?"
    r"(?:@(?P<image>\d+(?:x\d+)?))?",
    re.IGNORECASE,
)
# fmt: off
SWIN_SIZES = {
    #      width  depths          num_heads
    "T":  (   96, (2, 2,  6, 2), (3,  6, 12, 24)),
    "S":  (   96, (2, 2, 18, 2), (3,  6, 12, 24)),
    "B":  (  128, (2, 2, 18, 2), (4,  8, 16, 32)),
    "L":  (  192, (2, 2, 18, 2), (6, 12, 24, 48)),
}
SEARCHED_SWIN = {
    #      depths          windows
    "T": ((2, 2,  6, 2), ( 7,  7, 14, 7)),
    "S": ((2, 2, 18, 2), (14, 14, 14, 7)),
    "B": ((2, 2, 30, 2), ( 7,  7, 14, 7)),
}
# fmt: on
"""Swin-S3 (arXiv 2111.14725): depths and window sizes found by a search, at the width of Swin-T."""
SWIN_V2_IMAGES = {12: 192, 24: 384}
"""Version 2: window size -> image size of the released models, where that is not 256."""


def config_from_name(name: str, **changes: Any) -> NetConfig:
    """The config for a model name, ours or another library's, with fields changed.

    Conventions (which GELU, which epsilon) are the family's own, whichever library's name is used. A name that another
    package adds (entry points vitrail.models) stands for what its function returns.
    """
    variant = find_published(name)
    try:
        config = parse_name(variant.name if variant else name)
    except NotFoundError:
        if name not in plugin_names("models"):
            raise
        with plugin_errors("models", name):
            config = load_plugin("models", name)()
            if not isinstance(config, NetConfig):
                raise TypeError(
                    f"it returned {type(config).__name__}, expected a ViTConfig, BiTConfig or SwinConfig"
                ) from None
    return config.replace(**changes) if changes else config


def find_published(name: str) -> PublishedModel | None:
    """The published model with this name or alias, or None."""
    name = name.removeprefix("timm/")
    return _by_alias().get(name) or _by_alias().get(name.lower())  # only g and G need their case


def parse_name(name: str) -> NetConfig:
    """Parse a name of the grammar above."""
    if match := BIT_NAME.fullmatch(name):
        return _bit(match)
    if match := SWIN_NAME.fullmatch(name):
        return _swin(match)
    match = NAME.fullmatch(name)
    family = match and _find_key(FAMILIES, match["family"])
    if not match or not family or family in ("BiT", "Swin", "SwinV2"):
        known = [*(v.name for v in PUBLISHED_MODELS), *plugin_names("models")]
        raise NotFoundError(f"unknown model {name!r}{did_you_mean(name, known)}")
    return _vit(match, family)


def _vit(match: re.Match[str], family: str) -> ViTConfig:
    sizes = SIZES | DINOV3_SIZES if family == "DINOv3" else SIZES
    known = sizes if match["size"] not in ("g", "G") else {match["size"]: SIZES[match["size"]]}
    letter = _find_key(known, match["size"])
    if not letter:
        raise NotFoundError(f"{match[0]}: there is no size {match['size']!r}; the sizes are {', '.join(sizes)}.")
    size = DINOV2_G if (family, letter) == ("DINOv2", "g") else sizes[letter]
    image = _image(match["image"]) or (518 if family == "DINOv2" else 224)
    options: dict[str, Any] = {"image_size": image, "patch_size": int(match["patch"]), **size._asdict()}
    options |= FAMILIES[family].config_overrides
    if size is DINOV2_G or letter in DINOV3_SIZES:
        options["activation"] = "swiglu"
    if letter == "7B":
        options["qkv_bias"] = False
    if family == "CLIP":
        options["num_classes"] = CLIP_EMBED_DIM.get(letter, size.width)
    if family == "BV":  # big_vision: its tanh layer is as wide as a token, its positions 1 / sqrt(width)
        options |= {"pre_logits": size.width, "position_init_std": size.width**-0.5}
    if family == "SigLIP" and any(side % int(match["patch"]) for side in pair(image)):
        options["uncovered"] = "ignore"
    if match["stem"]:
        options |= _hybrid(match)
    return ViTConfig(**options | _option(match["option"], family))


def _option(option: str | None, family: str) -> dict[str, Any]:
    match (option or "").lower():
        case "distilled":
            return {"distilled": True}
        case "reg":
            return {"num_registers": 4} | ({"resample": "timm"} if family == "DINOv2" else {})
        case "gap":
            return {"pool": "gap", "class_token": False}
        case "map":
            return {"pool": "map", "class_token": False}
        case "tok":
            return {"pool": "token", "class_token": True, "position_on_class": family != "BV"}
    return {}


def _hybrid(match: re.Match[str]) -> dict[str, Any]:
    stem, number = match["stem"].upper(), int(match["patch"])
    if (stem, number) not in STEMS:
        known = ", ".join(f"{s}+ViT-B/{n}" for s, n in STEMS)
        raise NotFoundError(f"{match[0]}: no such hybrid; available: {known}, in any size.")
    layers, patch = STEMS[stem, number]
    return {"stem": StemConfig(layers=layers), "patch_size": patch}


def _bit(match: re.Match[str]) -> BiTConfig:
    depth = match["depth"].upper()
    if depth not in BIT_LAYERS:
        raise NotFoundError(f"{match[0]}: BiT comes as {', '.join(BIT_LAYERS)}, not {depth}.")
    return BiTConfig(
        layers=BIT_LAYERS[depth], width_factor=float(match["width"]), image_size=_image(match["image"]) or 224
    )


def _swin(match: re.Match[str]) -> SwinConfig:
    letter, image = match["size"].upper(), _image(match["image"])
    sizes = SEARCHED_SWIN if match["searched"] else SWIN_SIZES
    if letter not in sizes or (match["searched"] and (match["v2"] or match["window"])):
        known = "Swin-T, -S, -B, -L, SwinV2-T, -S, -B, -L, and Swin-S3-T, -S3-S, -S3-B"
        raise NotFoundError(f"{match[0]}: there is no such Swin Transformer; there are {known}.")
    width, depths, heads = SWIN_SIZES["T" if match["searched"] else letter]
    options: dict[str, Any] = {"width": width, "depths": depths, "num_heads": heads}
    if match["searched"]:
        depths, windows = SEARCHED_SWIN[letter]
        return SwinConfig(**options | {"depths": depths, "stage_window_sizes": windows, "image_size": image or 224})
    if not match["v2"]:  # one window covers the last map
        image = image or 224
        window = int(match["window"] or max(min(pair(image)) // 32, 1))
        return SwinConfig(**options, image_size=image, window_size=window)
    window = int(match["window"] or 8)
    options |= {"version": 2, "window_size": window, "image_size": image or SWIN_V2_IMAGES.get(window, 256)}
    if match["trained"]:
        trained = int(match["trained"])
        options["pretrained_window_sizes"] = (trained, trained, trained, trained // 2)
    return SwinConfig(**options)


def _image(text: str | None) -> int | tuple[int, int] | None:
    if not text:
        return None
    height, _, width = text.partition("x")
    return pair((int(height), int(width))) if width else int(height)


def _find_key(table: dict[str, Any], name: str) -> str | None:
    """The table's key for a name, ignoring case, or None."""
    return name if name in table else next((k for k in table if k.lower() == name.lower()), None)


@cache
def _by_alias() -> dict[str, PublishedModel]:
    names: dict[str, PublishedModel] = {}
    for variant in PUBLISHED_MODELS:
        for alias in filter(None, (variant.name, variant.hub_id, *variant.aliases)):
            names[alias.removeprefix("timm/")] = variant
    return {name.lower(): variant for name, variant in names.items()} | names
