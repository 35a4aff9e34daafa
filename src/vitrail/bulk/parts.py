"""The parts of a job: whole batches of one split, always the same ones, so that every row has the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

IMAGES_PER_PART = 1024
"""Images in a part by default: what is computed again, for each worker, when a run is killed."""


@dataclass(frozen=True)
class Part:
    """A range of images of a split."""

    number: int
    split: str
    indices: range

    def __len__(self) -> int:
        return len(self.indices)


def plan_parts(images: Mapping[str, int], images_per_part: int) -> list[Part]:
    """Split each split into parts, in order. `images`: number of images by split."""
    ranges = ((split, part) for split, count in images.items() for part in _ranges(count, images_per_part))
    return [Part(number, split, part) for number, (split, part) in enumerate(ranges)]


def whole_batches(images_per_part: int, batch_size: int) -> int:
    """The number of images in a part, at least one batch."""
    return max(images_per_part // batch_size, 1) * batch_size


def _ranges(count: int, size: int) -> Iterator[range]:
    yield from (range(first, min(first + size, count)) for first in range(0, count, size))
