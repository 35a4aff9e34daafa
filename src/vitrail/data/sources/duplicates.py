"""Find image files that occur, byte for byte, both in the training split and in another.

All files are compared by size; only files of equal size are opened, and only those with the same
bytes in the middle are read completely.
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
"""Images in both splits together; more are not compared, because each costs a `stat` call."""
MAX_EXAMPLES = 3
MIDDLE_BYTES = 64
"""Bytes compared in the middle of a file; the headers of images are often equal."""


def describe_duplicates(train: Source, other: Source) -> list[str]:
    """Notes about images that are in both splits, with examples."""
    train_files, other_files = _files(train), _files(other)
    if train_files is None or other_files is None:
        return []
    if len(train) + len(other) > MAX_COMPARED:
        return [f"not searched for duplicates: more than {MAX_COMPARED:,} images"]
    pairs = find_duplicates(train_files, other_files)
    if not pairs:
        return []
    examples = ", ".join(f"{b} = {a}" for a, b in pairs[:MAX_EXAMPLES]) + (", ..." if len(pairs) > MAX_EXAMPLES else "")
    count = "1 validation or test image is" if len(pairs) == 1 else f"{len(pairs):,} validation or test images are"
    return [f"{count} also in the training data, byte for byte: {examples}"]


def find_duplicates(train: Iterable[tuple[str, str]], other: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """(key in train, key in other) of equal files, given (key, path) pairs; at most one pair for each key of other."""
    by_size: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for key, file in other:
        if size := _size(file):
            by_size[size].append((key, file))
    candidates: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for key, file in train:
        if (size := _size(file)) in by_size:
            candidates[size].append((key, file))
    pairs = []
    for size, same_size in candidates.items():
        by_middle = defaultdict(list)
        for key, file in same_size:
            by_middle[_middle(file, size)].append((key, file))
        for key, file in by_size[size]:
            if same_middle := by_middle.get(_middle(file, size)):
                digest = _digest(file)
                same = next((k for k, f in same_middle if _digest(f) == digest), None) if digest else None
                pairs += [(same, key)] if same is not None else []
    return sorted(pairs, key=lambda pair: pair[1])


def _files(source: Source) -> Iterator[tuple[str, str]] | None:
    """(key, path) of each image; None if the images are not files."""
    indices: Iterable[int] = range(len(source))
    base = source
    while isinstance(base, Subset):
        base_indices = base.indices
        indices = [int(base_indices[i]) for i in indices]
        base = base.source
    if isinstance(base, FolderSource):
        root = str(base.root)
        keys = list(base.paths)
        return ((keys[i], f"{root}{os.sep}{keys[i]}") for i in indices)
    if isinstance(base, PathSource):
        return ((base.key(i), base.file(i)) for i in indices)
    return None


def _size(file: str) -> int:
    """0 if the file cannot be accessed; the decoder reports it later."""
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
