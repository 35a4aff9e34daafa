"""The images of large Parquet files, one after another in a plain file, for reading in any order.

A Parquet file gives up an image only with the whole row group around it. Where an order of samples
makes the same groups come and go, copying them out once is what costs least: then an image is one
read, whatever the order, and all processes share what the system keeps in memory.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from filelock import FileLock

from vitrail.data.sources import data_cache, progress

FREE_SPACE_FACTOR = 1.05
"""Free space that is wanted, as a multiple of the images' bytes."""


class ExtractedImages:
    """Images by number, out of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offsets = np.load(_offsets_path(path), mmap_mode="r")  # N + 1

    def __getitem__(self, index: int) -> bytes:
        start, end = int(self.offsets[index]), int(self.offsets[index + 1])
        with open(self.path, "rb", buffering=0) as file:
            file.seek(start)
            return file.read(end - start)


def extract_images(files: Sequence[Path], column: str, groups: Iterator[Any], size: int) -> ExtractedImages | None:
    """Copy the images of all row groups into the cache, or find them there; None where there is no room.

    Several processes may want it at once: one copies, the others wait for it.
    """
    path = data_cache.cache_dir() / "parquet" / f"{_cache_name(files, column)}.bin"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            if not _offsets_path(path).exists():
                if shutil.disk_usage(path.parent).free < FREE_SPACE_FACTOR * size:
                    return None
                lengths: list[int] = []
                data_cache.write_atomic(path, lambda file: _copy(file, groups, lengths, size))
                ends = np.cumsum([0, *lengths])
                data_cache.write_atomic(_offsets_path(path), lambda file: np.save(file, ends))  # last: now it counts
        return ExtractedImages(path)
    except (OSError, NotImplementedError):  # a full disk, a folder that may not be written
        return None


def _copy(out: IO[bytes], groups: Iterator[Any], lengths: list[int], size: int) -> None:
    with progress.progress_bar("unpacking Parquet", size, in_bytes=True) as advance:
        for group in groups:
            for value in group:
                data = value.as_py()
                data = (data.get("bytes") if isinstance(data, dict) else data) or b""
                out.write(data)
                lengths.append(len(data))
                advance(len(data))


def _offsets_path(path: Path) -> Path:
    return path.with_suffix(".npy")


def _cache_name(files: Sequence[Path], column: str) -> str:
    """Another one when a file is changed or replaced."""
    whole = hashlib.sha256(column.encode())
    for file in files:
        found = os.stat(file)
        whole.update(f"\n{file} {found.st_size} {found.st_mtime_ns}".encode("utf-8", "surrogateescape"))
    return whole.hexdigest()[:24]
