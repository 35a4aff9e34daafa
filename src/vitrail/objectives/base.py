"""What every objective shares: a network inside, sums over images out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitrail.models import Net
from vitrail.models.base import DECAYED_MODULES

# b images of this process's part of a batch, C channels, K classes


Sums = dict[str, Tensor]
"""By name, one number each: the sum over a batch's images."""


class Objective(nn.Module):
    """A network together with what it is to learn; this is what is trained, wrapped and compiled.

    `learner(images, targets, weights, sample_seeds)` gives sums over the images, each times its weight:
    "loss" always, "correct" where an answer can be right or wrong, others by name. Whoever adds up
    all parts of a batch divides by the weights of the whole, so that neither micro-batches nor
    processes change a result. An image of weight 0 adds nothing.
    """

    net: Net

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor, targets: Tensor, weights: Tensor, sample_seeds: Tensor | None = None) -> Sums:
        """b C H W normalized; b int64, or b K; b; b int64 -> sums over the images."""
        raise NotImplementedError

    def decayed_parameters(self) -> set[str]:
        """Names of the parameters that weight decay is meant for: the network's, and own matrices."""
        return {f"{name}.weight" for name, module in self.named_modules() if isinstance(module, DECAYED_MODULES)}

    def layer_id(self, name: str) -> int:
        """How high a parameter stands, as the network counts; own ones stand beside its head."""
        return self.net.layer_id(name.removeprefix("net.") if name.startswith("net.") else "norm.weight")


def at_least_float32(logits: Tensor) -> Tensor:
    """In float32 at least: a loss of half-precision logits would be a coarse one."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def weighted_sums(parts: dict[str, Tensor], weights: Tensor) -> Sums:
    """One number an image, b, for each name -> their weighted sums."""
    return {name: (part * weights).sum() for name, part in parts.items()}
