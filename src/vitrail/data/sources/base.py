"""The `Source` protocol, samples, and train / validation / test splits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vitrail.data.decode import ImageLike

Targets = npt.NDArray[np.int64] | npt.NDArray[np.bool_]
"""N class indices (-1: no label), or N x K booleans for multi-label data."""

_EXTENSIONS = "jpg jpeg jpe jfif png webp bmp gif tif tiff ppm pgm pbm pnm avif heic heif jp2 j2k jxl tga"
IMAGE_EXTENSIONS = frozenset(f".{extension}" for extension in _EXTENSIONS.split())
"""File extensions of images, in lower case."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One labeled image, not yet decoded."""

    key: str
    """Unique, stable, readable name within the source: a relative path, a row or a tar member."""
    image: ImageLike
    target: int | tuple[int, ...]
    """Class index, -1 for no label; for multi-label data, the indices of all its classes."""


class Source(Protocol):
    """A map-style dataset of labeled images.

    Sources are picklable (worker processes receive a copy) and thread-safe for reading.
    """

    name: str
    """Display name."""
    labels: tuple[str, ...]
    """Class names, in order."""
    multi_label: bool
    """Whether an image may have any number of labels, including none."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def key(self, index: int) -> str:
        """Return the sample's key without reading the sample."""

    @property
    def targets(self) -> Targets:
        """Labels of all samples, without decoding any image."""

    @property
    def pixels(self) -> npt.NDArray[np.uint8] | None:
        """All images as N H W C, if they are already decoded and of one size; else None."""

    @property
    def blocks(self) -> tuple[int, ...] | None:
        """Lengths of consecutive runs of samples that are cheap to read together, such as tar shards.

        None: random access costs the same everywhere.
        """


@dataclass(frozen=True)
class SourceSplits:
    """The splits that a source defines itself, before anything is held out."""

    train: Any  # a Source or a ShardStream; the whole source if it defines no splits
    validation: Source | None = None
    test: Source | None = None
    notes: tuple[str, ...] = ()
    groups: Iterable[str] | None = None
    """Group of each image of `train`, if the data states it; a group is never split."""
    stratify: bool = False
    """Hold out an exact fraction of each class; for datasets that never change."""

    @property
    def has_eval_split(self) -> bool:
        """Whether the source defines a validation or a test split."""
        return self.validation is not None or self.test is not None

    @property
    def evaluation_source(self) -> Source:
        """The split that an evaluation reads: test, else validation, else everything."""
        return next((split for split in (self.test, self.validation) if split is not None), self.train)


@dataclass(frozen=True)
class Splits:
    """The training, validation and test splits of a run."""

    train: Any  # a Source or a ShardStream
    validation: Source
    test: Source | None = None
    """Images for the final score; the same object as `validation` if the source has no other split."""
    eval_split: str = "validation"
    """Where `validation` comes from: "validation" (the source's split), "test" (its only other split) or "held out"."""
    notes: tuple[str, ...] = field(default=())
    """Remarks about what was chosen or found; they are logged."""
