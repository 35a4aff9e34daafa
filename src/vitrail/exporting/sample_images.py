"""Default images for comparisons and timings: two photographs, crops of them, and their mirror images."""

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
"""Openly licensed, shipped with scikit-learn."""
CHANNEL_SHIFT = 7
"""Shift in pixels between one group of three channels and the next, for images with more channels."""


def sample_images(channels: int = 3) -> list[Pixels]:
    """Sixteen images, each H W C: both photographs and three crops of each, and the mirror images of all eight.

    Numbers of channels that photographs do not have are made of red, green and blue, shifted differently.
    """
    if channels in PILLOW_MODES:
        return [decode(image, channels) for image in _photographs()]
    return [_make_channels(image, channels) for image in _photographs()]


def _make_channels(image: Pixels, channels: int) -> Pixels:
    shifted = [np.roll(image[..., i % 3], CHANNEL_SHIFT * (i // 3), axis=(0, 1)) for i in range(channels)]
    return np.stack(shifted, axis=2)


@lru_cache(maxsize=1)
def _photographs() -> list[Pixels]:
    """The sixteen images in RGB."""
    images = []
    for name in PHOTOGRAPHS:
        photograph = decode(_photograph_folder() / name)
        height, width = photograph.shape[:2]
        crops = [
            photograph,
            photograph[: height * 2 // 3, : width * 2 // 3],
            photograph[height // 3 :, width // 3 :],
            photograph[height // 4 : -height // 4, width // 4 : -width // 4],
        ]
        images += [np.ascontiguousarray(image) for crop in crops for image in (crop, crop[:, ::-1])]
    return images


def _photograph_folder() -> Path:
    """Folder of the photographs, found without importing scikit-learn, which takes seconds."""
    spec = importlib.util.find_spec("sklearn")
    folder = Path(spec.origin).parent / "datasets" / "images" if spec and spec.origin else Path()
    if not (folder / PHOTOGRAPHS[0]).is_file():
        raise DataError(
            "the sample photographs of scikit-learn were not found; pass --check FOLDER with images for the comparison."
        )
    return folder
