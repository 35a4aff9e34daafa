"""Images inside Parquet files, any of which can be reached without reading them all.

A Parquet file is read by row groups. Those last used are kept, up to CACHE bytes in each process:
data that fit are read once, and of larger ones `blocks` tells the order of samples which rows lie
together. Where row groups have to be read again and again all the same, the images are copied out
once (unpacked.py).
"""

from __future__ import annotations

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
"""Bytes of images that are kept in memory."""

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
"""What belongs to one process, and does not travel to another."""
MAX_REREADS, MAX_REREAD_FRACTION = 16, 0.05
"""Row groups that may be read a second time, in number and as a share of the images read, before that happens."""

# N rows in G row groups of several files


class ParquetSource:
    """Images as bytes, or as {bytes, path}; the key is the file's name and the row's number."""

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
        firsts: dict[int, int] = {}
        for (f, _), end, rows in zip(self._groups, self._ends, self._rows, strict=True):
            firsts.setdefault(f, int(end - rows))
        self._firsts = np.array([firsts.get(f, 0) for f in range(len(files))], np.int64)
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
        several = tuple(np.flatnonzero(target).tolist()) if self.multi_label else int(target)
        return Sample(self.key(index), value or b"", several)

    def key(self, index: int) -> str:
        index = range(len(self))[index]
        file = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return f"{self.files[file].name}:{index - int(self._firsts[file])}"

    def update_hash(self, found: Any, indices: npt.NDArray[np.int64] | None = None) -> None:
        """Feed what these keys are made of to a hash of hashlib's: files' names, where each begins, rows."""
        numbers = np.arange(len(self)) if indices is None else indices
        names = "\0".join(file.name for file in self.files).encode("utf-8", "surrogateescape")
        found.update(names + self._firsts.astype("<i8").tobytes() + numbers.astype("<i8").tobytes())

    @property
    def blocks(self) -> tuple[int, ...] | None:
        return tuple(self._rows.tolist()) if self._bytes > CACHE_BYTES else None

    def _external_path(self, group: int, path: str | None) -> str | None:
        """Where a row has a path and no bytes, the file lies beside the table."""
        return str(self.files[self._groups[group][0]].parent / path) if path else None

    def _row_group(self, group: int) -> Any:
        """The images of one row group."""
        with self._lock:
            self._num_reads += 1
            if (found := self._cached_groups.get(group)) is not None:
                self._cached_groups.move_to_end(group)
                return found
            self._num_rereads += group in self._groups_read
            self._groups_read.add(group)
            if self._num_rereads >= MAX_REREADS and self._num_rereads > MAX_REREAD_FRACTION * self._num_reads:
                self._extract_images()
            found = self._read(group)
            self._cached_groups[group] = found
            while (
                len(self._cached_groups) > 1
                and sum(kept.nbytes for kept in self._cached_groups.values()) > self._cache_limit
            ):
                self._cached_groups.popitem(last=False)
            return found

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
        """Copy the images out; where there is no room for that, keep more row groups in memory."""
        self._num_reads = self._num_rereads = 0
        whole = (self._read(group) for group in range(len(self._groups)))
        self._extracted = extract_images(self.files, self.column, whole, self._bytes)
        if self._extracted is not None:
            self._cached_groups.clear()
        elif self._cache_limit == CACHE_BYTES:
            self._cache_limit = 8 * CACHE_BYTES
            room = f"{self._bytes / 1e9:.1f} GB in {data_cache.display_path(data_cache.cache_dir())}"
            warn_once([f"row groups are read again and again; {room} would make it faster"], about=self.name)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in PROCESS_LOCAL}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset_process_state()


def read_schema(path: Path) -> Any:
    """The columns of a Parquet file, or an error that names it."""
    try:
        return pq.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise DataError(f"{path} cannot be read as Parquet: {reason}; copy or download it again.") from error


def read_columns(files: Sequence[Path], columns: Sequence[str]) -> Any:
    """Some columns of all files, in order, as one table."""
    try:
        if not columns:  # a table of none forgets how many rows it has
            return pa.table({"": pa.nulls(sum(pq.read_metadata(path).num_rows for path in files))})
        tables = [pq.read_table(path, columns=list(columns), partitioning=None) for path in files]
        return pa.concat_tables(tables, promote_options="default")
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise DataError(f"{files[0].parent} has Parquet files that cannot be read together: {reason}.") from error


def _row_groups(path: Path, column: str) -> list[tuple[int, int, int]]:
    """Number, rows and bytes of each row group that has rows."""
    metadata = pq.read_metadata(path)
    found = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        size = sum(
            group.column(c).total_uncompressed_size
            for c in range(group.num_columns)
            if group.column(c).path_in_schema.split(".")[0] == column
        )
        if group.num_rows:
            found.append((number, group.num_rows, size))
    return found
