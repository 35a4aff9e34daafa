"""What every source of labelled pictures offers, and how one is split."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vitrail.data.decode import Picture

Targets = npt.NDArray[np.int64] | npt.NDArray[np.bool_]
"""N class numbers (-1: no label), or N K yes and no where pictures have several labels."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One labelled picture, not yet decoded."""

    key: str
    """Its name in its source: stable, unique, for people (a relative path, a row, a tar member)."""
    picture: Picture
    target: int | tuple[int, ...]
    """The class's number, -1 for none; or the numbers of all its classes."""


class Source(Protocol):
    """Any number of labelled pictures, each of which can be reached by its number.

    Sources are picklable (they travel to worker processes) and may be read by several threads.
    """

    name: str
    """What people call it."""
    labels: tuple[str, ...]
    """Names of the classes, in order."""
    several: bool
    """Whether a picture may have several labels, or none."""

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
class Splits:
    """One data set, ready to learn from."""

    train: Any  # a Source, or a Stream
    validation: Source
    test: Source | None = None
    measured_on: str = "validation"
    """What `validation` is: "validation" (its own split), "test" (there was no other) or "held out"."""
    notes: tuple[str, ...] = field(default=())
    """What was chosen or found: said aloud."""
