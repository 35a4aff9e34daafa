"""Decoded images of one size, in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.data.sources.base import Sample


class ArraySource:
    """Pixels and class indices as arrays; keys are the split and the index, `train/00017`."""

    multi_label = False
    blocks = None

    def __init__(
        self,
        name: str,
        split: str,
        pixels: npt.NDArray[np.uint8],  # N H W C
        targets: npt.ArrayLike,
        labels: Sequence[str],
    ) -> None:
        self.name = name
        self.split = split
        self.pixels: npt.NDArray[np.uint8] = pixels
        self.targets = np.asarray(targets, np.int64)
        self.labels = tuple(labels)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Sample:
        return Sample(self.key(index), self.pixels[index], int(self.targets[index]))

    def key(self, index: int) -> str:
        return f"{self.split}/{index:05d}"

    def update_hash(self, hasher: Any, indices: npt.NDArray[np.int64] | None = None) -> None:
        """Update a hashlib object with the split and indices of these samples (None: all)."""
        numbers = np.arange(len(self)) if indices is None else indices
        hasher.update(f"{self.split}/".encode() + numbers.astype("<i8").tobytes())
