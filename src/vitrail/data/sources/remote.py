"""Files on other machines, through fsspec: http(s)://, s3://, gs:// and whatever else it speaks.

Every call asks fsspec anew for its file system (it keeps them), so that a source made in one
process can be read in another, forked or spawned, and by several threads.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any, TypeVar

from vitrail.errors import ConfigError, DataError, NotFound

URL_PREFIX = re.compile(r"[a-z][a-z0-9+.\-]*://", re.I)
MAX_ATTEMPTS = 4
RETRY_DELAY_S = 0.5
"""Seconds before a second try; twice as long before each further one."""
STAMP_KEYS = ("ETag", "etag", "md5Hash", "Last-Modified", "LastModified", "mtime")
"""What file systems call a thing that changes when a file does, surest first."""
MISSING_PACKAGE = "reading {0} needs {1}: pip install 'vitrail[cloud]'."

T = TypeVar("T")


@dataclass(frozen=True)
class FileInfo:
    """What a server says of a file without sending it."""

    size: int | None
    stamp: str
    """Changes when the file does: its ETag, else the time it was written."""


def is_remote(path: str) -> bool:
    return URL_PREFIX.match(path) is not None


def is_http(path: str) -> bool:
    return path.lower().startswith(("http://", "https://"))


def file_info(url: str) -> FileInfo:
    info = _with_retries(url, lambda fs, path: fs.info(path))
    stamp = next((str(info[k]) for k in STAMP_KEYS if info.get(k)), "")
    return FileInfo(info.get("size"), stamp)


def fetch(url: str, start: int | None = None, end: int | None = None) -> bytes:
    """A file's bytes, or those from start up to end."""
    data: bytes = _with_retries(url, lambda fs, path: fs.cat_file(path, start=start, end=end))
    if start is not None and end is not None and len(data) > end - start:  # a server that does not know ranges
        data = data[start:end]
    return data


def supports_ranges(url: str) -> bool:
    """Whether the server can send a part of a file; asked for one byte, without taking more."""
    if not is_http(url):
        return True

    def ask(fs: Any, path: str) -> bool:
        try:
            with fs.open(path, "rb", cache_type="none") as file:
                file.seek(1)
                return len(file.read(1)) == 1
        except ValueError:  # what fsspec says of a server that sends all or nothing
            return False

    return _with_retries(url, ask)


def open_stream(url: str) -> IO[bytes]:
    """The file from its beginning to its end, as it arrives."""
    options = {"block_size": 0} if is_http(url) else {}  # fsspec's word for: no ranges
    file: IO[bytes] = _with_retries(url, lambda fs, path: fs.open(path, "rb", **options))
    return file


def glob(pattern: str) -> list[str]:
    """The addresses that fit a pattern with *, in order."""

    def find(fs: Any, path: str) -> list[str]:
        return sorted(fs.unstrip_protocol(name) for name in fs.glob(path))

    return _with_retries(pattern, find)


def _with_retries(url: str, do: Callable[[Any, str], T]) -> T:
    """The call's answer, asked for again where the failure may pass."""
    try:
        import fsspec  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigError(MISSING_PACKAGE.format(url, "fsspec")) from None
    for left in reversed(range(MAX_ATTEMPTS)):
        try:
            fs, path = fsspec.core.url_to_fs(url)
            return do(fs, path)
        except ImportError as error:  # s3:// wants s3fs, gs:// gcsfs
            found = re.search(r"[Ii]nstall (\w+)", str(error))
            raise ConfigError(MISSING_PACKAGE.format(url, found[1] if found else error)) from None
        except FileNotFoundError:
            raise NotFound(f"there is no {url}, or its server does not show it.") from None
        except PermissionError as error:
            raise NotFound(f"{url} may not be read ({error}); check the credentials.") from None
        except ValueError as error:
            raise DataError(f"{url} cannot be read: {error}.") from error
        except Exception as error:  # each file system has errors of its own
            if not left:
                raise DataError(f"{url} could not be read in {MAX_ATTEMPTS} tries ({_reason(error)}).") from error
            time.sleep(RETRY_DELAY_S * 2 ** (MAX_ATTEMPTS - 1 - left))
    raise AssertionError("unreachable")


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
