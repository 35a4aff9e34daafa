"""The batch that the loader gives to the augmentation and the objective."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# b images of this process's part of the global batch, C channels, K classes


@dataclass(frozen=True)
class Batch:
    """This process's part of the global batch of one step."""

    step: int
    images: Tensor
    """b C H W, uint8 (float32 where the preprocessing never rounds), on the device."""
    targets: Tensor
    """b, int64 class indices; or b K float32 for multi-label data."""
    weights: Tensor
    """b, float32: 1, or 0 for an unreadable image or padding."""
    slots: Tensor
    """b, int64, on the CPU: each image's position in the global batch, from which its random seed is derived."""
    indices: Tensor
    """b, int64, on the CPU: each image's index in its source; -1 for padding."""

    def __len__(self) -> int:
        return len(self.indices)
