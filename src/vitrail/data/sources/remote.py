"""Remote files through fsspec: http(s)://, s3://, gs:// and the other protocols it supports.

Every call gets its file system from fsspec, which caches them. A source can therefore be used in
forked and spawned processes and in several threads.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any, TypeVar

from vitrail.errors import ConfigError, DataError, NotFoundError

URL_PREFIX = re.compile(r"[a-z][a-z0-9+.\-]*://", re.I)
MAX_ATTEMPTS = 4
RETRY_DELAY_S = 0.5
"""Seconds before the second attempt; doubled before each further one."""
STAMP_KEYS = ("ETag", "etag", "md5Hash", "Last-Modified", "LastModified", "mtime")
"""Metadata keys whose value changes when a file does, most reliable first."""
MISSING_PACKAGE = "reading {0} needs {1}: pip install 'vitrail[cloud]'."

T = TypeVar("T")


@dataclass(frozen=True)
class FileInfo:
    """A file's metadata, read without its content."""

    size: int | None
    """Bytes; None if unknown."""
    stamp: str
    """Changes when the file does: its ETag, else its modification time."""


def is_remote(path: str) -> bool:
    return URL_PREFIX.match(path) is not None


def is_http(path: str) -> bool:
    return path.lower().startswith(("http://", "https://"))


def file_info(url: str) -> FileInfo:
    info = _with_retries(url, lambda fs, path: fs.info(path))
    stamp = next((str(info[k]) for k in STAMP_KEYS if info.get(k)), "")
    return FileInfo(info.get("size"), stamp)


def fetch(url: str, start: int | None = None, end: int | None = None) -> bytes:
    """The bytes of a file, or those from `start` up to `end`."""
    data: bytes = _with_retries(url, lambda fs, path: fs.cat_file(path, start=start, end=end))
    if start is not None and end is not None and len(data) > end - start:  # the server ignored the range
        data = data[start:end]
    return data


def supports_ranges(url: str) -> bool:
    """Whether the server supports range requests; tested by reading one byte."""
    if not is_http(url):
        return True

    def read_byte(fs: Any, path: str) -> bool:
        try:
            with fs.open(path, "rb", cache_type="none") as file:
                file.seek(1)
                return len(file.read(1)) == 1
        except ValueError:  # fsspec's error for a server without range requests
            return False

    return _with_retries(url, read_byte)


def open_stream(url: str) -> IO[bytes]:
    """Open a file for sequential reading, without range requests."""
    options = {"block_size": 0} if is_http(url) else {}  # 0: fsspec streams the response
    file: IO[bytes] = _with_retries(url, lambda fs, path: fs.open(path, "rb", **options))
    return file


def glob(pattern: str) -> list[str]:
    """The URLs that match a pattern with *, sorted."""

    def find(fs: Any, path: str) -> list[str]:
        return sorted(fs.unstrip_protocol(name) for name in fs.glob(path))

    return _with_retries(pattern, find)


def _with_retries(url: str, do: Callable[[Any, str], T]) -> T:
    """Call `do(file system, path)`, and retry after errors that may be temporary."""
    try:
        import fsspec  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigError(MISSING_PACKAGE.format(url, "fsspec")) from None
    for left in reversed(range(MAX_ATTEMPTS)):
        try:
            fs, path = fsspec.core.url_to_fs(url)
            return do(fs, path)
        except ImportError as error:  # s3:// needs s3fs, gs:// needs gcsfs
            package = re.search(r"[Ii]nstall (\w+)", str(error))
            raise ConfigError(MISSING_PACKAGE.format(url, package[1] if package else error)) from None
        except FileNotFoundError:
            raise NotFoundError(f"{url} does not exist, or is not public.") from None
        except PermissionError as error:
            raise NotFoundError(f"no permission to read {url} ({error}); check the credentials.") from None
        except ValueError as error:
            raise DataError(f"cannot read {url}: {error}.") from error
        except Exception as error:  # each file system has its own error classes
            if not left:
                raise DataError(f"cannot read {url} after {MAX_ATTEMPTS} attempts ({_reason(error)}).") from error
            time.sleep(RETRY_DELAY_S * 2 ** (MAX_ATTEMPTS - 1 - left))
    raise AssertionError("unreachable")


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
