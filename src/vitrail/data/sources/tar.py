"""Where things are inside a tar file, by reading its headers alone.

Python's own tarfile reads from files it can seek in; this reads through any function that gives the
bytes from one place on, so that a header behind a range request, in a plain stream or on a disk is
the same thing. It knows what archives of images hold: regular files, long names as GNU and POSIX
write them, sizes beyond 8 GB.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from vitrail.errors import DataError

BLOCK_BYTES = 512
REGULAR_FILE_TYPES = (b"0", b"\0", b"7")
MAX_RECORD_BYTES = 1 << 20
"""Bytes of a long name or of POSIX's extra records; more is damage."""

ReadAt = Callable[[int, int], bytes]
"""(place, length) -> so many bytes from there on; fewer where the file ends."""


@dataclass(frozen=True, slots=True)
class Member:
    """A regular file in an archive."""

    name: str
    offset: int
    size: int


def iter_members(read: ReadAt, where: str, total: int | None = None) -> Iterator[Member]:
    """The regular files of an archive of `total` bytes, in order."""
    at, long_name, extra = 0, "", {}
    while True:
        header = read(at, BLOCK_BYTES)
        if not header.strip(b"\0"):  # two such blocks end an archive; some end without
            if not header and at == 0:
                raise DataError(f"{where} is empty, wanted a tar file.")
            if total is not None and at > total:
                raise DataError(f"{where} is cut off at byte {total:,}; copy or download it again.")
            return
        size = _member_size(header, at, where)
        kind, start = header[156:157], at + BLOCK_BYTES
        if kind in (b"L", b"x"):
            record = read(start, size) if size <= MAX_RECORD_BYTES else b""
            if len(record) != size:
                raise _truncated_error(where, start, size, len(record))
            if kind == b"L":
                long_name = record.rstrip(b"\0").decode("utf-8", "surrogateescape")
            else:
                extra = _pax_records(record)
        elif kind in REGULAR_FILE_TYPES:
            size = int(extra["size"]) if extra.get("size", "").isdecimal() else size
            if total is not None and start + size > total:
                raise _truncated_error(where, start, size, max(total - start, 0))
            yield Member(extra.get("path") or long_name or _member_name(header), start, size)
        if kind not in (b"L", b"K", b"x"):
            long_name, extra = "", {}
        at = start + (size + BLOCK_BYTES - 1) // BLOCK_BYTES * BLOCK_BYTES


def group_samples(found: Iterable[Member]) -> Iterator[tuple[str, dict[str, Member]]]:
    """WebDataset's layout: neighbors that differ after the first point of their names are one sample."""
    key, parts = "", dict[str, Member]()
    for member in found:
        folder, _, name = member.name.removeprefix("./").rpartition("/")
        stem, point, kind = name.partition(".")
        if not point or not stem:  # a folder's own notes, or hidden
            continue
        mine, kind = f"{folder}/{stem}" if folder else stem, kind.lower()
        if parts and (mine != key or kind in parts):
            yield key, parts
            parts = {}
        key = mine
        parts[kind] = member
    if parts:
        yield key, parts


def find_image(parts: Iterable[str], suffixes: frozenset[str], given: str | None) -> str | None:
    """Which of a sample's files is its image: the one asked for, else the one with the plainest name."""
    if given is not None:
        return given if given in parts else None
    able = [kind for kind in parts if os.path.splitext(f"x.{kind}")[1] in suffixes]
    return min(able, key=lambda kind: (kind.count("."), kind), default=None)


def _member_size(header: bytes, at: int, where: str) -> int:
    """The size in a header that is whole."""
    if len(header) < BLOCK_BYTES:
        raise DataError(f"{where} is cut off at byte {at + len(header):,}, inside a header; copy or download it again.")
    wanted = _octal(header[148:156])
    found = sum(header) - sum(header[148:156]) + 8 * 32
    size = int.from_bytes(header[125:136], "big") if header[124] & 0x80 else _octal(header[124:136])
    if wanted != found or size is None:
        if at == 0:
            what = "compressed with gzip; decompress it first" if header[:2] == b"\x1f\x8b" else "no tar file"
            raise DataError(f"{where} is {what} (it begins with {header[:8]!r}).")
        raise DataError(f"{where} is damaged at byte {at:,}: no tar header there; copy or download it again.")
    return size


def _octal(field: bytes) -> int | None:
    digits = field.strip(b"\0 ")
    return int(digits or b"0", 8) if re.fullmatch(rb"[0-7]*", digits) else None


def _member_name(header: bytes) -> str:
    name = header[:100].split(b"\0", 1)[0]
    if header[257:263] == b"ustar\0" and (folder := header[345:500].split(b"\0", 1)[0]):
        name = folder + b"/" + name
    return name.decode("utf-8", "surrogateescape")


def _pax_records(data: bytes) -> dict[str, str]:
    """POSIX's extra records: `27 path=a/long/name\\n`."""
    found = {}
    while data.strip(b"\0"):
        length, _, rest = data.partition(b" ")
        try:
            count = int(length)
        except ValueError:
            break
        key, _, value = rest[: count - len(length) - 2].partition(b"=")
        found[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        data = data[max(count, 1) :]
    return found


def _truncated_error(where: str, start: int, size: int, there: int) -> DataError:
    return DataError(
        f"{where} is cut off: at byte {start:,} a file of {size:,} bytes begins and {there:,} are there; "
        "copy or download it again."
    )
