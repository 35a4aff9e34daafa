"""Features on disk as numbered rows: a Parquet file of `vitrail embed`, or a folder of its parts in order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from vitrail.errors import DataError, NotFoundError
from vitrail.evaluation.feature_file import read_metadata
from vitrail.storage.part_folder import PartFolder

# N rows in all, B rows of a block, D features

BLOCK_VALUES = 2**21
"""Feature values read at a time: 8 MiB in float32."""


@dataclass(frozen=True)
class Row:
    """What the features' file says about one image."""

    key: str
    """Name of the image in its data set."""
    split: str
    label: str | list[str] | None
    """Class name; several for multi-label data, None without a label."""


@dataclass(frozen=True)
class PartState:
    """Size and time of change of a part, as the file system reports them: what a quick check compares."""

    name: str
    num_bytes: int
    mtime_ns: int


class FeatureStore:
    """The rows of a Parquet file, or of the parts of a folder. Only footers are read before rows are asked for."""

    def __init__(
        self, path: Path, parts: Sequence[Path], metadata: dict[str, Any], counts: Sequence[int] | None = None
    ) -> None:
        self.path, self.parts, self.metadata, self._counts = path, tuple(parts), metadata, counts

    @classmethod
    def open(cls, path: str | Path) -> FeatureStore:
        """Open a Parquet file of `vitrail embed`, or a folder with a manifest and its parts."""
        path = Path(path).expanduser()
        metadata = read_metadata(path)
        store = cls(path, PartFolder.open(path).part_paths() if path.is_dir() else [path], metadata)
        _ = store.width  # checks the columns
        return store

    def with_counts(self, counts: Sequence[int]) -> FeatureStore:
        """The store with known numbers of rows, so that not every part's footer is read."""
        return FeatureStore(self.path, self.parts, self.metadata, counts)

    @property
    def states(self) -> list[PartState]:
        """The present state of every part."""
        found = [(part, part.stat()) for part in self.parts]
        return [PartState(part.name, state.st_size, state.st_mtime_ns) for part, state in found]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Rows of each part."""
        if self._counts is not None:
            return tuple(self._counts)
        return tuple(_footer(part).num_rows for part in self.parts)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Number of the first row of each part, and the number of all rows."""
        return (0, *accumulate(self.counts))

    def __len__(self) -> int:
        return self.starts[-1]

    @cached_property
    def width(self) -> int:
        """Features of a row."""
        for part in self.parts:
            return _width(part)
        raise DataError(f"{self.path} has no parts; embed at least one image.")

    def blocks(self, rows: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, B D float32) for all rows in order; `rows` is the size of a block."""
        rows = rows or max(BLOCK_VALUES // self.width, 1)
        start, pending = 0, list[npt.NDArray[np.float32]]()
        for part in self.parts:
            for values in self._part_values(part, rows):
                pending.append(values)
                if sum(map(len, pending)) >= rows:
                    block, pending = np.concatenate(pending), []
                    yield start, torch.from_numpy(block)
                    start += len(block)
        if pending:
            yield start, torch.from_numpy(np.concatenate(pending))

    def rows(self, numbers: Sequence[int]) -> dict[int, Row]:
        """Key, split and label of some rows; reads each row group that has one of them once."""
        by_part: dict[int, list[int]] = {}
        for number in sorted(set(numbers)):
            by_part.setdefault(bisect_right(self.starts, number) - 1, []).append(number)
        found: dict[int, Row] = {}
        for part, wanted in by_part.items():
            with _opened(self.parts[part]) as file:
                found |= dict(zip(wanted, _read_rows(file, [n - self.starts[part] for n in wanted]), strict=True))
        return found

    def _part_values(self, part: Path, rows: int) -> Iterator[npt.NDArray[np.float32]]:
        if (width := _width(part)) != self.width:
            raise DataError(f"{part} has {width} features a row, not {self.width} as the first part; embed it again.")
        with _opened(part) as file:
            for group in range(file.num_row_groups):  # iter_batches would hold on to more memory
                column = file.read_row_group(group, columns=["embedding"])["embedding"].combine_chunks()
                for start in range(0, len(column), rows):
                    some = column[start : start + rows]
                    values = some.flatten()
                    if some.null_count or values.null_count:
                        raise DataError(f"{part} has rows without features; embed it again.")
                    yield values.to_numpy(zero_copy_only=False).astype(np.float32).reshape(len(some), self.width)


def _read_rows(file: pq.ParquetFile, numbers: Sequence[int]) -> list[Row]:
    """Rows of one file by their sorted numbers in it."""
    groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    starts = (0, *accumulate(groups))
    by_group: dict[int, list[int]] = {}
    for number in numbers:
        group = bisect_right(starts, number) - 1
        by_group.setdefault(group, []).append(number - starts[group])
    rows: list[Row] = []
    for group, places in by_group.items():
        table = file.read_row_group(group, columns=["key", "split", "label"]).take(places)
        rows += [Row(**values) for values in table.to_pylist()]
    return rows


def _opened(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except FileNotFoundError:
        raise NotFoundError(f"there is no file {path}; create it with vitrail embed.") from None
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path} is not a readable Parquet file ({type(error).__name__}); embed it again.") from None


def _footer(path: Path) -> pq.FileMetaData:
    with _opened(path) as file:
        return file.metadata


def _width(path: Path) -> int:
    """Features of a row of a file; DataError unless it has the columns that are read."""
    with _opened(path) as file:
        schema = file.schema_arrow
    missing = [name for name in ("key", "split", "label", "embedding") if name not in schema.names]
    kind = None if missing else schema.field("embedding").type
    if kind is None or not pa.types.is_fixed_size_list(kind) or not pa.types.is_floating(kind.value_type):
        expected = f"the column {missing[0]}" if missing else "embeddings of one length"
        raise DataError(f"{path} is not a feature file: it lacks {expected}; create one with vitrail embed.")
    return int(kind.list_size)
