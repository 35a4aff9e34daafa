"""Atomic writes of tensors, JSON and folders.

Data is written to a hidden temporary sibling, flushed to disk and then renamed. On failure or interrupt, the temporary
file is removed and the previous content stays.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import CheckpointError
from vitrail.weights.archive import ALIGNMENT

# A folder is replaced only if all its files have these suffixes, so that a mistyped path does not delete photographs.
REPLACEABLE = {".json", ".jsonl", ".safetensors", ".npz", ".pth", ".pt", ".bin", ".md", ".txt"}

# torch dtypes -> safetensors names.
SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
PERMISSION_ERRNOS = {errno.EACCES, errno.EPERM, errno.EROFS}


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, *, overwrite: bool = False
) -> None:
    """Write a safetensors file. Tensors that share memory are written separately; equal tensors give identical files.

    The data begin at a multiple of ALIGNMENT, and tensors whose sizes are multiples of it come first: when the file is
    memory-mapped, these are used in place and only the few small ones after them are copied.
    """
    order = sorted(tensors, key=lambda name: (tensors[name].nbytes % ALIGNMENT > 0, -tensors[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].nbytes
        kind, shape = _safetensors_dtype(name, tensors[name]), list(tensors[name].shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)  # safetensors permits trailing spaces in the header
    with _new_file(path, overwrite) as temporary, temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(_little_endian(tensors[name]).data)


def _safetensors_dtype(name: str, tensor: Tensor) -> str:
    if tensor.dtype not in SAFETENSORS_DTYPES:
        raise CheckpointError(f"{name} has dtype {tensor.dtype}, which safetensors does not support.")
    return SAFETENSORS_DTYPES[tensor.dtype]


def _little_endian(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The elements in order, as little-endian integers of the same size."""
    flat = tensor.detach().cpu().reshape(-1).view(INTEGER_DTYPES[tensor.itemsize])
    array: np.ndarray[Any, Any] = flat.numpy()
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def write_torch(path: Path, tensors: Mapping[str, Tensor], *, overwrite: bool = False) -> None:
    """A plain dictionary of tensors, readable with `torch.load(weights_only=True)`."""
    # Given a path, torch.save hides why a write failed; given an open file, it does not.
    with _new_file(path, overwrite) as temporary, temporary.open("wb") as file:
        torch.save(_unshared_on_cpu(tensors), file)


def write_npz(path: Path, arrays: Mapping[str, Tensor | np.ndarray[Any, Any]], *, overwrite: bool = False) -> list[str]:
    """Write an uncompressed npz without pickles; returns notes, such as dtypes that NumPy does not have."""
    widened = [name for name, value in arrays.items() if isinstance(value, Tensor) and not _has_numpy_dtype(value)]
    # np.savez takes the names as keyword arguments, one of which is its own parameter `file`.
    with (
        _new_file(path, overwrite) as temporary,
        temporary.open("wb") as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive,
    ):
        for name, value in arrays.items():
            # A fixed date, so that the same weights give the same bytes.
            member = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            with archive.open(member, "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, _to_numpy(value), allow_pickle=False)
    if not widened:
        return []
    kinds = ", ".join(sorted({str(arrays[name].dtype).removeprefix("torch.") for name in widened}))
    return [f"NumPy has no {kinds}: {len(widened)} of {len(arrays)} arrays were written as float32."]


def write_json(path: Path, value: Any, *, overwrite: bool = False) -> None:
    """Write indented UTF-8 JSON; NaN raises ValueError."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_text(path, text, overwrite=overwrite)


def write_text(path: Path, text: str, *, overwrite: bool = False) -> None:
    """Write UTF-8 text."""
    with _new_file(path, overwrite) as temporary:
        temporary.write_bytes(text.encode())


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
            for file in sorted(temporary.rglob("*")):
                fsync(file)
            fsync(temporary)
            _check_folder(path, overwrite)
            _swap_folder(temporary, path)
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


@contextmanager
def _new_file(path: Path, overwrite: bool) -> Iterator[Path]:
    """Context manager: a temporary file that is renamed to `path` if the block succeeds."""
    path = Path(path).expanduser()
    _check_file(path, overwrite)
    temporary = _temporary_sibling(path, "tmp")
    with explain_write_errors(path):
        try:
            # Created here with O_EXCL, so that the writer never opens an existing file.
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            yield temporary
            fsync(temporary)
            _check_file(path, overwrite)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        fsync(path.absolute().parent)


def _check_file(path: Path, overwrite: bool) -> None:
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder; pass the path of a file.")
    if not overwrite and os.path.lexists(path):
        raise CheckpointError(f"{path} exists already; choose another name or pass --overwrite.")


def _check_folder(path: Path, overwrite: bool) -> None:
    if not os.path.lexists(path):
        return
    if not path.is_dir() or path.is_symlink():
        raise CheckpointError(f"{path} exists already and is not a folder; choose another name.")
    with explain_write_errors(path):
        inside = sorted(path.iterdir())
    if inside and not overwrite:
        raise CheckpointError(f"{path} exists already and is not empty; choose another name or pass --overwrite.")
    strange = [f.name for f in inside if f.suffix not in REPLACEABLE or not f.is_file()]
    if strange:
        names = ", ".join(strange[:3]) + (", ..." if len(strange) > 3 else "")
        raise CheckpointError(f"{path} was not replaced: it also contains {names}, which is not part of a checkpoint.")


def _swap_folder(new: Path, path: Path) -> None:
    if not path.is_dir() or not any(path.iterdir()):
        os.replace(new, path)  # replaces an empty folder in one step
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


def fsync(path: Path) -> None:
    """Flush to disk. Without this, a power failure can leave an empty file under the new name."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some file systems cannot flush a folder; the files in it have already been flushed.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.EBADF, errno.ENOTSUP)):
            raise
    finally:
        os.close(handle)


def _unshared_on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, contiguous and without shared memory; copied only if needed."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != tensor.nbytes:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        result[name] = tensor
    return result


def _has_numpy_dtype(tensor: Tensor) -> bool:
    try:
        torch.empty(0, dtype=tensor.dtype).numpy()
    except TypeError:
        return False
    return True


def _to_numpy(value: Tensor | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if isinstance(value, np.ndarray):
        return value
    value = value.detach().cpu()
    return value.numpy() if _has_numpy_dtype(value) else value.float().numpy()


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
    raise CheckpointError(f"could not write {path}: {reason}. Nothing was left behind.") from error
