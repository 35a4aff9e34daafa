"""A sequence of strings stored in one block of memory.

A list of a million paths is a million objects: slow to pickle, and copied page by page into every
forked worker, because reading them changes their reference counts. Two arrays avoid both.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt


class PackedStrings:
    """An immutable sequence of strings; file names that are not valid UTF-8 are preserved."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        encoded = [text.encode("utf-8", "surrogateescape") for text in texts]
        self._text = b"".join(encoded)
        self._ends = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum([len(text) for text in encoded], out=self._ends[1:])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> str:
        if not -len(self) <= index < len(self):
            raise IndexError(f"{index} of {len(self)} strings")
        index %= len(self)
        return self._text[self._ends[index] : self._ends[index + 1]].decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        ends = self._ends.tolist()
        for start, end in itertools.pairwise(ends):
            yield self._text[start:end].decode("utf-8", "surrogateescape")

    def take(self, indices: npt.ArrayLike) -> PackedStrings:
        return PackedStrings(self[int(i)] for i in np.asarray(indices))

    def update_hash(self, hasher: Any, indices: npt.NDArray[np.int64] | None = None) -> None:
        """Update a hashlib object with the strings at `indices` (None: all), in order."""
        lengths = np.diff(self._ends)
        if indices is None:
            hasher.update(lengths.astype("<i8").tobytes())
            hasher.update(self._text)
            return
        hasher.update(lengths[indices].astype("<i8").tobytes())
        text = memoryview(self._text)
        # Consecutive strings are hashed at once: after a holdout, the indices are mostly runs.
        cuts = np.flatnonzero(np.diff(indices) != 1) + 1
        starts, stops = np.append(0, cuts), np.append(cuts, len(indices))
        if len(indices):
            first, last = self._ends[indices[starts]].tolist(), self._ends[indices[stops - 1] + 1].tolist()
            for start, stop in zip(first, last, strict=True):
                hasher.update(text[start:stop])
