"""Exports that engines run, made once for a network and kept.

They lie in $VITRAIL_ENGINES, else beside vitrail's other caches, under a digest of the weights, the
preprocessing and the versions: what was written there holds here. A file that is damaged is made
anew, and where nothing can be kept they last as long as the process.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from vitrail.data.sources import data_cache
from vitrail.errors import CheckpointError, FormatError
from vitrail.export.engines import FileEngine, open_file
from vitrail.export.export_metadata import SUFFIXES, ExportFormat, ExportMetadata, OutputType, Precision
from vitrail.export.exporter import export, preprocess_images
from vitrail.export.formats import existing_files
from vitrail.export.sample_images import Pixels, sample_images
from vitrail.models import Net
from vitrail.runtime import warn_once
from vitrail.runtime.locks import try_lock
from vitrail.weights.model_info import ModelInfo

ENGINE_FORMATS: dict[str, ExportFormat] = {"onnxruntime": "onnx", "openvino": "openvino"}
"""What an engine reads."""
PACKAGES = ("vitrail", "torch", "onnx", "onnxscript", "onnxruntime", "openvino")
"""Whose versions a file depends on."""
CACHE_VERSION = 3
"""Incremented when files of the same network change: 2, int8 weights that cannot saturate; 3, metadata keys."""


def cached_engine(
    net: Net,
    info: ModelInfo,
    name: str,
    precision: Precision = "float32",
    threads: int | None = None,
    concurrency: int = 1,
    calibration: Sequence[Pixels] = (),
) -> FileEngine:
    """This engine for this network: exported and compared once, then kept where there is room."""
    folder = cache_folder(net, info, calibration)
    try:
        return _open_or_export(folder, net, info, name, precision, threads, concurrency, calibration)
    except Exception as error:  # every engine's writer has its own for a full disk
        if _has_room(folder, 8 * sum(p.numel() for p in net.parameters())):  # the file, and what it is made from
            raise
        if not is_persistent(folder):
            raise CheckpointError(
                f"{folder} has no room for the files of {name}; try VITRAIL_ENGINES or TMPDIR on another disk, or "
                "--engine torch."
            ) from error
    _FULL_CACHES.add(_cache_root())
    warn_once(["there is no room: engines' files are not kept"], about=str(_cache_root()))
    return cached_engine(net, info, name, precision, threads, concurrency, calibration)


def _open_or_export(
    folder: Path,
    net: Net,
    info: ModelInfo,
    name: str,
    precision: Precision,
    threads: int | None,
    concurrency: int,
    calibration: Sequence[Pixels],
) -> FileEngine:
    path = folder / f"{precision}{SUFFIXES[ENGINE_FORMATS[name]]}"
    info = info.replace(config=net.config)
    with file_lock(folder / ".lock"):
        if path.exists() and _checksum(path) == _stored_checksum(path):
            with suppress(CheckpointError, FormatError):  # of another kind of machine, perhaps
                return open_file(path, name, threads, concurrency).with_info(info)
        output_type: OutputType = "logits" if info.task == "classify" else "features"
        metadata = ExportMetadata(
            info=info.replace(notes=()), to=ENGINE_FORMATS[name], precision=precision, output_type=output_type
        )
        bridge = folder / f"float32{SUFFIXES['onnx']}"
        export(
            net,
            metadata,
            path,
            preprocess_images(metadata, sample_images(info.config.channels)),
            calibration=calibration,
            bridge=bridge if bridge.exists() and bridge != path and not calibration else None,
            timed=False,
            overwrite=True,
        )
        with suppress(OSError):  # without it the file is made anew next time
            _checksum_path(path).write_text(_checksum(path))
    return open_file(path, name, threads, concurrency).with_info(info)


def _checksum_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sum")


def _stored_checksum(path: Path) -> str:
    with suppress(OSError, ValueError):
        return _checksum_path(path).read_text()
    return ""


def _checksum(path: Path) -> str:
    """By which a file that was damaged since is known: an engine would run it."""
    found = 0
    for part in existing_files(path):
        with part.open("rb") as file:
            while block := file.read(2**22):
                found = zlib.crc32(block, found)
    return f"{found:08x}"


def cache_folder(net: Net, info: ModelInfo, calibration: Sequence[Pixels] = ()) -> Path:
    """Where a network's files lie; other images to calibrate on have other scales, and a place of their own."""
    inside = Path(cache_key(net, info))
    if calibration:
        inside = inside / hashlib.blake2b(b"".join(p.tobytes() for p in calibration), digest_size=8).hexdigest()
    usual = _cache_root()
    if usual not in _FULL_CACHES:
        try:
            (usual / inside).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=usual / inside):
                return usual / inside
        except OSError as error:
            warn_once([f"cannot be written ({error.strerror or error}): engines' files are not kept"], about=str(usual))
    folder = Path(_temporary_cache().name) / inside
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def is_persistent(folder: Path) -> bool:
    """Whether it is there for the next process, too."""
    return not folder.is_relative_to(_temporary_cache().name)


@contextmanager
def file_lock(lock: Path) -> Iterator[None]:
    """While somebody has this file, others wait, in this process or in another, and then find what was made."""
    with _LOCKS.setdefault(lock, threading.Lock()), open(lock, "w") as file:
        while not try_lock(file.fileno()):
            time.sleep(0.1)
        yield


_LOCKS: dict[Path, threading.Lock] = {}
"""A file keeps out other processes, not other threads."""


_FULL_CACHES: set[Path] = set()
"""Caches that had no room."""


def _cache_root() -> Path:
    given, data = os.environ.get("VITRAIL_ENGINES"), data_cache.cache_dir()
    usual = data / "engines" if os.environ.get("VITRAIL_DATA") else data.with_name("engines")
    return Path(given).expanduser() if given else usual


def _has_room(folder: Path, count: int) -> bool:
    """Whether a file of so many bytes can be written there."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, count)
            elif shutil.disk_usage(folder).free < count:
                return False
    except OSError:
        return False
    return True


@lru_cache(maxsize=1)
def _temporary_cache() -> tempfile.TemporaryDirectory[str]:
    """A folder that goes when the process does."""
    return tempfile.TemporaryDirectory(prefix="vitrail-engines-")


def cache_key(net: Net, info: ModelInfo) -> str:
    """Sixteen letters that differ where anything does that a file depends on: not the names of its classes."""
    found = hashlib.blake2b(digest_size=8)
    told = info.replace(config=net.config, notes=(), labels=None).to_dict() | {"origin": ""}
    found.update(json.dumps([told, CACHE_VERSION, [_version(name) for name in PACKAGES]], sort_keys=True).encode())
    for name, tensor in sorted(net.state_dict().items()):
        found.update(name.encode())
        found.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
