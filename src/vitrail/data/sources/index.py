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

from vitrail.data.sources import places, remote, tar, watch
from vitrail.errors import DataError, NotFound

VERSION = 1
TEXTS = ("cls", "txt", "json", "label", "labels")
"""Files of a sample that are read into the index, being labels."""
LONGEST = 64 << 10
"""Bytes of such a file; longer ones are no labels."""
SHORT = 200
"""Characters, or entries, of a value in a JSON file that may be a label."""
AT_ONCE = 16
"""Shards that are indexed at the same time: range requests mostly wait."""

Value = str | int | float | bool | list[Any] | None


@dataclass(frozen=True)
class Entry:
    """One sample of a shard."""

    key: str
    files: dict[str, tuple[int, int]]
    """Kind of file -> where it begins, and its size."""
    texts: dict[str, Value | dict[str, Value]]
    """Kind of file -> what it says, for those that are short and may be labels."""


@dataclass(frozen=True)
class Index:
    """One shard's samples, and the file to read them from: the shard, or the copy of it."""

    shard: str
    file: str
    entries: list[Entry]


def index_all(shards: Sequence[str]) -> list[Index]:
    """The index of each shard: read where it has been made, made where not."""
    found: dict[str, Index] = {}
    missing: list[str] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for shard, index in zip(shards, pool.map(_kept, shards), strict=True):
            if index is None:
                missing.append(shard)
            else:
                found[shard] = index
        if missing:
            with watch.bar("indexing shards", len(missing)) as advance:
                for shard, index in zip(missing, pool.map(make, missing), strict=True):
                    found[shard] = index
                    advance(1)
    return [found[shard] for shard in shards]


def make(shard: str) -> Index:
    """Read a shard's headers and labels, and keep what was found."""
    known = _facts(shard)
    if not remote.is_remote(shard):
        file = shard
        with open(shard, "rb") as opened:
            entries = entries_of(_from_disk(opened), shard, known.size)
    elif known.size is not None and remote.has_ranges(shard):
        file = shard
        entries = entries_of(Ranges(shard, known.size), shard, known.size)
    else:
        file = str(_copy(shard))
        with open(file, "rb") as opened:
            entries = entries_of(_from_disk(opened), shard, os.path.getsize(file))
    index = Index(shard, file, entries)
    _keep(index, known)
    return index


def entries_of(read: tar.Read, shard: str, total: int | None) -> list[Entry]:
    """The samples of an archive, with their labels."""
    texts: dict[int, Value | dict[str, Value]] = {}

    def noted(found: Iterable[tar.Member]) -> Iterator[tar.Member]:
        for member in found:  # a label is read when it is passed: going back costs a request
            kind = member.name.rpartition("/")[2].partition(".")[2].lower()
            if kind in TEXTS and member.size <= LONGEST:
                texts[member.offset] = text_of(kind, read(member.offset, member.size))
            yield member

    rows = []
    for key, files in tar.samples(noted(tar.members(read, shard, total))):
        said = {kind: texts[m.offset] for kind, m in files.items() if m.offset in texts}
        rows.append(Entry(key, {kind: (m.offset, m.size) for kind, m in files.items()}, said))
    return rows


class Ranges:
    """Bytes of a file on another machine, by requests that fit how they are asked for.

    Small steps forward double what is read ahead; a leap over an image begins again with little.
    """

    LITTLE, MUCH = 4 << 10, 4 << 20

    def __init__(self, url: str, size: int) -> None:
        self.url, self.size = url, size
        self.start, self.data = 0, b""
        self.ahead = self.LITTLE

    def __call__(self, at: int, length: int) -> bytes:
        end = self.start + len(self.data)
        if not (self.start <= at and at + length <= end):
            step = at - end
            self.ahead = min(self.ahead * 2, self.MUCH) if 0 <= step < 4 * self.ahead else self.LITTLE
            last = min(max(at + length, at + self.ahead), self.size)
            self.start, self.data = at, remote.fetch(self.url, at, last) if last > at else b""
        return self.data[at - self.start : at - self.start + length]


def _from_disk(opened: Any) -> tar.Read:
    def read(at: int, length: int) -> bytes:
        opened.seek(at)
        data: bytes = opened.read(length)
        return data

    return read


def text_of(kind: str, data: bytes) -> Value | dict[str, Value]:
    """What a label file says; of a JSON file's entries, those that may be a label."""
    text = data.decode("utf-8", "replace").strip()
    if kind != "json":
        return text if len(text) <= SHORT else None
    try:
        found = json.loads(text)
    except ValueError:
        return None
    if isinstance(found, dict):
        return {k: v for k, v in found.items() if _may_be_label(v)}
    return found if _may_be_label(found) else None


def _may_be_label(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) <= SHORT and all(isinstance(v, str | int) and len(str(v)) <= SHORT for v in value)
    return value is None or (isinstance(value, str | int | float) and len(str(value)) <= SHORT)


def _facts(shard: str) -> remote.Facts:
    if remote.is_remote(shard):
        return remote.facts(shard)
    try:
        found = os.stat(shard)
    except OSError:
        raise NotFound(f"there is no shard {shard}.") from None
    return remote.Facts(found.st_size, str(found.st_mtime_ns))


def _homes(shard: str) -> list[Path]:
    """Where an index may be: beside the shard, else in the cache."""
    name = shard if remote.is_remote(shard) else os.path.abspath(shard)
    stem = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    cached = places.cache() / "shards" / f"{stem}-{shard.rsplit('/', 1)[-1]}.index"
    return [cached] if remote.is_remote(shard) else [Path(f"{shard}.index"), cached]


def _is_open(folder: Path) -> bool:
    """Whether anybody may write there; root could even where nobody is meant to."""
    return bool(folder.stat().st_mode & 0o222) and os.access(folder, os.W_OK)


def _kept(shard: str) -> Index | None:
    """An index that was made before and is still right."""
    known = _facts(shard)
    for home in _homes(shard):
        try:
            found = json.loads(home.read_text(encoding="utf-8"))
            if (found["version"], found["size"], found["stamp"]) != (VERSION, known.size, known.stamp):
                continue
            file = found["file"] or shard
            if not remote.is_remote(file) and not os.path.exists(file):
                continue
            rows = [Entry(k, {n: (o, s) for n, (o, s) in f.items()}, t) for k, f, t in found["samples"]]
            return Index(shard, file, rows)
        except (OSError, ValueError, KeyError, TypeError):
            continue  # no index, or a damaged one: it is made again
    return None


def _keep(index: Index, known: remote.Facts) -> None:
    """Write an index where it can be written; without one, the shard is read again next time."""
    content = {
        "version": VERSION,
        "size": known.size,
        "stamp": known.stamp,
        "file": "" if index.file == index.shard else index.file,
        "samples": [[e.key, e.files, e.texts] for e in index.entries],
    }
    for home in _homes(index.shard):
        with contextlib.suppress(OSError):
            home.parent.mkdir(parents=True, exist_ok=True)
            if not _is_open(home.parent):
                continue
            places.write_whole(home, lambda file: file.write(json.dumps(content, separators=(",", ":")).encode()))
            return


def _copy(shard: str) -> Path:
    """The whole of a shard, in the cache folder."""
    path = _homes(shard)[-1].with_suffix("")  # without .index
    path.parent.mkdir(parents=True, exist_ok=True)

    def write(file: Any) -> None:
        with remote.stream(shard) as opened:
            while piece := opened.read(1 << 20):
                file.write(piece)

    try:
        places.write_whole(path, write)
    except OSError as error:
        raise DataError(f"{shard} could not be copied to {path.parent}: {error}.") from error
    return path
