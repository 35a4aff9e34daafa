"""Cache of the exported files that engines run.

The files are stored in $VITRAIL_ENGINES, by default beside vitrail's other caches, under a digest of the weights, the
preprocessing and the package versions. Damaged files are exported again. If the folder is not writable or the disk is
full, the files are stored in a temporary folder until the process ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from vitrail.data.sources import data_cache
from vitrail.engines.engine import FileEngine, open_file
from vitrail.engines.export_metadata import ExportFormat, ExportMetadata, OutputType, Precision
from vitrail.engines.exported_files import SUFFIXES, existing_files
from vitrail.errors import CheckpointError, FormatError
from vitrail.exporting.exporter import export, preprocess_images
from vitrail.exporting.sample_images import Pixels, sample_images
from vitrail.models import Net
from vitrail.runtime import warn_once
from vitrail.storage.locks import file_lock
from vitrail.weights.model_info import ModelInfo

ENGINE_FORMATS: dict[str, ExportFormat] = {"onnxruntime": "onnx", "openvino": "openvino"}
"""Format of the files that an engine runs."""
PACKAGES = ("vitrail", "torch", "onnx", "onnxscript", "onnxruntime", "openvino")
"""Packages whose versions are part of the cache key."""
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
    """An engine for a network, opened from the cache; the first time, the network is exported and compared."""
    folder = cache_folder(net, info, calibration)
    try:
        return _open_or_export(folder, net, info, name, precision, threads, concurrency, calibration)
    except Exception as error:  # exporters raise different types on a full disk
        if _has_space(folder, 8 * sum(p.numel() for p in net.parameters())):  # the file and its intermediate files
            raise
        if not is_persistent(folder):
            raise CheckpointError(
                f"{folder} has no space for the files of {name}; set VITRAIL_ENGINES or TMPDIR to another disk, or use "
                "--engine torch."
            ) from error
    _FULL_CACHES.add(_cache_root())
    warn_once(["disk full: exported engines are not cached"], about=str(_cache_root()))
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
            with suppress(CheckpointError, FormatError):  # perhaps of another type of machine
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
        with suppress(OSError):  # without a checksum, the file is exported again next time
            _checksum_path(path).write_text(_checksum(path))
    return open_file(path, name, threads, concurrency).with_info(info)


def _checksum_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sum")


def _stored_checksum(path: Path) -> str:
    with suppress(OSError, ValueError):
        return _checksum_path(path).read_text()
    return ""


def _checksum(path: Path) -> str:
    """CRC-32 of the files of an export, 8 hex digits: an engine would run a damaged file without an error."""
    checksum = 0
    for part in existing_files(path):
        with part.open("rb") as file:
            while block := file.read(2**22):
                checksum = zlib.crc32(block, checksum)
    return f"{checksum:08x}"


def cache_folder(net: Net, info: ModelInfo, calibration: Sequence[Pixels] = ()) -> Path:
    """Folder of a network's files, with a subfolder for each set of calibration images; temporary if not writable."""
    subfolder = Path(cache_key(net, info))
    if calibration:
        subfolder = subfolder / hashlib.blake2b(b"".join(p.tobytes() for p in calibration), digest_size=8).hexdigest()
    root = _cache_root()
    if root not in _FULL_CACHES:
        try:
            (root / subfolder).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=root / subfolder):
                return root / subfolder
        except OSError as error:
            warn_once([f"not writable ({error.strerror or error}): exported engines are not cached"], about=str(root))
    folder = Path(_temporary_cache().name) / subfolder
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def is_persistent(folder: Path) -> bool:
    """Whether a cache folder outlives this process."""
    return not folder.is_relative_to(_temporary_cache().name)


_FULL_CACHES: set[Path] = set()
"""Cache folders that ran out of disk space."""


def _cache_root() -> Path:
    """$VITRAIL_ENGINES, else `engines` in or beside the folder of the data caches."""
    override, data_folder = os.environ.get("VITRAIL_ENGINES"), data_cache.cache_dir()
    default = data_folder / "engines" if os.environ.get("VITRAIL_DATA") else data_folder.with_name("engines")
    return Path(override).expanduser() if override else default


def _has_space(folder: Path, num_bytes: int) -> bool:
    """Whether a file of `num_bytes` can be written to a folder."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            elif shutil.disk_usage(folder).free < num_bytes:
                return False
    except OSError:
        return False
    return True


@lru_cache(maxsize=1)
def _temporary_cache() -> tempfile.TemporaryDirectory[str]:
    """A folder that is deleted when the process ends."""
    return tempfile.TemporaryDirectory(prefix="vitrail-engines-")


def cache_key(net: Net, info: ModelInfo) -> str:
    """16 hex digits that identify the weights, config, preprocessing and package versions.

    Origin and class names are not included: the exported files do not depend on them.
    """
    digest = hashlib.blake2b(digest_size=8)
    settings = info.replace(config=net.config, notes=(), labels=None).to_dict() | {"origin": ""}
    digest.update(
        json.dumps([settings, CACHE_VERSION, [_package_version(name) for name in PACKAGES]], sort_keys=True).encode()
    )
    for name, tensor in sorted(net.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
