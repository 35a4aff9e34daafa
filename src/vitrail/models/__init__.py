"""Float batch -> tokens -> features -> logits."""

from __future__ import annotations

import torch

from vitrail.config import BiTConfig, ViTConfig
from vitrail.models.bit import BiT
from vitrail.models.output import Output
from vitrail.models.vit import ViT

Net = ViT | BiT

__all__ = ["BiT", "Net", "Output", "ViT", "build"]


def build(config: ViTConfig | BiTConfig, seed: int | None = None, *, meta: bool = False) -> Net:
    """The network of a config, with first values, or as a skeleton without storage to load into."""
    kind = BiT if isinstance(config, BiTConfig) else ViT
    with torch.device("meta"):
        net: Net = kind(config)  # type: ignore[arg-type]
    # By way of a skeleton, since torch's layers would draw first values of their own before ours.
    return net if meta else net.to_empty(device="cpu").initialize(seed)
