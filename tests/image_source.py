"""An in-memory source of images for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vitrail.data.sources.base import Sample


class Images:
    """A list of paths, bytes or arrays, each with a class index; keys are `0`, `1`, ..."""

    pixels = None

    def __init__(
        self,
        images: Sequence[Any],
        targets: Any = None,
        classes: int = 3,
        blocks: tuple[int, ...] | None = None,
        name: str = "images",
    ) -> None:
        self.images, self.name, self.blocks = list(images), name, blocks
        self.targets = np.arange(len(self.images)) % classes if targets is None else np.asarray(targets)
        self.multi_label = self.targets.ndim == 2
        self.labels = tuple(f"class {i}" for i in range(classes))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        target = self.targets[index]
        classes = tuple(np.flatnonzero(target).tolist()) if self.multi_label else int(target)
        return Sample(self.key(index), self.images[index], classes)

    def key(self, index: int) -> str:
        return str(index)
