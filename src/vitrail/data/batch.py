"""What flows from the loader to the augmentation to the objective."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# b images of this process's part of the global batch, C channels, K classes


@dataclass(frozen=True)
class Batch:
    """This process's part of one step's images."""

    step: int
    images: Tensor
    """b C H W, uint8 (float32 where the preprocessing never rounds), on the device."""
    targets: Tensor
    """b, int64 class numbers; or b K float32, where images have several labels."""
    weights: Tensor
    """b, float32: 1, or 0 for a slot whose image could not be read or that only fills up."""
    slots: Tensor
    """b, int64, on the CPU: each image's place in the global batch, which keys its chance."""
    indices: Tensor
    """b, int64, on the CPU: each image's number in its source; -1 for what only fills up."""

    def __len__(self) -> int:
        return len(self.indices)
