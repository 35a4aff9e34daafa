"""Models: B C H W -> tokens -> features -> logits."""

from __future__ import annotations

import torch

from vitrail.config import BiTConfig, ViTConfig
from vitrail.models.bit import BiT
from vitrail.models.output import Output
from vitrail.models.vit import ViT

Net = ViT | BiT

__all__ = ["BiT", "Net", "Output", "ViT", "build"]


def build(config: ViTConfig | BiTConfig, seed: int | None = None, *, meta: bool = False) -> Net:
    """Build the model of a config with initialized weights, or with `meta` on the meta device, without storage."""
    kind = BiT if isinstance(config, BiTConfig) else ViT
    with torch.device("meta"):
        net: Net = kind(config)  # type: ignore[arg-type]
    # Built on the meta device first: torch's layers would otherwise initialize their weights before ours.
    return net if meta else net.to_empty(device="cpu").initialize(seed)
