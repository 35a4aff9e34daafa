"""The folder of an index, beside the features it was made from: features.parquet.index/.

    index.json   the state and checksum of every part of the features, the measured recall, the files below
    index.bin    centroids and offsets; its checksum is compared whenever the index is opened
    lists.bin    the vectors, mapped into memory; only its size is compared

The folder appears when it is complete. An index can be made again from the features at any time. So one that is
damaged, of another version, or made from other features is replaced.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vitrail.config import format_version
from vitrail.errors import CheckpointError, DataError, FormatError, NotFoundError
from vitrail.retrieval.feature_store import FeatureStore, PartState
from vitrail.retrieval.inverted_lists import LISTS, STRUCTURE
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
class IndexRecord:
    """What index.json says."""

    parts: tuple[IndexedPart, ...]
    lists: int
    recall: tuple[RecallPoint, ...]
    """Recall@10 by number of probes."""
    files: Mapping[str, tuple[int, str]]
    """Size and checksum of the other files; of the lists, no checksum."""

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
            {name: (int(size), str(checksum)) for name, (size, checksum) in values["files"].items()},
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


def described_files(folder: Path) -> dict[str, tuple[int, str]]:
    """Size and checksum of the files that FAISS wrote."""
    structure, lists = folder / STRUCTURE, folder / LISTS
    return {
        STRUCTURE: (structure.stat().st_size, file_checksum(structure)),
        LISTS: (lists.stat().st_size if lists.exists() else 0, ""),
    }


def read_record(store: FeatureStore) -> IndexRecord:
    """The record of an index that is complete and was made from these features.

    NotFoundError if there is none; DataError or FormatError, with the reason, if it has to be made again.
    """
    folder = index_folder(store.path)
    if not folder.exists():
        raise NotFoundError(f"there is no index {folder}.")
    try:
        record = IndexRecord.from_dict(json.loads((folder / RECORD).read_text(encoding="utf-8")))
        damaged = not record.recall or described_files(folder) != dict(record.files)
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


def file_checksum(path: Path) -> str:
    """CRC-32 of a file, as eight hexadecimal digits."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return f"{checksum:08x}"
