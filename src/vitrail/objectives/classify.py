"""Learning labels: softmax cross-entropy, or a yes or no for each class."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.config import ClassifyConfig
from vitrail.models import Net
from vitrail.objectives.base import Objective

# B images, K classes


class Classify(Objective):
    """Targets are class numbers, B, or shares of classes, B K (mixed pictures, several labels)."""

    def __init__(
        self, net: Net, config: ClassifyConfig, *, several: bool = False, counts: npt.NDArray[np.int64] | None = None
    ) -> None:
        super().__init__(net)
        self.smoothing, self.several = config.smoothing, several
        self.sigmoid = several or config.loss == "sigmoid"
        self.rarity: Tensor | None
        self.register_buffer("rarity", balance(counts) if config.weights == "balanced" else None, persistent=False)

    def forward(self, images: Tensor, targets: Tensor, weights: Tensor, keys: Tensor) -> dict[str, Tensor]:
        logits = self.net(images, keys)
        wanted = shares(targets, logits)
        return {"loss": self.loss(logits, wanted, weights), **self.judged(logits, wanted, weights)}

    def loss(self, logits: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
        """Summed over images, each times its weight and that of its class."""
        weights = weights.to(wanted.dtype)
        if self.rarity is not None:
            weights = weights * (wanted @ self.rarity.to(wanted)) / wanted.sum(1).clamp(min=1)
        each = cross_entropy(logits, smoothed(wanted, self.smoothing, self.sigmoid), self.sigmoid)
        return (each * weights).sum()

    def judged(self, logits: Tensor, wanted: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """How many are right: their likeliest class is the one (or has the largest share) they have."""
        if self.several:
            return {}
        right = logits.argmax(1) == wanted.argmax(1)
        return {"correct": (right * weights).sum()}


def shares(targets: Tensor, logits: Tensor) -> Tensor:
    """B or B K -> B K, in at least float32."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if targets.ndim == 1:
        return F.one_hot(targets.clamp(min=0), logits.shape[1]).to(dtype)
    return targets.to(dtype)


def smoothed(wanted: Tensor, smoothing: float, sigmoid: bool) -> Tensor:
    """A share of the target spread over all classes; of a yes or no, drawn towards one half."""
    if not smoothing:
        return wanted
    return wanted * (1 - smoothing) + smoothing * (0.5 if sigmoid else 1 / wanted.shape[1])


def cross_entropy(logits: Tensor, wanted: Tensor, sigmoid: bool) -> Tensor:
    """B K, B K -> B; in at least float32, whatever the network computed in."""
    logits = logits.to(wanted.dtype)
    if sigmoid:
        return F.binary_cross_entropy_with_logits(logits, wanted, reduction="none").sum(1)
    return -(wanted * logits.log_softmax(1)).sum(1)


def balance(counts: npt.NDArray[np.int64] | None) -> Tensor | None:
    """K weights, inverse to how often a class occurs; the mean over all pictures is 1."""
    if counts is None or not counts.sum():
        return None
    there = counts > 0
    weights = np.where(there, counts.sum() / (there.sum() * np.maximum(counts, 1)), 0.0)
    return torch.from_numpy(weights)
