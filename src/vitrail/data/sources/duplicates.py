"""Images that are both learned from and measured on, byte for byte.

Cheap for the many that are not: all files are asked for their size, only those of equal size are
opened, only those whose middles agree are read whole.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator

from vitrail.data.sources.base import Source
from vitrail.data.sources.folder import FolderSource
from vitrail.data.sources.subset import Subset
from vitrail.data.sources.table import PathSource

MAX_COMPARED = 200_000
"""So many images are compared without being asked; on a slow disk each costs a look."""
MAX_EXAMPLES = 3
MIDDLE_BYTES = 64
"""Bytes from the middle of a file, where images differ; their beginnings are alike."""


def describe_duplicates(learned: Source, measured: Source) -> list[str]:
    """What to say of images that are in both, with examples."""
    ours, theirs = _files(learned), _files(measured)
    if ours is None or theirs is None:
        return []
    if len(learned) + len(measured) > MAX_COMPARED:
        return [f"not compared byte for byte: more than {MAX_COMPARED:,} images"]
    pairs = find_duplicates(ours, theirs)
    if not pairs:
        return []
    examples = ", ".join(f"{b} = {a}" for a, b in pairs[:MAX_EXAMPLES]) + (", ..." if len(pairs) > MAX_EXAMPLES else "")
    what = "image that is measured on is" if len(pairs) == 1 else "images that are measured on are"
    return [f"{len(pairs):,} {what} learned from too, byte for byte: {examples}"]


def find_duplicates(learned: Iterable[tuple[str, str]], measured: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """(key of one that is learned from, key of the same that is measured on), once for each of the latter."""
    by_size: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for key, file in measured:
        if size := _size(file):
            by_size[size].append((key, file))
    rivals: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for key, file in learned:
        if (size := _size(file)) in by_size:
            rivals[size].append((key, file))
    pairs = []
    for size, ours in rivals.items():
        middles = defaultdict(list)
        for key, file in ours:
            middles[_middle(file, size)].append((key, file))
        for key, file in by_size[size]:
            if alike := middles.get(_middle(file, size)):
                whole = _digest(file)
                same = next((k for k, f in alike if _digest(f) == whole), None) if whole else None
                pairs += [(same, key)] if same is not None else []
    return sorted(pairs, key=lambda pair: pair[1])


def _files(source: Source) -> Iterator[tuple[str, str]] | None:
    """Key and file of each image; None where the images are no files."""
    indices: Iterable[int] = range(len(source))
    whole = source
    while isinstance(whole, Subset):
        base = whole.indices
        indices = [int(base[i]) for i in indices]
        whole = whole.source
    if isinstance(whole, FolderSource):
        root = str(whole.root)
        keys = list(whole.paths)
        return ((keys[i], f"{root}{os.sep}{keys[i]}") for i in indices)
    if isinstance(whole, PathSource):
        return ((whole.key(i), whole.file(i)) for i in indices)
    return None


def _size(file: str) -> int:
    """0 for what cannot be looked at; that is somebody else's to report."""
    try:
        return os.stat(file).st_size
    except (OSError, ValueError):
        return 0


def _middle(file: str, size: int) -> bytes:
    try:
        handle = os.open(file, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    except OSError:
        return b""
    try:
        os.lseek(handle, size // 2, os.SEEK_SET)
        return os.read(handle, MIDDLE_BYTES)
    finally:
        os.close(handle)


def _digest(file: str) -> bytes:
    try:
        with open(file, "rb") as opened:
            return hashlib.file_digest(opened, "sha256").digest()
    except OSError:
        return b""
