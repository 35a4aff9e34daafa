"""Data loading: image files -> uint8 pixels -> augmented, normalized float batches."""

from vitrail.data.decode import ImageLike, decode
from vitrail.data.preprocess import Preprocess

__all__ = ["ImageLike", "Preprocess", "decode"]
