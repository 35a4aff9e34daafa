"""A cache of the images of large Parquet files, concatenated in one flat file for random access.

A Parquet file can only be read by whole row groups. If the order of samples needs the same row
groups repeatedly, the images are copied to a flat file once: then an image is one read in any
order, and all processes share the operating system's page cache.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from vitrail.data.sources import data_cache
from vitrail.data.sources.progress import progress_bar
from vitrail.storage.atomic_write import atomic_file
from vitrail.storage.locks import file_lock

FREE_SPACE_FACTOR = 1.05
"""Free disk space required, as a multiple of the size of the images."""


class ExtractedImages:
    """Encoded images in one file, by index."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offsets = np.load(_offsets_path(path), mmap_mode="r")  # N + 1

    def __getitem__(self, index: int) -> bytes:
        start, end = int(self.offsets[index]), int(self.offsets[index + 1])
        with open(self.path, "rb", buffering=0) as file:
            file.seek(start)
            return file.read(end - start)


def extract_images(files: Sequence[Path], column: str, groups: Iterator[Any], size: int) -> ExtractedImages | None:
    """Copy the images of all row groups to the cache, or find the copy there; None if the disk is too full.

    With several processes, one copies and the others wait.
    """
    path = data_cache.cache_dir() / "parquet" / f"{_cache_name(files, column)}.bin"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(path.with_suffix(".lock")):
            if not _offsets_path(path).exists():
                if shutil.disk_usage(path.parent).free < FREE_SPACE_FACTOR * size:
                    return None
                with atomic_file(path) as temporary, temporary.open("wb") as file:
                    lengths = _copy(file, groups, size)
                # Written last: its presence marks a complete copy.
                with atomic_file(_offsets_path(path)) as temporary, temporary.open("wb") as file:
                    np.save(file, np.cumsum([0, *lengths]))
        return ExtractedImages(path)
    except OSError:  # a full disk, or a folder without write permission
        return None


def _copy(out: IO[bytes], groups: Iterator[Any], size: int) -> list[int]:
    """Write the images of all row groups one after the other; returns their lengths."""
    lengths = []
    with progress_bar("extracting images from Parquet", size, in_bytes=True) as advance:
        for group in groups:
            for value in group:
                data = value.as_py()
                data = (data.get("bytes") if isinstance(data, dict) else data) or b""
                out.write(data)
                lengths.append(len(data))
                advance(len(data))
    return lengths


def _offsets_path(path: Path) -> Path:
    return path.with_suffix(".npy")


def _cache_name(files: Sequence[Path], column: str) -> str:
    """A file name that changes when one of the files is modified or replaced."""
    hasher = hashlib.sha256(column.encode())
    for file in files:
        status = os.stat(file)
        hasher.update(f"\n{file} {status.st_size} {status.st_mtime_ns}".encode("utf-8", "surrogateescape"))
    return hasher.hexdigest()[:24]
