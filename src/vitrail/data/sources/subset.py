"""A subset of a source."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vitrail.data.sources.base import Sample, Source, Targets


class Subset:
    """The samples of `source` at `indices`, with the same keys; like torch.utils.data.Subset."""

    def __init__(self, source: Source, indices: npt.ArrayLike, name: str | None = None) -> None:
        self.source = source
        self.indices = np.asarray(indices, np.int64)
        self.name = name or source.name
        self.labels = source.labels
        self.multi_label = source.multi_label
        self._targets: Targets | None = None
        self._pixels: npt.NDArray[np.uint8] | None = None

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Sample:
        return self.source[int(self.indices[index])]

    def key(self, index: int) -> str:
        return self.source.key(int(self.indices[index]))

    @property
    def targets(self) -> Targets:
        if self._targets is None:
            self._targets = self.source.targets[self.indices]
        return self._targets

    @property
    def pixels(self) -> npt.NDArray[np.uint8] | None:
        if self._pixels is None and (all_pixels := self.source.pixels) is not None:
            self._pixels = all_pixels[self.indices]
        return self._pixels

    @property
    def blocks(self) -> tuple[int, ...] | None:
        """The source's blocks, reduced to the samples in the subset; None if the indices are not ascending."""
        all_blocks = self.source.blocks
        if all_blocks is None or (np.diff(self.indices) <= 0).any():
            return None
        ends = np.searchsorted(self.indices, np.cumsum(all_blocks))
        return tuple(int(n) for n in np.diff(ends, prepend=0) if n)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_targets": None, "_pixels": None}  # pickled with the source
