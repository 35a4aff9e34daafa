"""The folder of an index, beside the features it was made from: features.parquet.index/.

    index.json             the state and checksum of every part of the features, the measured recall, the files below
    shard-00000.bin, ...   centroids, sizes of the lists, then the lists, which are mapped into memory

Whenever an index is opened, the sizes of the shards are compared, and the checksums of what precedes the lists. So a
damaged file is not followed out of bounds: damaged vectors give wrong neighbors, but nothing worse.

The folder appears when it is complete. An index can be made again from the features at any time. So one that is
damaged, of another version, or made from other features is replaced.
"""

from __future__ import annotations

import glob
import json
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vitrail.config import format_version
from vitrail.errors import CheckpointError, DataError, FormatError, NotFoundError
from vitrail.retrieval.feature_store import FeatureStore, PartState
from vitrail.retrieval.inverted_lists import SHARD
from vitrail.retrieval.recall import RecallPoint
from vitrail.storage.atomic_write import explain_write_errors, write_json
from vitrail.storage.locks import file_lock

RECORD = "index.json"
CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class IndexedPart:
    """A part of the features as it was when the index was made."""

    name: str
    num_rows: int
    num_bytes: int
    mtime_ns: int
    checksum: str
    """CRC-32 of the file, as eight hexadecimal digits."""


@dataclass(frozen=True)
class Shard:
    """A file of the index."""

    num_bytes: int
    head_bytes: int
    """Bytes before the lists."""
    head_checksum: str
    """CRC-32 of these."""


@dataclass(frozen=True)
class IndexRecord:
    """What index.json says."""

    parts: tuple[IndexedPart, ...]
    lists: int
    recall: tuple[RecallPoint, ...]
    """Recall@10 by number of probes."""
    shards: tuple[Shard, ...]

    @property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        return {format_version.KEYS["index"]: format_version.VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> IndexRecord:
        values = format_version.upgrade("index", values)
        return cls(
            tuple(IndexedPart(**part) for part in values["parts"]),
            int(values["lists"]),
            tuple(RecallPoint(**point) for point in values["recall"]),
            tuple(Shard(**shard) for shard in values["shards"]),
        )


def index_folder(features: Path) -> Path:
    """features.parquet -> features.parquet.index"""
    return features.with_name(f"{features.name}.index")


@contextmanager
def build_lock(features: Path) -> Iterator[None]:
    """Let one process at a time build the index of these features; others wait."""
    folder = index_folder(features)
    with explain_write_errors(folder), file_lock(folder.with_name(f".{folder.name}.lock")):
        yield


def remove_leftovers(features: Path) -> None:
    """Delete what processes left that were killed while they built the index; to be called with its lock."""
    folder = index_folder(features)
    for left in folder.parent.glob(f".{glob.escape(folder.name)}.*"):
        if left.suffix in (".tmp", ".old"):
            shutil.rmtree(left, ignore_errors=True)


def describe_parts(store: FeatureStore) -> tuple[IndexedPart, ...]:
    """The present parts with their checksums; reads all files."""
    return tuple(
        IndexedPart(state.name, rows, state.num_bytes, state.mtime_ns, file_checksum(path))
        for state, rows, path in zip(store.states, store.counts, store.parts, strict=True)
    )


def check_unchanged(store: FeatureStore, parts: Sequence[IndexedPart]) -> None:
    """Raise DataError if the features have changed since they were described."""
    if store.states != [PartState(part.name, part.num_bytes, part.mtime_ns) for part in parts]:
        raise DataError(f"{store.path} changed while its index was built; try again when it is complete.")


def write_record(folder: Path, record: IndexRecord, *, overwrite: bool = False) -> None:
    write_json(folder / RECORD, record.to_dict(), overwrite=overwrite)


def shard_paths(folder: Path, count: int | None = None) -> list[Path]:
    """The shards of an index: this many, or those that exist."""
    count = len(list(folder.glob(SHARD.format(0).replace("00000", "*")))) if count is None else count
    return [folder / SHARD.format(number) for number in range(count)]


def describe_shard(path: Path, list_bytes: int) -> Shard:
    """A shard whose lists, at its end, take this many bytes."""
    head = path.stat().st_size - list_bytes
    return Shard(path.stat().st_size, head, file_checksum(path, head))


def _is_intact(folder: Path, record: IndexRecord) -> bool:
    paths = shard_paths(folder, len(record.shards))
    return bool(record.recall and record.shards) and all(
        path.stat().st_size == shard.num_bytes and file_checksum(path, shard.head_bytes) == shard.head_checksum
        for path, shard in zip(paths, record.shards, strict=True)
    )


def read_record(store: FeatureStore) -> IndexRecord:
    """The record of an index that is complete and was made from these features.

    NotFoundError if there is none; DataError or FormatError, with the reason, if it has to be made again.
    """
    folder = index_folder(store.path)
    if not folder.exists():
        raise NotFoundError(f"there is no index {folder}.")
    try:
        record = IndexRecord.from_dict(json.loads((folder / RECORD).read_text(encoding="utf-8")))
        damaged = not _is_intact(folder, record)
    except FormatError as error:
        raise FormatError(f"{folder}: {error}") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        damaged = True
    if damaged:
        raise DataError(f"{folder} is damaged.")
    return _matched(record, store, folder)


def _matched(record: IndexRecord, store: FeatureStore, folder: Path) -> IndexRecord:
    """The record, if it is about the present parts. Parts with another time of change are read and compared."""
    states = store.states
    if [(s.name, s.num_bytes) for s in states] != [(part.name, part.num_bytes) for part in record.parts]:
        raise DataError(f"{store.path} has changed since its index was made.")
    touched = {i for i, state in enumerate(states) if state.mtime_ns != record.parts[i].mtime_ns}
    if any(file_checksum(store.parts[i]) != record.parts[i].checksum for i in touched):
        raise DataError(f"{store.path} has changed since its index was made.")
    if touched:  # copied: remember the new times, if the folder can be written
        parts = tuple(replace(p, mtime_ns=s.mtime_ns) for p, s in zip(record.parts, states, strict=True))
        record = replace(record, parts=parts)
        with suppress(CheckpointError):
            write_record(folder, record, overwrite=True)
    return record


def file_checksum(path: Path, num_bytes: int | None = None) -> str:
    """CRC-32 of a file, or of its first bytes, as eight hexadecimal digits."""
    checksum, remaining = 0, path.stat().st_size if num_bytes is None else num_bytes
    with path.open("rb") as file:
        while remaining > 0 and (chunk := file.read(min(CHUNK_BYTES, remaining))):
            checksum = zlib.crc32(chunk, checksum)
            remaining -= len(chunk)
    return f"{checksum:08x}"
