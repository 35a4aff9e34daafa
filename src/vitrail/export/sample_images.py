"""Images to compare on where none are named: two photographs, parts of them, mirrored."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.data.decode import PILLOW_MODES, decode
from vitrail.errors import DataError

Pixels = npt.NDArray[Any]

PHOTOGRAPHS = ("china.jpg", "flower.jpg")
"""They come with scikit-learn, openly licensed."""
APART = 7
"""Pixels by which every further three channels are moved, in an image with many."""


def sample_images(channels: int = 3) -> list[Pixels]:
    """Sixteen images, H W C each: of both photographs the whole and three parts, each with its mirror image.

    Channels that no photograph has are made of red, green and blue, each time moved a little further.
    """
    if channels in PILLOW_MODES:
        return [decode(image, channels) for image in _photographs()]
    return [_bands(image, channels) for image in _photographs()]


def _bands(image: Pixels, channels: int) -> Pixels:
    moved = [np.roll(image[..., i % 3], APART * (i // 3), axis=(0, 1)) for i in range(channels)]
    return np.stack(moved, axis=2)


@lru_cache(maxsize=1)
def _photographs() -> list[Pixels]:
    found = []
    for name in PHOTOGRAPHS:
        photograph = decode(_folder() / name)
        height, width = photograph.shape[:2]
        parts = [
            photograph,
            photograph[: height * 2 // 3, : width * 2 // 3],
            photograph[height // 3 :, width // 3 :],
            photograph[height // 4 : -height // 4, width // 4 : -width // 4],
        ]
        found += [np.ascontiguousarray(side) for part in parts for side in (part, part[:, ::-1])]
    return found


def _folder() -> Path:
    """Looked up and not imported, which takes seconds."""
    spec = importlib.util.find_spec("sklearn")
    folder = Path(spec.origin).parent / "datasets" / "images" if spec and spec.origin else Path()
    if not (folder / PHOTOGRAPHS[0]).is_file():
        raise DataError("the two photographs of scikit-learn are not there to compare on; pass --check FOLDER.")
    return folder
