"""Atomic writes of files and folders.

Data is written to a hidden temporary sibling, flushed to disk and then renamed. On failure or interrupt, the temporary
file is removed and the previous content stays. `atomic_file` raises OSError; `new_file`, `new_folder` and the functions
that use them check that nothing is overwritten by mistake, and explain errors in one sentence.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from vitrail.errors import CheckpointError

# A folder is replaced only if all its files have these suffixes, so that a mistyped path does not delete photographs.
REPLACEABLE = {".json", ".jsonl", ".safetensors", ".npz", ".pth", ".pt", ".bin", ".md", ".txt"}

DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
PERMISSION_ERRNOS = {errno.EACCES, errno.EPERM, errno.EROFS}


def write_json(path: Path, value: Any, *, overwrite: bool = False) -> None:
    """Write indented UTF-8 JSON; NaN raises ValueError."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_text(path, text, overwrite=overwrite)


def write_text(path: Path, text: str, *, overwrite: bool = False) -> None:
    """Write UTF-8 text."""
    with new_file(path, overwrite) as temporary:
        temporary.write_bytes(text.encode())


@contextmanager
def atomic_file(path: Path, *, folder: Path | None = None, overwrite: bool = True) -> Iterator[Path]:
    """Context manager: an empty temporary file, in `folder` or beside `path`, renamed to `path` if the block succeeds.

    `folder` must be on the same file system. Raises OSError; without `overwrite`, FileExistsError if there is a file.
    """
    temporary = _temporary_sibling(folder / path.name if folder else path, "tmp")
    try:
        # Created here with O_EXCL, so that the writer never opens an existing file.
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        yield temporary
        rename_synced(temporary, path, overwrite=overwrite)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


@contextmanager
def new_file(path: Path, overwrite: bool = False, *, folder: Path | None = None) -> Iterator[Path]:
    """`atomic_file` with errors in one sentence; CheckpointError if the file exists, unless `overwrite` is true."""
    path = Path(path).expanduser()
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder; pass the path of a file.")
    if not overwrite and os.path.lexists(path):
        raise CheckpointError(f"{path} already exists; choose another name or pass --overwrite.")
    with explain_write_errors(path), atomic_file(path, folder=folder, overwrite=overwrite) as temporary:
        yield temporary


@contextmanager
def new_folder(path: Path, overwrite: bool = False) -> Iterator[Path]:
    """Context manager: a temporary folder that is renamed to `path` if the block succeeds.

    CheckpointError if the folder exists and is not empty, unless `overwrite` is true. It is replaced after the new one
    is complete, and only if it contains nothing but checkpoint files.
    """
    path = Path(path).expanduser()
    _check_folder(path, overwrite)
    temporary = _temporary_sibling(path, "tmp")
    try:
        with explain_write_errors(path):
            temporary.mkdir()
        with report_errors_for(temporary, path):
            yield temporary
        with explain_write_errors(path):
            fsync_tree(temporary)
            _check_folder(path, overwrite)
            swap_folder(temporary, path, overwrite)
            fsync(path.absolute().parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def report_errors_for(temporary: Path, path: Path) -> Iterator[None]:
    """Context manager: write errors under `temporary` are reported for `path`; other errors pass through."""
    try:
        yield
    except CheckpointError as error:
        raise type(error)(str(error).replace(str(temporary), str(path))) from error
    except OSError as error:
        inside = error.filename is not None and Path(os.fsdecode(error.filename)).is_relative_to(temporary)
        if error.errno is None or not (inside or error.errno in DISK_FULL_ERRNOS):
            raise
        _raise_write_error(path, error.errno, error)


def _check_folder(path: Path, overwrite: bool) -> None:
    if not os.path.lexists(path):
        return
    if not path.is_dir() or path.is_symlink():
        raise CheckpointError(f"{path} already exists and is not a folder; choose another name.")
    with explain_write_errors(path):
        inside = sorted(path.iterdir())
    if inside and not overwrite:
        raise CheckpointError(f"{path} already exists and is not empty; choose another name or pass --overwrite.")
    unexpected = [f.name for f in inside if f.suffix not in REPLACEABLE or not f.is_file()]
    if unexpected:
        names = ", ".join(unexpected[:3]) + (", ..." if len(unexpected) > 3 else "")
        raise CheckpointError(f"{path} was not replaced: it also contains {names}, which is not part of a checkpoint.")


def swap_folder(new: Path, path: Path, overwrite: bool) -> None:
    if not overwrite or not path.is_dir() or not any(path.iterdir()):
        os.replace(new, path)  # replaces an empty folder in one step, and fails if it is not empty
        return
    # Folders cannot be exchanged in one step. If the process is killed between the renames, both are left, complete.
    old = _temporary_sibling(path, "old")
    os.replace(path, old)
    try:
        os.replace(new, path)
    except BaseException:
        os.replace(old, path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _temporary_sibling(path: Path, suffix: str) -> Path:
    # In the same folder, so that the rename stays within one file system.
    return path.absolute().parent / f".{path.name}.{secrets.token_hex(4)}.{suffix}"


def rename_synced(source: Path, target: Path, *, overwrite: bool = True) -> None:
    """Flush a file to disk, rename it to `target` and flush the folder, so that the new name has the whole content."""
    fsync(source)
    if not overwrite and os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    os.replace(source, target)
    fsync(target.absolute().parent)


def fsync_tree(folder: Path) -> None:
    """Flush a folder and all that it contains to disk."""
    for path in (*sorted(folder.rglob("*")), folder):
        fsync(path)


def fsync(path: Path) -> None:
    """Flush to disk. Without this, a power failure can leave an empty file under the new name."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open folders
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)  # Windows flushes only writable files
    try:
        os.fsync(handle)
    except OSError as error:
        # Some file systems cannot flush a folder; the files in it have already been flushed.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.EBADF, errno.ENOTSUP)):
            raise
    finally:
        os.close(handle)


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Context manager: turn operating system errors of a failed write into one sentence about `path`."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, RuntimeError) as error:
        number = _find_errno(error)
        if number is None:
            raise
        _raise_write_error(path, number, error)


def _find_errno(error: BaseException | None) -> int | None:
    """The errno of an error or of its causes: torch wraps OSError in its own errors."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        error = error.__cause__ or error.__context__
    return None


def _raise_write_error(path: Path, number: int, error: BaseException) -> NoReturn:
    folder = path.absolute().parent
    if number in DISK_FULL_ERRNOS:
        free = ""
        with suppress(OSError):
            free = f" ({shutil.disk_usage(folder).free / 2**20:.0f} MiB free)"
        reason = f"the disk or its quota is full{free}; free some space or write elsewhere"
    elif number in PERMISSION_ERRNOS:
        reason = f"no permission to write in {folder}; choose another folder"
    elif number == errno.ENOENT:
        reason = f"the folder {folder} does not exist or was removed; create it first"
    else:
        reason = os.strerror(number)
    raise CheckpointError(f"could not write {path}: {reason}. No partial file was left.") from error
