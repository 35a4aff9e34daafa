"""A hash of a source's keys and labels, in order, to detect that its samples have changed.

Pixels are not read: an image replaced under the same name is not detected. On one core, a million
samples of a folder take 0.3 s, or 0.4 s with a tenth of them held out.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from vitrail.data.sampler import Indices
from vitrail.data.sources.base import Targets
from vitrail.data.sources.subset import Subset

KEYS_PER_UPDATE = 4096
"""Keys joined for each update of the hash."""


def fingerprint(source: Any) -> str | None:
    """Hash of the (key, target) of every sample, in order; None for a stream, whose samples are unknown."""
    if not hasattr(source, "__len__"):
        return None
    hasher = hashlib.blake2b(digest_size=16)
    hasher.update(_bytes(source.targets))
    indices: Indices | None = None
    while isinstance(source, Subset):
        indices = source.indices if indices is None else source.indices[indices]
        source = source.source
    keys = getattr(source, "paths", None) or getattr(source, "_keys", None) or source
    if hasattr(keys, "update_hash"):  # hashes many keys at a time
        keys.update_hash(hasher, indices)
    else:
        numbers = range(len(source)) if indices is None else indices.tolist()
        for first in range(0, len(numbers), KEYS_PER_UPDATE):
            text = "\0".join(source.key(i) for i in numbers[first : first + KEYS_PER_UPDATE])
            hasher.update(f"{text}\0".encode("utf-8", "surrogateescape"))
    return hasher.hexdigest()


def _bytes(targets: Targets) -> bytes:
    """A byte representation that is the same on every platform."""
    if targets.ndim == 2:
        return f"{targets.shape} ".encode() + np.packbits(targets).tobytes()
    return targets.astype("<i8").tobytes()
