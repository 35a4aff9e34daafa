"""Models: B C H W -> tokens -> features -> logits."""

from __future__ import annotations

import torch

from vitrail.config import BiTConfig, NetConfig, SwinConfig, ViTConfig
from vitrail.models.bit import BiT
from vitrail.models.output import Output
from vitrail.models.swin import Swin
from vitrail.models.vit import ViT

Net = ViT | BiT | Swin
NETWORKS: dict[type, type[Net]] = {ViTConfig: ViT, BiTConfig: BiT, SwinConfig: Swin}
"""The class of the network for each class of config."""

__all__ = ["NETWORKS", "BiT", "Net", "Output", "Swin", "ViT", "build"]


def build(config: NetConfig, seed: int | None = None, *, meta: bool = False) -> Net:
    """Build the model of a config with initialized weights, or with `meta` on the meta device, without storage."""
    kind = NETWORKS[type(config)]
    with torch.device("meta"):
        net: Net = kind(config)  # type: ignore[arg-type]
    # Built on the meta device first: torch's layers would otherwise initialize their weights before ours.
    return net if meta else net.to_empty(device="cpu").initialize(seed)
