"""Bytes -> pixels -> the numbers a network takes."""

from vitrail.data.decode import ImageLike, decode
from vitrail.data.preprocess import Preprocess

__all__ = ["ImageLike", "Preprocess", "decode"]
