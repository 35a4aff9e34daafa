"""Published sizes of the Vision Transformer: width, depth, number of heads, hidden dimension of the MLP."""

from __future__ import annotations

from typing import Any, NamedTuple

from vitrail.config.architecture import ViTConfig
from vitrail.errors import ConfigError, did_you_mean


class Size(NamedTuple):
    width: int
    depth: int
    num_heads: int
    mlp_dim: int


# fmt: off
SIZES = {
    #              width depth heads   mlp
    "Ti": Size(     192,   12,    3,   768),
    "S": Size(      384,   12,    6,  1536),
    "B": Size(      768,   12,   12,  3072),
    "L": Size(     1024,   24,   16,  4096),
    "SO400M": Size(1152,   27,   16,  4304),
    "H": Size(     1280,   32,   16,  5120),
    "g": Size(     1408,   40,   16,  6144),
    "G": Size(     1664,   48,   16,  8192),
}
# fmt: on
DINOV3_SIZES = {"S+": Size(384, 12, 6, 1536), "H+": Size(1280, 32, 20, 5120), "7B": Size(4096, 40, 32, 8192)}
"""DINOv3's sizes of its own, which use SwiGLU."""
DINOV2_G = Size(1536, 40, 24, 4096)
"""DINOv2's g, which uses SwiGLU."""
SIGLIP2_G = Size(1536, 40, 16, 6144)


def vit_config(variant: str, **changes: Any) -> ViTConfig:
    """The config of a size and patch size such as "S/16", with the original's conventions and fields changed."""
    name, _, patch = variant.partition("/")
    if name not in SIZES or not patch.isdecimal():
        hint = did_you_mean(name, SIZES) if name not in SIZES else "."
        raise ConfigError(f"got variant {variant!r}, expected SIZE/PATCH, such as S/16{hint}")
    return ViTConfig(**{**SIZES[name]._asdict(), "patch_size": int(patch), **changes})
