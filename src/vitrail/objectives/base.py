"""Objective: base class of the training objectives."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitrail.models import Net
from vitrail.models.base import DECAYED_MODULES

# b images of a micro-batch, C channels, K classes


Sums = dict[str, Tensor]
"""Name -> scalar: the sum over the images of a batch."""


class Objective(nn.Module):
    """A model with its loss: the module that is trained, wrapped and compiled.

    `objective(images, targets, weights, sample_seeds)` returns weighted sums over the images: "loss" always,
    "correct" where a prediction can be right or wrong, and others by name. The caller adds up the sums of all
    micro-batches and processes and divides by the total weight, so the result does not depend on how a batch
    is split. An image of weight 0 contributes nothing.
    """

    net: Net

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor, targets: Tensor, weights: Tensor, sample_seeds: Tensor | None = None) -> Sums:
        """b C H W normalized; b int64, or b K; b; b int64 -> sums over the images."""
        raise NotImplementedError

    def decayed_parameters(self) -> set[str]:
        """Names of the parameters with weight decay: weights of matrices and convolutions."""
        own = {f"{name}.weight" for name, module in self.named_modules() if isinstance(module, DECAYED_MODULES)}
        own = {name for name in own if not name.startswith("net.")}
        return own | {f"net.{name}" for name in self.net.decayed_parameters()}

    def layer_id(self, name: str) -> int:
        """Index of a parameter's layer, as in the model; the objective's own parameters count as the head."""
        return self.net.layer_id(name.removeprefix("net.") if name.startswith("net.") else "norm.weight")


def at_least_float32(logits: Tensor) -> Tensor:
    """Cast to float32 unless in float64: a loss of half-precision logits would be inaccurate."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def weighted_sums(parts: dict[str, Tensor], weights: Tensor) -> Sums:
    """Name -> per-image values, b; returns their weighted sums."""
    return {name: (part * weights).sum() for name, part in parts.items()}
