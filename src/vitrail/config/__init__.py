"""Settings: frozen dataclasses with a docstring under each field."""

from vitrail.config.architecture import BiTConfig, StemConfig, ViTConfig
from vitrail.config.base import Config, Pair, pair
from vitrail.config.data import AugmentConfig, DataConfig
from vitrail.config.duration import Duration, epochs, images, steps
from vitrail.config.image import PreprocessConfig
from vitrail.config.networks import CONFIG_TYPES, NetConfig
from vitrail.config.overrides import override, parse_value
from vitrail.config.swin import SwinConfig
from vitrail.config.train import (
    ClassifyConfig,
    DistillConfig,
    MaskedPatchConfig,
    OptimConfig,
    ScheduleConfig,
    SimMIMConfig,
    TrainConfig,
)

__all__ = [
    "CONFIG_TYPES",
    "AugmentConfig",
    "BiTConfig",
    "ClassifyConfig",
    "Config",
    "DataConfig",
    "DistillConfig",
    "Duration",
    "MaskedPatchConfig",
    "NetConfig",
    "OptimConfig",
    "Pair",
    "PreprocessConfig",
    "ScheduleConfig",
    "SimMIMConfig",
    "StemConfig",
    "SwinConfig",
    "TrainConfig",
    "ViTConfig",
    "epochs",
    "images",
    "override",
    "pair",
    "parse_value",
    "steps",
]
