"""Pictures to compare on where none are named: two photographs, parts of them, mirrored."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.data.decode import decode

Pixels = npt.NDArray[Any]


def samples(channels: int = 3) -> list[Pixels]:
    """Sixteen pictures, H W C each: of both photographs the whole and three parts, each with its mirror image."""
    return [decode(picture, channels) for picture in _photographs()]


@lru_cache(maxsize=1)
def _photographs() -> list[Pixels]:
    """From the two that come with scikit-learn, openly licensed."""
    from sklearn.datasets import load_sample_images  # takes a second to import

    found = []
    for photograph in load_sample_images().images:
        height, width = photograph.shape[:2]
        parts = [
            photograph,
            photograph[: height * 2 // 3, : width * 2 // 3],
            photograph[height // 3 :, width // 3 :],
            photograph[height // 4 : -height // 4, width // 4 : -width // 4],
        ]
        found += [np.ascontiguousarray(side) for part in parts for side in (part, part[:, ::-1])]
    return found
