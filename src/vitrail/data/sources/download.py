"""Files from the addresses of the data sets themselves: with a bar, in one piece, once.

What has arrived of a broken transfer stays beside the place (`.part`) and is continued where the
server can; several processes that want one file wait for the first.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path

from filelock import FileLock

from vitrail.data.sources import progress
from vitrail.data.sources.catalog import PublishedFile
from vitrail.errors import DataError

CHUNK_BYTES = 1 << 18
TIMEOUT_S = 30.0
"""Seconds without a byte before a server is given up."""


class DownloadError(DataError):
    """No address had the file."""


def download(file: PublishedFile, addresses: Sequence[str], folder: Path, verify: bool) -> Path:
    """The file in the folder, downloaded where it is not there; `check` compares its MD5 with the published one."""
    target = folder / file.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f".{file.name}.lock"):
            if not target.exists():
                _download_from_any(file, addresses, target, verify)
    except (OSError, NotImplementedError) as error:
        raise DataError(f"{file.name} could not be stored in {folder}: {error}.") from error
    return target


def _download_from_any(file: PublishedFile, addresses: Sequence[str], target: Path, check: bool) -> None:
    """Try each address in turn, and again while it brings something, going on where the last one broke off."""
    part = target.with_name(f"{target.name}.part")
    reasons = []
    for address in addresses:
        before = -1
        while _size(part) > before:
            before = _size(part)
            try:
                _transfer(f"{address}{file.name}", part, file.size)
                if check and (found := _md5(part)) != file.md5:
                    raise _WrongContent(f"its MD5 is {found}, wanted {file.md5}")
                os.replace(part, target)
                return
            except _WrongContent as error:
                part.unlink(missing_ok=True)  # nothing to go on from
                reason: object = error
            except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as error:
                reason = getattr(error, "reason", None) or error
        reasons.append(f"{address}: {str(reason) or type(reason).__name__}")
    raise DownloadError("; ".join(reasons))


class _WrongContent(Exception):
    """What arrived is not what was asked for."""


def _transfer(url: str, part: Path, size: int) -> None:
    """Bytes into the .part file, from where it ends if the server can."""
    there = _size(part)
    headers = {"User-Agent": "vitrail"} | ({"Range": f"bytes={there}-"} if there else {})
    request = urllib.request.Request(url, headers=headers)
    try:
        answer = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code != 416:  # more is there than the file has
            raise
        error.close()
        part.unlink(missing_ok=True)
        raise _WrongContent(f"{there:,} bytes were here already, more than the file has") from None
    with contextlib.closing(answer):
        goes_on = answer.status == 206
        there = there if goes_on else 0
        length = answer.headers.get("Content-Length")
        total = there + int(length) if length else None
        with (
            part.open("ab" if goes_on else "wb") as out,
            progress.progress_bar(
                f"downloading {url.rpartition('/')[2]}", total or size, there, in_bytes=True
            ) as advance,
        ):
            while piece := answer.read(CHUNK_BYTES):
                out.write(piece)
                there += len(piece)
                advance(len(piece))
    if total is not None and there < total:
        raise ConnectionError(f"broke off after {there:,} of {total:,} bytes")


def matches_md5(path: Path, file: PublishedFile) -> bool:
    """Whether this is the published file, by its MD5."""
    return _size(path) == file.size and _md5(path) == file.md5


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
