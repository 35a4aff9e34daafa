"""Writing tensors so that nothing half-written is ever seen under its final name.

Everything goes to a hidden sibling first, is flushed to the disk, and is renamed into place when it
is complete. Any failure, an interrupt too, removes the sibling and leaves what was there before.
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

# What a folder may hold and still be replaced: a slip of the keyboard must not delete photographs.
REPLACEABLE = {".json", ".jsonl", ".safetensors", ".npz", ".pth", ".pt", ".bin", ".md", ".txt"}

# How safetensors calls torch's types.
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
    """Tensors of any layout; those that share memory are written one by one. Equal tensors give equal files.

    The data begin at a multiple of ALIGNMENT, first the tensors whose sizes are multiples of it: these can be
    used where they lie when the file is mapped, and only the few small ones after them are copied.
    """
    order = sorted(tensors, key=lambda name: (tensors[name].nbytes % ALIGNMENT > 0, -tensors[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].nbytes
        kind, shape = _kind(name, tensors[name]), list(tensors[name].shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)  # the format lets spaces follow the header
    with _new_file(path, overwrite) as temporary, temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(_stored(tensors[name]).data)


def _kind(name: str, tensor: Tensor) -> str:
    if tensor.dtype not in SAFETENSORS_DTYPES:
        raise CheckpointError(f"{name} is of {tensor.dtype}, which safetensors has no name for.")
    return SAFETENSORS_DTYPES[tensor.dtype]


def _stored(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Its elements in order, as little-endian integers of the same size."""
    flat = tensor.detach().cpu().reshape(-1).view(INTEGER_DTYPES[tensor.itemsize])
    array: np.ndarray[Any, Any] = flat.numpy()
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def write_torch(path: Path, tensors: Mapping[str, Tensor], *, overwrite: bool = False) -> None:
    """A plain dictionary of tensors, readable with `torch.load(weights_only=True)`."""
    # torch.save given a path hides why a write failed; given an open file it keeps the reason.
    with _new_file(path, overwrite) as temporary, temporary.open("wb") as file:
        torch.save(_independent(tensors), file)


def write_npz(path: Path, arrays: Mapping[str, Tensor | np.ndarray[Any, Any]], *, overwrite: bool = False) -> list[str]:
    """Uncompressed, without pickles; returns what to say aloud, such as a type NumPy does not have."""
    widened = [name for name, value in arrays.items() if isinstance(value, Tensor) and not _has_numpy(value)]
    # np.savez takes names as keyword arguments, and one of them is taken by its own parameter.
    with (
        _new_file(path, overwrite) as temporary,
        temporary.open("wb") as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive,
    ):
        for name, value in arrays.items():
            # A fixed date: the same weights give the same bytes.
            member = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            with archive.open(member, "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, _array(value), allow_pickle=False)
    if not widened:
        return []
    kinds = ", ".join(sorted({str(arrays[name].dtype).removeprefix("torch.") for name in widened}))
    return [f"NumPy has no {kinds}: {len(widened)} of {len(arrays)} arrays were written as float32."]


def write_json(path: Path, value: Any, *, overwrite: bool = False) -> None:
    """Indented UTF-8 that any JSON reader takes: NaN is refused."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_text(path, text, overwrite=overwrite)


def write_text(path: Path, text: str, *, overwrite: bool = False) -> None:
    """UTF-8."""
    with _new_file(path, overwrite) as temporary:
        temporary.write_bytes(text.encode())


@contextmanager
def new_folder(path: Path, overwrite: bool = False) -> Iterator[Path]:
    """A temporary sibling to fill, which becomes `path` when the block ends well.

    An existing folder is refused unless it is empty or `overwrite` is true; it is then replaced
    after the new one is complete, and only if it holds nothing but a checkpoint's files.
    """
    path = Path(path).expanduser()
    _check_folder(path, overwrite)
    temporary = _sibling(path, "tmp")
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
    """Failures to write under `temporary`, told about `path`; other errors of the block stay themselves."""
    try:
        yield
    except CheckpointError as error:
        raise type(error)(str(error).replace(str(temporary), str(path))) from error
    except OSError as error:
        inside = error.filename is not None and Path(os.fsdecode(error.filename)).is_relative_to(temporary)
        if error.errno is None or not (inside or error.errno in DISK_FULL_ERRNOS):
            raise
        _complain(path, error.errno, error)


@contextmanager
def _new_file(path: Path, overwrite: bool) -> Iterator[Path]:
    """A temporary sibling to write, which becomes `path` when the block ends well."""
    path = Path(path).expanduser()
    _check_file(path, overwrite)
    temporary = _sibling(path, "tmp")
    with explain_write_errors(path):
        try:
            # Made here and not by the writer, so that an existing file is never opened; O_EXCL says so.
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
        raise CheckpointError(f"{path} is a folder; give the name of a file in it.")
    if not overwrite and os.path.lexists(path):
        raise CheckpointError(f"{path} exists already; choose another name, or overwrite it (--overwrite).")


def _check_folder(path: Path, overwrite: bool) -> None:
    if not os.path.lexists(path):
        return
    if not path.is_dir() or path.is_symlink():
        raise CheckpointError(f"{path} exists already and is not a folder; choose another name.")
    with explain_write_errors(path):
        inside = sorted(path.iterdir())
    if inside and not overwrite:
        raise CheckpointError(
            f"{path} exists already and is not empty; choose another name, or overwrite it (--overwrite)."
        )
    strange = [f.name for f in inside if f.suffix not in REPLACEABLE or not f.is_file()]
    if strange:
        shown = ", ".join(strange[:3]) + (", ..." if len(strange) > 3 else "")
        raise CheckpointError(f"{path} is not replaced: it also holds {shown}, which is no part of a checkpoint.")


def _swap_folder(new: Path, path: Path) -> None:
    if not path.is_dir() or not any(path.iterdir()):
        os.replace(new, path)  # an empty folder is replaced in one step too
        return
    # Two renames, since folders cannot be exchanged in one: a kill between them leaves both, complete.
    old = _sibling(path, "old")
    os.replace(path, old)
    try:
        os.replace(new, path)
    except BaseException:
        os.replace(old, path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sibling(path: Path, suffix: str) -> Path:
    # In the same folder, so that the rename stays on one disk.
    return path.absolute().parent / f".{path.name}.{secrets.token_hex(4)}.{suffix}"


def fsync(path: Path) -> None:
    """Wait until the disk has it: without this a power cut can leave a name for an empty file."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some file systems cannot flush a folder; what is in it has been flushed by itself.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.EBADF, errno.ENOTSUP)):
            raise
    finally:
        os.close(handle)


def _independent(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, contiguous, each with memory of its own; copies only where that is not so already."""
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


def _has_numpy(tensor: Tensor) -> bool:
    try:
        torch.empty(0, dtype=tensor.dtype).numpy()
    except TypeError:
        return False
    return True


def _array(value: Tensor | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if isinstance(value, np.ndarray):
        return value
    value = value.detach().cpu()
    return value.numpy() if _has_numpy(value) else value.float().numpy()


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn what the system says about a failed write into one sentence about `path`."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, RuntimeError) as error:
        number = _errno(error)
        if number is None:
            raise
        _complain(path, number, error)


def _errno(error: BaseException | None) -> int | None:
    """The system's error number, which torch wraps in errors of its own."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        error = error.__cause__ or error.__context__
    return None


def _complain(path: Path, number: int, error: BaseException) -> NoReturn:
    folder = path.absolute().parent
    if number in DISK_FULL_ERRNOS:
        free = ""
        with suppress(OSError):
            free = f" ({shutil.disk_usage(folder).free / 2**20:.0f} MiB are free)"
        reason = f"the disk or its quota is full{free}; free some space, or write elsewhere"
    elif number in PERMISSION_ERRNOS:
        reason = f"no permission to write in {folder}; choose another folder"
    elif number == errno.ENOENT:
        reason = f"the folder {folder} does not exist, or was removed meanwhile; make it first"
    else:
        reason = os.strerror(number)
    raise CheckpointError(f"could not write {path}: {reason}. Nothing was left behind.") from error
