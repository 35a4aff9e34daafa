"""What a tar shard holds and where, found out once and kept.

The index of `train-00000.tar` lies beside it as `train-00000.tar.index`; where nothing can be
written there, and for shards on other machines, in the cache folder. It is made again when the
shard's size changes, or the time it was written, or its ETag. Over HTTP and S3 the headers are read
by range requests, and the images between them are not; a server without ranges sends the whole
shard, which is kept in the cache folder, since any image in it must be within reach.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.data.sources import data_cache, progress, remote, tar
from vitrail.errors import DataError, NotFound

VERSION = 1
LABEL_EXTENSIONS = ("cls", "txt", "json", "label", "labels")
"""Files of a sample that are read into the index, being labels."""
MAX_LABEL_BYTES = 64 << 10
"""Bytes of such a file; longer ones are no labels."""
MAX_LABEL_LENGTH = 200
"""Characters, or entries, of a value in a JSON file that may be a label."""
INDEX_THREADS = 16
"""Shards that are indexed at the same time: range requests mostly wait."""

LabelValue = str | int | float | bool | list[Any] | None


@dataclass(frozen=True)
class IndexedSample:
    """One sample of a shard."""

    key: str
    files: dict[str, tuple[int, int]]
    """Kind of file -> where it begins, and its size."""
    texts: dict[str, LabelValue | dict[str, LabelValue]]
    """Kind of file -> what it says, for those that are short and may be labels."""


@dataclass(frozen=True)
class ShardIndex:
    """One shard's samples, and the file to read them from: the shard, or the copy of it."""

    shard: str
    file: str
    samples: list[IndexedSample]


def load_indexes(shards: Sequence[str]) -> list[ShardIndex]:
    """The index of each shard: read where it has been made, made where not."""
    found: dict[str, ShardIndex] = {}
    missing: list[str] = []
    with ThreadPoolExecutor(INDEX_THREADS) as pool:
        for shard, index in zip(shards, pool.map(_load_index, shards), strict=True):
            if index is None:
                missing.append(shard)
            else:
                found[shard] = index
        if missing:
            with progress.progress_bar("indexing shards", len(missing)) as advance:
                for shard, index in zip(missing, pool.map(build_index, missing), strict=True):
                    found[shard] = index
                    advance(1)
    return [found[shard] for shard in shards]


def build_index(shard: str) -> ShardIndex:
    """Read a shard's headers and labels, and keep what was found."""
    known = _file_info(shard)
    if not remote.is_remote(shard):
        file = shard
        with open(shard, "rb") as opened:
            entries = read_samples(_file_reader(opened), shard, known.size)
    elif known.size is not None and remote.supports_ranges(shard):
        file = shard
        entries = read_samples(RangeReader(shard, known.size), shard, known.size)
    else:
        file = str(_copy_to_cache(shard))
        with open(file, "rb") as opened:
            entries = read_samples(_file_reader(opened), shard, os.path.getsize(file))
    index = ShardIndex(shard, file, entries)
    _save_index(index, known)
    return index


def read_samples(read: tar.ReadAt, shard: str, total: int | None) -> list[IndexedSample]:
    """The samples of an archive, with their labels."""
    texts: dict[int, LabelValue | dict[str, LabelValue]] = {}

    def noted(found: Iterable[tar.Member]) -> Iterator[tar.Member]:
        for member in found:  # a label is read when it is passed: going back costs a request
            kind = member.name.rpartition("/")[2].partition(".")[2].lower()
            if kind in LABEL_EXTENSIONS and member.size <= MAX_LABEL_BYTES:
                texts[member.offset] = parse_label_file(kind, read(member.offset, member.size))
            yield member

    rows = []
    for key, files in tar.group_samples(noted(tar.iter_members(read, shard, total))):
        said = {kind: texts[m.offset] for kind, m in files.items() if m.offset in texts}
        rows.append(IndexedSample(key, {kind: (m.offset, m.size) for kind, m in files.items()}, said))
    return rows


class RangeReader:
    """Bytes of a file on another machine, by requests that fit how they are asked for.

    Small steps forward double what is read ahead; a leap over an image begins again with little.
    """

    MIN_READ_BYTES, MAX_READ_BYTES = 4 << 10, 4 << 20

    def __init__(self, url: str, size: int) -> None:
        self.url, self.size = url, size
        self.start, self.data = 0, b""
        self.ahead = self.MIN_READ_BYTES

    def __call__(self, at: int, length: int) -> bytes:
        end = self.start + len(self.data)
        if not (self.start <= at and at + length <= end):
            step = at - end
            self.ahead = min(self.ahead * 2, self.MAX_READ_BYTES) if 0 <= step < 4 * self.ahead else self.MIN_READ_BYTES
            last = min(max(at + length, at + self.ahead), self.size)
            self.start, self.data = at, remote.fetch(self.url, at, last) if last > at else b""
        return self.data[at - self.start : at - self.start + length]


def _file_reader(opened: Any) -> tar.ReadAt:
    def read(at: int, length: int) -> bytes:
        opened.seek(at)
        data: bytes = opened.read(length)
        return data

    return read


def parse_label_file(kind: str, data: bytes) -> LabelValue | dict[str, LabelValue]:
    """What a label file says; of a JSON file's entries, those that may be a label."""
    text = data.decode("utf-8", "replace").strip()
    if kind != "json":
        return text if len(text) <= MAX_LABEL_LENGTH else None
    try:
        found = json.loads(text)
    except ValueError:
        return None
    if isinstance(found, dict):
        return {k: v for k, v in found.items() if _may_be_label(v)}
    return found if _may_be_label(found) else None


def _may_be_label(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) <= MAX_LABEL_LENGTH and all(
            isinstance(v, str | int) and len(str(v)) <= MAX_LABEL_LENGTH for v in value
        )
    return value is None or (isinstance(value, str | int | float) and len(str(value)) <= MAX_LABEL_LENGTH)


def _file_info(shard: str) -> remote.FileInfo:
    if remote.is_remote(shard):
        return remote.file_info(shard)
    try:
        found = os.stat(shard)
    except OSError:
        raise NotFound(f"there is no shard {shard}.") from None
    return remote.FileInfo(found.st_size, str(found.st_mtime_ns))


def _index_paths(shard: str) -> list[Path]:
    """Where an index may be: beside the shard, else in the cache."""
    name = shard if remote.is_remote(shard) else os.path.abspath(shard)
    stem = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    cached = data_cache.cache_dir() / "shards" / f"{stem}-{shard.rsplit('/', 1)[-1]}.index"
    return [cached] if remote.is_remote(shard) else [Path(f"{shard}.index"), cached]


def _is_writable(folder: Path) -> bool:
    """Whether anybody may write there; root could even where nobody is meant to."""
    return bool(folder.stat().st_mode & 0o222) and os.access(folder, os.W_OK)


def _load_index(shard: str) -> ShardIndex | None:
    """An index that was made before and is still right."""
    known = _file_info(shard)
    for home in _index_paths(shard):
        try:
            found = json.loads(home.read_text(encoding="utf-8"))
            if (found["version"], found["size"], found["stamp"]) != (VERSION, known.size, known.stamp):
                continue
            file = found["file"] or shard
            if not remote.is_remote(file) and not os.path.exists(file):
                continue
            rows = [IndexedSample(k, {n: (o, s) for n, (o, s) in f.items()}, t) for k, f, t in found["samples"]]
            return ShardIndex(shard, file, rows)
        except (OSError, ValueError, KeyError, TypeError):
            continue  # no index, or a damaged one: it is made again
    return None


def _save_index(index: ShardIndex, known: remote.FileInfo) -> None:
    """Write an index where it can be written; without one, the shard is read again next time."""
    content = {
        "version": VERSION,
        "size": known.size,
        "stamp": known.stamp,
        "file": "" if index.file == index.shard else index.file,
        "samples": [[e.key, e.files, e.texts] for e in index.samples],
    }
    for home in _index_paths(index.shard):
        with contextlib.suppress(OSError):
            home.parent.mkdir(parents=True, exist_ok=True)
            if not _is_writable(home.parent):
                continue
            data_cache.write_atomic(home, lambda file: file.write(json.dumps(content, separators=(",", ":")).encode()))
            return


def _copy_to_cache(shard: str) -> Path:
    """The whole of a shard, in the cache folder."""
    path = _index_paths(shard)[-1].with_suffix("")  # without .index
    path.parent.mkdir(parents=True, exist_ok=True)

    def write(file: Any) -> None:
        with remote.open_stream(shard) as opened:
            while piece := opened.read(1 << 20):
                file.write(piece)

    try:
        data_cache.write_atomic(path, write)
    except OSError as error:
        raise DataError(f"{shard} could not be copied to {path.parent}: {error}.") from error
    return path
