"""Images that are decoded already and all of one size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.data.sources.base import Sample


class ArraySource:
    """Pixels and class numbers in memory; keys count the images: `train/00017`."""

    multi_label = False
    blocks = None

    def __init__(
        self,
        name: str,
        part: str,
        pixels: npt.NDArray[np.uint8],  # N H W C
        targets: npt.ArrayLike,
        labels: Sequence[str],
    ) -> None:
        self.name = name
        self.split = part
        self.pixels: npt.NDArray[np.uint8] = pixels
        self.targets = np.asarray(targets, np.int64)
        self.labels = tuple(labels)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Sample:
        return Sample(self.key(index), self.pixels[index], int(self.targets[index]))

    def key(self, index: int) -> str:
        return f"{self.split}/{index:05d}"

    def update_hash(self, found: Any, indices: npt.NDArray[np.int64] | None = None) -> None:
        """Feed what these keys are made of to a hash of hashlib's."""
        numbers = np.arange(len(self)) if indices is None else indices
        found.update(f"{self.split}/".encode() + numbers.astype("<i8").tobytes())
