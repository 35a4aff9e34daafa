"""Bytes -> pixels -> the numbers a network takes."""

from vitrail.data.decode import Picture, decode
from vitrail.data.preprocess import Preprocess

__all__ = ["Picture", "Preprocess", "decode"]
