"""Indexes of tar shards: the offset, size and label of every sample.

The index of `train-00000.tar` is the file `train-00000.tar.index` next to it, or a file in the
cache folder if that folder is not writable or the shard is remote. It is rebuilt when the size, the
modification time or the ETag of the shard changes. Over HTTP and S3, only the headers are read, by
range requests. If the server does not support them, the whole shard is downloaded to the cache.
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

from vitrail.data.sources import data_cache, remote, tar
from vitrail.data.sources.progress import progress_bar
from vitrail.errors import DataError, NotFoundError
from vitrail.storage.atomic_write import atomic_file

VERSION = 1
LABEL_EXTENSIONS = ("cls", "txt", "json", "label", "labels")
"""Extensions of the files that may hold a label; they are read into the index."""
MAX_LABEL_BYTES = 64 << 10
"""Size of such a file; larger ones are ignored."""
MAX_LABEL_LENGTH = 200
"""Characters of a label, or labels in a list; longer values are ignored."""
INDEX_THREADS = 16
"""Shards indexed in parallel; remote ones mostly wait for responses."""

LabelValue = str | int | float | bool | list[Any] | None


@dataclass(frozen=True)
class IndexedSample:
    """One sample of a shard."""

    key: str
    files: dict[str, tuple[int, int]]
    """File extension -> offset and size in bytes."""
    texts: dict[str, LabelValue | dict[str, LabelValue]]
    """File extension -> content, for short files that may hold a label."""


@dataclass(frozen=True)
class ShardIndex:
    """The samples of one shard, and the file to read them from: the shard or its local copy."""

    shard: str
    file: str
    samples: list[IndexedSample]


def load_indexes(shards: Sequence[str]) -> list[ShardIndex]:
    """Load the index of each shard; build those that are missing or out of date."""
    indexes: dict[str, ShardIndex] = {}
    missing: list[str] = []
    with ThreadPoolExecutor(INDEX_THREADS) as pool:
        for shard, index in zip(shards, pool.map(_load_index, shards), strict=True):
            if index is None:
                missing.append(shard)
            else:
                indexes[shard] = index
        if missing:
            with progress_bar("indexing shards", len(missing)) as advance:
                for shard, index in zip(missing, pool.map(build_index, missing), strict=True):
                    indexes[shard] = index
                    advance(1)
    return [indexes[shard] for shard in shards]


def build_index(shard: str) -> ShardIndex:
    """Read a shard's headers and labels, and save the index."""
    info = _file_info(shard)
    if not remote.is_remote(shard):
        file = shard
        with open(shard, "rb") as opened:
            samples = read_samples(_file_reader(opened), shard, info.size)
    elif info.size is not None and remote.supports_ranges(shard):
        file = shard
        samples = read_samples(RangeReader(shard, info.size), shard, info.size)
    else:
        file = str(_copy_to_cache(shard))
        with open(file, "rb") as opened:
            samples = read_samples(_file_reader(opened), shard, os.path.getsize(file))
    index = ShardIndex(shard, file, samples)
    _save_index(index, info)
    return index


def read_samples(read: tar.ReadAt, shard: str, total: int | None) -> list[IndexedSample]:
    """The samples of an archive of `total` bytes, with their labels."""
    texts: dict[int, LabelValue | dict[str, LabelValue]] = {}

    def with_labels_read(members: Iterable[tar.Member]) -> Iterator[tar.Member]:
        for member in members:  # labels are read in passing: seeking back would cost another request
            extension = member.name.rpartition("/")[2].partition(".")[2].lower()
            if extension in LABEL_EXTENSIONS and member.size <= MAX_LABEL_BYTES:
                texts[member.offset] = parse_label_file(extension, read(member.offset, member.size))
            yield member

    samples = []
    for key, files in tar.group_samples(with_labels_read(tar.iter_members(read, shard, total))):
        ranges = {extension: (m.offset, m.size) for extension, m in files.items()}
        labels = {extension: texts[m.offset] for extension, m in files.items() if m.offset in texts}
        samples.append(IndexedSample(key, ranges, labels))
    return samples


class RangeReader:
    """Reads a remote file by range requests with adaptive read-ahead.

    Short steps forward double the read-ahead; a jump over an image resets it to the minimum.
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


def parse_label_file(extension: str, data: bytes) -> LabelValue | dict[str, LabelValue]:
    """The content of a label file; of a JSON object, only the values that may be labels."""
    text = data.decode("utf-8", "replace").strip()
    if extension != "json":
        return text if len(text) <= MAX_LABEL_LENGTH else None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    if isinstance(value, dict):
        return {k: v for k, v in value.items() if _may_be_label(v)}
    return value if _may_be_label(value) else None


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
        status = os.stat(shard)
    except OSError:
        raise NotFoundError(f"no shard {shard}.") from None
    return remote.FileInfo(status.st_size, str(status.st_mtime_ns))


def _index_paths(shard: str) -> list[Path]:
    """Possible paths of an index: next to the shard, then in the cache."""
    name = shard if remote.is_remote(shard) else os.path.abspath(shard)
    stem = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    cached = data_cache.cache_dir() / "shards" / f"{stem}-{shard.rsplit('/', 1)[-1]}.index"
    return [cached] if remote.is_remote(shard) else [Path(f"{shard}.index"), cached]


def _is_writable(folder: Path) -> bool:
    """Whether files can be created in a folder; its mode is checked too, because root passes `os.access` always."""
    return bool(folder.stat().st_mode & 0o222) and os.access(folder, os.W_OK)


def _load_index(shard: str) -> ShardIndex | None:
    """The saved index of a shard; None if there is none or the shard has changed."""
    info = _file_info(shard)
    for path in _index_paths(shard):
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            if (saved["version"], saved["size"], saved["stamp"]) != (VERSION, info.size, info.stamp):
                continue
            file = saved["file"] or shard
            if not remote.is_remote(file) and not os.path.exists(file):
                continue
            samples = [IndexedSample(k, {n: (o, s) for n, (o, s) in f.items()}, t) for k, f, t in saved["samples"]]
            return ShardIndex(shard, file, samples)
        except (OSError, ValueError, KeyError, TypeError):
            continue  # missing or damaged: rebuilt
    return None


def _save_index(index: ShardIndex, info: remote.FileInfo) -> None:
    """Write an index to the first writable path; if there is none, it is rebuilt next time."""
    content = {
        "version": VERSION,
        "size": info.size,
        "stamp": info.stamp,
        "file": "" if index.file == index.shard else index.file,
        "samples": [[s.key, s.files, s.texts] for s in index.samples],
    }
    for path in _index_paths(index.shard):
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            if not _is_writable(path.parent):
                continue
            with atomic_file(path) as temporary:
                temporary.write_text(json.dumps(content, separators=(",", ":")))
            return


def _copy_to_cache(shard: str) -> Path:
    """Download a whole shard to the cache folder."""
    path = _index_paths(shard)[-1].with_suffix("")  # without .index
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with atomic_file(path) as temporary, temporary.open("wb") as file, remote.open_stream(shard) as opened:
            while piece := opened.read(1 << 20):
                file.write(piece)
    except OSError as error:
        raise DataError(f"{shard} could not be copied to {path.parent}: {error}.") from error
    return path
