"""The configs of all networks."""

from __future__ import annotations

from vitrail.config.architecture import BiTConfig, ViTConfig
from vitrail.config.swin import SwinConfig

NetConfig = ViTConfig | BiTConfig | SwinConfig

CONFIG_TYPES: dict[str, type[NetConfig]] = {"vit": ViTConfig, "bit": BiTConfig, "swin": SwinConfig}
"""Name of a kind of network, as stored in files -> its config."""
