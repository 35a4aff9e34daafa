"""Download the published files of built-in datasets, with a progress bar.

An interrupted download leaves a `.part` file and is resumed if the server supports it. If several
processes need the same file, one downloads it and the others wait.
"""

from __future__ import annotations

import contextlib
import hashlib
import urllib.error
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path

from vitrail.data.sources.catalog import PublishedFile
from vitrail.data.sources.progress import progress_bar
from vitrail.errors import DataError
from vitrail.storage.atomic_write import rename_synced
from vitrail.storage.locks import file_lock

CHUNK_BYTES = 1 << 18
TIMEOUT_S = 30.0
"""Seconds without data before a connection is closed."""


class DownloadError(DataError):
    """No URL delivered the file."""


def download(file: PublishedFile, base_urls: Sequence[str], folder: Path, verify: bool) -> Path:
    """Download a file to a folder, unless it is there; `verify` compares its MD5 with the published one."""
    target = folder / file.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with file_lock(folder / f".{file.name}.lock"):
            if not target.exists():
                _download_from_any(file, base_urls, target, verify)
    except OSError as error:
        raise DataError(f"cannot write {file.name} to {folder}: {error}.") from error
    return target


def _download_from_any(file: PublishedFile, base_urls: Sequence[str], target: Path, verify: bool) -> None:
    """Try each URL, as long as it delivers data; every attempt resumes the previous one."""
    part = target.with_name(f"{target.name}.part")
    reasons = []
    for base_url in base_urls:
        before = -1
        while _size(part) > before:
            before = _size(part)
            try:
                _transfer(f"{base_url}{file.name}", part, file.size)
                if verify and (md5 := _md5(part)) != file.md5:
                    raise _WrongContent(f"its MD5 is {md5}, expected {file.md5}")
                rename_synced(part, target)
                return
            except _WrongContent as error:
                part.unlink(missing_ok=True)  # cannot be resumed
                reason: object = error
            except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as error:
                reason = getattr(error, "reason", None) or error
        reasons.append(f"{base_url}: {str(reason) or type(reason).__name__}")
    raise DownloadError("; ".join(reasons))


class _WrongContent(Exception):
    """The downloaded bytes are not those of the published file."""


def _transfer(url: str, part: Path, size: int) -> None:
    """Append to the .part file if the server supports ranges, else write it from the start."""
    received = _size(part)
    headers = {"User-Agent": "vitrail"} | ({"Range": f"bytes={received}-"} if received else {})
    request = urllib.request.Request(url, headers=headers)
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code != 416:  # range not satisfiable: the .part file is too long
            raise
        error.close()
        part.unlink(missing_ok=True)
        raise _WrongContent(f"the partial download of {received:,} bytes is longer than the file") from None
    with contextlib.closing(response):
        resumed = response.status == 206
        received = received if resumed else 0
        length = response.headers.get("Content-Length")
        total = received + int(length) if length else None
        with (
            part.open("ab" if resumed else "wb") as out,
            progress_bar(f"downloading {url.rpartition('/')[2]}", total or size, received, in_bytes=True) as advance,
        ):
            while chunk := response.read(CHUNK_BYTES):
                out.write(chunk)
                received += len(chunk)
                advance(len(chunk))
    if total is not None and received < total:
        raise ConnectionError(f"interrupted after {received:,} of {total:,} bytes")


def matches_md5(path: Path, file: PublishedFile) -> bool:
    """Whether the file at `path` has the published size and MD5."""
    return _size(path) == file.size and _md5(path) == file.md5


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
