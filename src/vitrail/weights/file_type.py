"""Detect the type of a weights file from its first bytes, and name unsupported types in errors."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NoReturn

from vitrail.errors import CheckpointError, first_line

FileType = Literal["safetensors", "npz", "torch", "legacy-torch", "torchscript", "index"]

LEGACY_TORCH = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
TENSORFLOW_FOOTER = b"\x57\xfb\x80\x8b\x24\x75\x47\xdb"
HTML = re.compile(rb"<(!doctype html|html|head|body)\b", re.IGNORECASE)
UNSUPPORTED_SIGNATURES: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras writes them"),
    (0, b"\x93NUMPY", "a single unnamed NumPy array (.npy)"),
    (0, b"\x08\x01\x12", "a TensorFlow SavedModel"),
    (4, b"TFL3", "a TensorFlow Lite model"),
    (0, b"GGUF", "a GGUF file"),
    (0, b"\x1f\x8b", "compressed with gzip"),
    (0, b"\xfd7zXZ", "compressed with xz"),
    (257, b"ustar", "a tar archive"),
    (0, b"\xff\xd8\xff", "a JPEG image"),
    (0, b"\x89PNG", "a PNG image"),
)
HEAD_BYTES = 512
SUPPORTED_TYPES = "expected safetensors, npz or a torch.save file"
DOWNLOAD_AGAIN = "download or copy it again"


def detect_file_type(path: Path) -> FileType:
    """The type of a supported file; CheckpointError that names the type for any other."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if not head:
        raise CheckpointError(f"{path} is empty; {DOWNLOAD_AGAIN}.")
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return _zip_type(path)
    if head.startswith(LEGACY_TORCH):
        return "legacy-torch"
    if int.from_bytes(head[:8], "little") < 2**32 and head[8:9] == b"{":  # the header's length, then the header
        return "safetensors"
    if head[0] == 0x80 and head[1:2] < b"\x06":
        refuse_code(path, "it is a Python pickle not written by torch.save")
    for offset, magic, what in UNSUPPORTED_SIGNATURES:
        if head[offset:].startswith(magic):
            raise CheckpointError(f"{path} is {what}; {SUPPORTED_TYPES}.")
    if _is_text(head):
        return _text_type(path, head.lstrip(b"\xef\xbb\xbf \t\r\n"))
    raise CheckpointError(f"{path} is {_describe_unsigned(path, head)}; {SUPPORTED_TYPES}.")


def refuse_code(path: Path, why: str, error: Exception | None = None) -> NoReturn:
    raise CheckpointError(
        f"{path} was refused: {why}, which can run code; nothing in it was executed. "
        "Ask its author for safetensors or a plain dictionary of tensors."
    ) from error


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({first_line(error)}); {DOWNLOAD_AGAIN}.") from error


def summarize_names(names: Iterable[str], limit: int = 4) -> str:
    """`a, b, c, d and 7 more`."""
    names = list(names)
    listed = ", ".join(names[:limit])
    return listed if len(names) <= limit else f"{listed} and {len(names) - limit} more"


def _zip_type(path: Path) -> FileType:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{path} is truncated or damaged ({first_line(error)}); {DOWNLOAD_AGAIN}.") from error
    leaves = {n.rsplit("/", 1)[-1] for n in names}
    if {"data.pkl", "constants.pkl"} <= leaves:
        return "torchscript"
    if "data.pkl" in leaves:
        return "torch"
    if not names or any(n.endswith(".npy") for n in names):
        return "npz"
    raise CheckpointError(f"{path} is a zip archive of other files ({summarize_names(names)}); {SUPPORTED_TYPES}.")


def _text_type(path: Path, start: bytes) -> FileType:
    """The type of a text file: "index" for an index of shards; CheckpointError that says what any other file is."""
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` in its repository.")
    if HTML.match(start):
        raise CheckpointError(
            f"{path} is an HTML page, not weights; its URL may require a login or not be the file's direct link."
        )
    if start.startswith(b"{"):
        if "weight_map" in read_json(path):
            return "index"
        raise CheckpointError(f"{path} is JSON but not an index of shards; pass the weights beside it or their folder.")
    line = (start.decode(errors="replace").splitlines() or [""])[0][:40]
    raise CheckpointError(f"{path} is a text file that starts with {line!r}; {SUPPORTED_TYPES}.")


def _is_text(head: bytes) -> bool:
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        if error.start < HEAD_BYTES - 3:  # a character may be cut off at the end of what was read
            return False
        text = head[: error.start].decode()
    return all(c.isprintable() or c in "\t\r\n\f\ufeff" for c in text)


def _describe_unsigned(path: Path, head: bytes) -> str:
    """Name a file type that has no signature, from the structure of its first bytes."""
    first, second, third = head.ljust(3, b"\0")[:3]
    # ONNX (protobuf): field 1, the IR version, is a small number; another field of ModelProto follows.
    if first == 0x08 and 0 < second < 0x40 and third in b"\x12\x1a\x22\x2a\x32\x3a\x42":
        return "an ONNX model"
    if 0x81 <= first <= 0x8F and (0xA0 <= second <= 0xBF or second == 0xD9):  # a map whose first key is a string
        return "a msgpack file, as Flax writes them"
    with path.open("rb") as file:
        file.seek(-min(8, path.stat().st_size), 2)
        tail = file.read()
    if tail == TENSORFLOW_FOOTER or ".ckpt" in path.name or ".data-0" in path.name:
        return "part of a TensorFlow checkpoint"
    return "in an unknown format"
