"""A family's conventions that no tensor shows (activation, epsilon, resampling of positions), and its preprocessing."""

from __future__ import annotations

from typing import Any

from vitrail.config import NetConfig, PreprocessConfig, ViTConfig, pair
from vitrail.config.image import preprocess_for_size
from vitrail.models.families import FAMILIES, TIMM


def family_conventions(family: str, config: NetConfig) -> dict[str, Any]:
    """Config fields that a family's reference code fixes and no tensor shows: `activation`, `norm_eps`, `resample`."""
    if not isinstance(config, ViTConfig):
        return {}
    options = FAMILIES[family].config_overrides
    fixed: dict[str, Any] = {name: options[name] for name in ("activation", "norm_eps", "resample") if name in options}
    if config.activation == "swiglu":  # visible in the tensors
        fixed.pop("activation", None)
    if family == "DINOv2" and config.num_registers:
        fixed["resample"] = "timm"  # antialiased, without the offset: unlike DINOv2 without registers
    return fixed


def default_preprocess(family: str, config: NetConfig, library: str = "") -> PreprocessConfig:
    """A family's default preprocessing, for checkpoints that state none. timm's default for ViT is its own."""
    defaults = TIMM if library == "timm" and family == "ViT" else FAMILIES[family]
    size = pair(config.image_size)
    if (
        defaults.eval_image_size
        and isinstance(config, ViTConfig)
        and not any(defaults.eval_image_size % side for side in pair(config.patch_size))
    ):
        size = pair(defaults.eval_image_size)
    return preprocess_for_size(defaults.preprocess, size, config.channels, defaults.crop_fraction)
