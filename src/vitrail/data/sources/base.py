"""What every source of labeled images offers, and how one is split."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vitrail.data.decode import ImageLike

Targets = npt.NDArray[np.int64] | npt.NDArray[np.bool_]
"""N class numbers (-1: no label), or N K yes and no where images have several labels."""

_JOINED = "jpg jpeg jpe jfif png webp bmp gif tif tiff ppm pgm pbm pnm avif heic heif jp2 j2k jxl tga"
IMAGE_EXTENSIONS = frozenset(f".{ending}" for ending in _JOINED.split())
"""How the names of image files end, in lower case."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One labeled image, not yet decoded."""

    key: str
    """Its name in its source: stable, unique, for people (a relative path, a row, a tar member)."""
    image: ImageLike
    target: int | tuple[int, ...]
    """The class's number, -1 for none; or the numbers of all its classes."""


class Source(Protocol):
    """Any number of labeled images, each of which can be reached by its number.

    Sources are picklable (they travel to worker processes) and may be read by several threads.
    """

    name: str
    """What people call it."""
    labels: tuple[str, ...]
    """Names of the classes, in order."""
    multi_label: bool
    """Whether an image may have several labels, or none."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def key(self, index: int) -> str:
        """The sample's key, without reading it."""

    @property
    def targets(self) -> Targets:
        """All labels, without decoding anything."""

    @property
    def pixels(self) -> npt.NDArray[np.uint8] | None:
        """N H W C, where everything is decoded and of one size already; else None."""

    @property
    def blocks(self) -> tuple[int, ...] | None:
        """Sizes of consecutive runs that are cheap to read together (tar shards); None: any order is as good."""


@dataclass(frozen=True)
class SourceSplits:
    """What a source offers by itself, before anything is held out of it."""

    train: Any  # a Source, or a Stream; all of it, where the source has no parts
    validation: Source | None = None
    test: Source | None = None
    notes: tuple[str, ...] = ()
    groups: Iterable[str] | None = None
    """Names of the groups that the images of `train` belong to, where the data tell."""
    stratify: bool = False
    """Nothing is ever added to it: what is held out is an exact share of each class."""

    @property
    def has_eval_split(self) -> bool:
        """Whether it has images of its own to measure on."""
        return self.validation is not None or self.test is not None

    @property
    def evaluation_source(self) -> Source:
        """What an evaluation reads: the test part, else the validation part, else everything."""
        return next((part for part in (self.test, self.validation) if part is not None), self.train)


@dataclass(frozen=True)
class Splits:
    """One data set, ready to learn from."""

    train: Any  # a Source, or a Stream
    validation: Source
    test: Source | None = None
    """Images for the final number; the same object as `validation` where that is all there is."""
    eval_split: str = "validation"
    """What `validation` is: "validation" (its own split), "test" (there was no other) or "held out"."""
    notes: tuple[str, ...] = field(default=())
    """What was chosen or found: said aloud."""
