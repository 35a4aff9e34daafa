"""Random access to images stored inside Parquet files.

A Parquet file is read by row groups. The most recently used ones are cached, up to CACHE_BYTES in
each process. For data larger than that, `blocks` lets the sampler keep the rows of a group
together. If row groups are still read repeatedly, the images are copied to a flat file once
(parquet_cache.py).
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from vitrail.data.sources import data_cache
from vitrail.data.sources.base import Sample, Targets
from vitrail.data.sources.parquet_cache import ExtractedImages, extract_images
from vitrail.errors import DataError, ImageError
from vitrail.runtime import warn_once

CACHE_BYTES = 512 << 20
"""Bytes of row groups cached in memory, per process."""

PROCESS_LOCAL = (
    "_lock",
    "_cached_groups",
    "_open_files",
    "_extracted",
    "_groups_read",
    "_num_reads",
    "_num_rereads",
    "_cache_limit",
)
"""Attributes that are not pickled."""
MAX_REREADS, MAX_REREAD_FRACTION = 16, 0.05
"""Repeated reads of row groups, in number and as a fraction of the images read, before the images are copied."""

# N rows in G row groups of several files


class ParquetSource:
    """Images in a column of bytes or of {bytes, path}; the key is the file's name and the row number.

    Files of the same name in several folders are named by their paths below the common one.
    """

    pixels = None

    def __init__(
        self,
        name: str,
        files: Sequence[Path],
        column: str,
        targets: Targets,
        labels: tuple[str, ...],
        multi_label: bool,
    ) -> None:
        self.name, self.labels, self.multi_label = name, labels, multi_label
        self.files, self.column, self.targets = tuple(files), column, targets
        groups = [(f, g, rows, size) for f, path in enumerate(files) for g, rows, size in _row_groups(path, column)]
        self._groups = [(f, g) for f, g, _, _ in groups]
        self._rows = np.array([rows for _, _, rows, _ in groups], np.int64)
        self._ends = np.cumsum(self._rows)  # G
        self._bytes = sum(size for *_, size in groups)
        first_rows: dict[int, int] = {}
        for (f, _), end, rows in zip(self._groups, self._ends, self._rows, strict=True):
            first_rows.setdefault(f, int(end - rows))
        self._first_rows = np.array([first_rows.get(f, 0) for f in range(len(files))], np.int64)
        self._names = _unique_names(self.files)
        self._reset_process_state()

    def _reset_process_state(self) -> None:
        self._lock = threading.Lock()
        self._cached_groups: OrderedDict[int, Any] = OrderedDict()
        self._open_files: dict[int, Any] = {}
        self._extracted: ExtractedImages | None = None
        self._groups_read: set[int] = set()
        self._num_reads = self._num_rereads = 0
        self._cache_limit = CACHE_BYTES

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Sample:
        index = range(len(self))[index]
        group = int(np.searchsorted(self._ends, index, side="right"))
        row = index - int(self._ends[group] - self._rows[group])
        value = (self._extracted[index] if self._extracted else b"") or self._row_group(group)[row].as_py()
        if isinstance(value, dict):
            value = value.get("bytes") or self._external_path(group, value.get("path"))
        target = self.targets[index]
        classes = tuple(np.flatnonzero(target).tolist()) if self.multi_label else int(target)
        return Sample(self.key(index), value or b"", classes)

    def key(self, index: int) -> str:
        index = range(len(self))[index]
        file = int(np.searchsorted(self._first_rows, index, side="right")) - 1
        return f"{self._names[file]}:{index - int(self._first_rows[file])}"

    def update_hash(self, hasher: Any, indices: npt.NDArray[np.int64] | None = None) -> None:
        """Update a hashlib object with file names, first rows of the files, and row indices (None: all)."""
        numbers = np.arange(len(self)) if indices is None else indices
        names = "\0".join(self._names).encode("utf-8", "surrogateescape")
        hasher.update(names + self._first_rows.astype("<i8").tobytes() + numbers.astype("<i8").tobytes())

    @property
    def blocks(self) -> tuple[int, ...] | None:
        return tuple(self._rows.tolist()) if self._bytes > CACHE_BYTES else None

    def _external_path(self, group: int, path: str | None) -> str | None:
        """The file that a row with a path and no bytes refers to, in the folder of the table."""
        return str(self.files[self._groups[group][0]].parent / path) if path else None

    def _row_group(self, group: int) -> Any:
        """The images of one row group, from the cache if possible."""
        with self._lock:
            self._num_reads += 1
            if (images := self._cached_groups.get(group)) is not None:
                self._cached_groups.move_to_end(group)
                return images
            self._num_rereads += group in self._groups_read
            self._groups_read.add(group)
            if self._num_rereads >= MAX_REREADS and self._num_rereads > MAX_REREAD_FRACTION * self._num_reads:
                self._extract_images()
            images = self._read(group)
            self._cached_groups[group] = images
            while (
                len(self._cached_groups) > 1
                and sum(cached.nbytes for cached in self._cached_groups.values()) > self._cache_limit
            ):
                self._cached_groups.popitem(last=False)
            return images

    def _read(self, group: int) -> Any:
        file, inside = self._groups[group]
        try:
            if file not in self._open_files:
                self._open_files[file] = pq.ParquetFile(self.files[file], memory_map=True)
            table = self._open_files[file].read_row_group(inside, columns=[self.column], use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise ImageError(f"row group {inside} of {self.files[file]} cannot be read: {error}.") from error
        return table.column(0).combine_chunks()

    def _extract_images(self) -> None:
        """Copy the images to a flat file; if the disk is too full, cache more row groups in memory instead."""
        self._num_reads = self._num_rereads = 0
        groups = (self._read(group) for group in range(len(self._groups)))
        self._extracted = extract_images(self.files, self.column, groups, self._bytes)
        if self._extracted is not None:
            self._cached_groups.clear()
        elif self._cache_limit == CACHE_BYTES:
            self._cache_limit = 8 * CACHE_BYTES
            space = f"{self._bytes / 1e9:.1f} GB of free space in {data_cache.display_path(data_cache.cache_dir())}"
            warn_once([f"row groups are read repeatedly, which is slow; {space} would avoid it"], about=self.name)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in PROCESS_LOCAL}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset_process_state()


def read_schema(path: Path) -> Any:
    """The Arrow schema of a Parquet file; DataError if it cannot be read."""
    try:
        return pq.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise DataError(f"{path} cannot be read as Parquet: {reason}; copy or download it again.") from error


def read_columns(files: Sequence[Path], columns: Sequence[str]) -> Any:
    """The given columns of all files, concatenated to one table."""
    try:
        if not columns:  # a table without columns would lose its number of rows
            return pa.table({"": pa.nulls(sum(pq.read_metadata(path).num_rows for path in files))})
        tables = [pq.read_table(path, columns=list(columns), partitioning=None) for path in files]
        return pa.concat_tables(tables, promote_options="default")
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise DataError(f"{files[0].parent} has Parquet files that cannot be read together: {reason}.") from error


def _unique_names(files: Sequence[Path]) -> list[str]:
    names = [file.name for file in files]
    if len(set(names)) == len(names):
        return names
    root = os.path.commonpath([file.parent for file in files])
    return [file.relative_to(root).as_posix() for file in files]


def _row_groups(path: Path, column: str) -> list[tuple[int, int, int]]:
    """(index, rows, bytes) of each row group that is not empty."""
    metadata = pq.read_metadata(path)
    groups = []
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        size = sum(
            group.column(c).total_uncompressed_size
            for c in range(group.num_columns)
            if group.column(c).path_in_schema.split(".")[0] == column
        )
        if group.num_rows:
            groups.append((index, group.num_rows, size))
    return groups
