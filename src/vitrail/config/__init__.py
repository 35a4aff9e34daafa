"""Settings: frozen dataclasses with a docstring under each field."""

from vitrail.config.base import Config, Pair, override, pair, parse_value
from vitrail.config.image import PreprocessConfig
from vitrail.config.model import BiTConfig, StemConfig, ViTConfig

__all__ = [
    "BiTConfig",
    "Config",
    "Pair",
    "PreprocessConfig",
    "StemConfig",
    "ViTConfig",
    "override",
    "pair",
    "parse_value",
]
