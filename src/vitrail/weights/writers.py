"""Atomic writes of tensors: safetensors, torch and npz files."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import CheckpointError
from vitrail.storage.atomic_write import new_file
from vitrail.weights.archive import ALIGNMENT

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


def write_safetensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    overwrite: bool = False,
    read: Callable[[str], Tensor] | None = None,
) -> None:
    """Write a safetensors file. Tensors that share memory are written separately; equal tensors give identical files.

    The data begin at a multiple of ALIGNMENT, and tensors whose sizes are multiples of it come first: when the file is
    memory-mapped, these are used in place and only the few small ones after them are copied. With `read`, `tensors`
    has only dtypes and shapes (on the meta device), and `read` returns each tensor in the order of `file_order`.
    """
    order = file_order(tensors)
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].nbytes
        kind, shape = _safetensors_dtype(name, tensors[name]), list(tensors[name].shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)  # safetensors permits trailing spaces in the header
    with new_file(path, overwrite) as temporary, temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(_little_endian(tensors[name] if read is None else read(name)).data)


def file_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors in the order in which `write_safetensors` writes them."""
    return sorted(tensors, key=lambda name: (tensors[name].nbytes % ALIGNMENT > 0, -tensors[name].itemsize, name))


def _safetensors_dtype(name: str, tensor: Tensor) -> str:
    if tensor.dtype not in SAFETENSORS_DTYPES:
        raise CheckpointError(f"{name} has dtype {tensor.dtype}, which safetensors does not support.")
    return SAFETENSORS_DTYPES[tensor.dtype]


def _little_endian(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The elements in order, as little-endian integers of the same size."""
    flat = tensor.detach().cpu().reshape(-1).view(INTEGER_DTYPES[tensor.itemsize])
    array: np.ndarray[Any, Any] = flat.numpy()
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def write_torch(path: Path, tensors: Mapping[str, Tensor], *, section: str = "", overwrite: bool = False) -> None:
    """A plain dictionary of tensors, readable with `torch.load(weights_only=True)`; `section`: its key in another."""
    # Given a path, torch.save hides why a write failed; given an open file, it does not.
    with new_file(path, overwrite) as temporary, temporary.open("wb") as file:
        plain = _unshared_on_cpu(tensors)
        torch.save({section: plain} if section else plain, file)


def write_npz(path: Path, arrays: Mapping[str, Tensor | np.ndarray[Any, Any]], *, overwrite: bool = False) -> list[str]:
    """Write an uncompressed npz without pickles; returns notes, such as dtypes that NumPy does not have."""
    widened = [name for name, value in arrays.items() if isinstance(value, Tensor) and not _has_numpy_dtype(value)]
    # np.savez takes the names as keyword arguments, one of which is its own parameter `file`.
    with (
        new_file(path, overwrite) as temporary,
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
