"""The files that people have of the known data sets, in any of the usual layouts.

IDX            train-images-idx3-ubyte and its three companions, with or without .gz
pickles        CIFAR's data_batch_1 ... test_batch, or train and test; loose or in their archive
binary         CIFAR's data_batch_1.bin ... or train.bin
MATLAB         SVHN's train_32x32.mat
Parquet        as on the Hugging Face hub
"""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.config import DataConfig
from vitrail.data.decode import decode
from vitrail.data.sources import progress
from vitrail.data.sources.catalog import DatasetInfo
from vitrail.data.sources.table import open_table
from vitrail.errors import DataError

LabeledPixels = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]
"""N H W C pixels and N class numbers."""
IMAGE_SIDE = 32
"""Of CIFAR's and SVHN's images."""


def detect_layout(folder: Path, entry: DatasetInfo) -> str | None:
    """Which layout of this data set lies in a folder, told by the files' names alone."""
    if not folder.is_dir():
        return None
    for name, find in LAYOUTS.items():
        if find(folder, entry) is not None:
            return name
    return None


def read_layout(folder: Path, entry: DatasetInfo, layout: str) -> dict[str, LabeledPixels]:
    """train and test, decoded; an error names the file that is damaged."""
    files = LAYOUTS[layout](folder, entry)
    assert files is not None
    found = {part: READERS[layout](paths, entry, part) for part, paths in files.items()}
    for (part, (pixels, targets)), count in zip(found.items(), entry.split_sizes, strict=True):
        if pixels.shape != (count, *entry.shape) or len(targets) != count:
            raise DataError(
                f"{folder} holds {len(targets):,} labels and images of shape {pixels.shape} as {entry.name}'s {part} "
                f"part; wanted {(count, *entry.shape)}."
            )
        if not 0 <= targets.min() <= targets.max() < len(entry.labels):
            raise DataError(
                f"{folder} has labels from {targets.min()} to {targets.max()}; {entry.name} has other ones."
            )
    return found


Files = dict[str, list[Path]]


def _idx_files(folder: Path, entry: DatasetInfo) -> Files | None:
    if not entry.files or "idx" not in entry.files[0].name:
        return None
    found: Files = {}
    for part, words in (("train", ("train",)), ("test", ("t10k", "test"))):
        for kind in ("images-idx3", "labels-idx1"):
            path = _find_file(folder, [f"{w}-{k}-ubyte" for w in words for k in (kind, kind.replace("-idx", ".idx"))])
            if path is None:
                return None
            found.setdefault(part, []).append(path)
    return found


def _pickle_files(folder: Path, entry: DatasetInfo) -> Files | None:
    if not entry.name.startswith("cifar"):
        return None
    for inside in (folder, folder / _cifar_folder(entry, "py")):
        train = [inside / n for n in _cifar_names(entry, "train")]
        test = [inside / n for n in _cifar_names(entry, "test")]
        if all(p.is_file() for p in train + test):
            return {"train": train, "test": test}
    return None


def _archive_files(folder: Path, entry: DatasetInfo) -> Files | None:
    archive = folder / f"{entry.name.replace('cifar', 'cifar-')}-python.tar.gz"
    return {"train": [archive], "test": [archive]} if entry.name.startswith("cifar") and archive.is_file() else None


def _binary_files(folder: Path, entry: DatasetInfo) -> Files | None:
    if not entry.name.startswith("cifar"):
        return None
    for inside in (folder, folder / _cifar_folder(entry, "bin")):
        files = {p: [inside / f"{n}.bin" for n in _cifar_names(entry, p)] for p in ("train", "test")}
        if all(path.is_file() for paths in files.values() for path in paths):
            return files
    return None


def _matlab_files(folder: Path, entry: DatasetInfo) -> Files | None:
    files = {part: [folder / f"{part}_32x32.mat"] for part in ("train", "test")}
    return files if entry.name == "svhn" and all(p.is_file() for [p] in files.values()) else None


def _parquet_files(folder: Path, entry: DatasetInfo) -> Files | None:
    for inside in (folder, folder / "data", folder / "plain_text", folder / entry.name, folder / "cropped_digits"):
        files = {part: sorted(inside.glob(f"{part}-*.parquet")) for part in ("train", "test")}
        if all(files.values()):
            return files
    return None


LAYOUTS: dict[str, Callable[[Path, DatasetInfo], Files | None]] = {
    "IDX": _idx_files,
    "pickles": _pickle_files,
    "binary": _binary_files,
    "MATLAB": _matlab_files,
    "Parquet": _parquet_files,
    "archive": _archive_files,
}
SLOW_LAYOUTS = ("Parquet", "archive", "MATLAB")
"""Layouts whose decoded content is worth keeping."""


def _read_idx(paths: list[Path], entry: DatasetInfo, part: str) -> LabeledPixels:
    pixels, targets = (_parse_idx(path) for path in paths)
    return pixels[..., None], targets.astype(np.int64)


def _parse_idx(path: Path) -> npt.NDArray[np.uint8]:
    """The array of an IDX file: two zeros, the type, the number of sizes, the sizes, the bytes."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}; copy or download it again.") from error
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise DataError(f"{path} is no IDX file of bytes (it begins with {data[:4]!r}).")
    sizes = struct.unpack(f">{data[3]}I", data[4 : 4 + 4 * data[3]])
    values = np.frombuffer(data, np.uint8, offset=4 + 4 * data[3])
    if len(values) != np.prod(sizes):
        raise DataError(f"{path} is cut off: {len(values):,} of {int(np.prod(sizes)):,} bytes are there.")
    return values.reshape(sizes)


def _read_pickles(paths: list[Path], entry: DatasetInfo, part: str) -> LabeledPixels:
    return _join_batches([_unpickle(path.read_bytes(), path) for path in paths], entry)


def _read_archive(paths: list[Path], entry: DatasetInfo, part: str) -> LabeledPixels:
    """CIFAR's own .tar.gz, read without being unpacked."""
    wanted = _cifar_names(entry, part)
    found = {}
    try:
        with tarfile.open(paths[0], "r:gz") as archive:
            for member in archive:
                name = member.name.rpartition("/")[2]
                if name in wanted and member.isfile() and (file := archive.extractfile(member)):
                    found[name] = _unpickle(file.read(), f"{name} in {paths[0]}")
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise DataError(f"{paths[0]} is damaged: {error}; copy or download it again.") from error
    if missing := [name for name in wanted if name not in found]:
        raise DataError(f"{paths[0]} lacks {', '.join(missing)}; copy or download it again.")
    return _join_batches([found[name] for name in wanted], entry)


def _read_binary(paths: list[Path], entry: DatasetInfo, part: str) -> LabeledPixels:
    """Records of one label (CIFAR-100: a coarse one, then the fine one) and 3 x 32 x 32 bytes."""
    before = 2 if entry.name == "cifar100" else 1
    data = np.concatenate([np.fromfile(path, np.uint8) for path in paths])
    width = before + 3 * IMAGE_SIDE * IMAGE_SIDE
    if len(data) % width:
        raise DataError(f"{paths[-1]} is cut off: wanted whole records of {width:,} bytes.")
    rows = data.reshape(-1, width)
    return _to_hwc(rows[:, before:]), rows[:, before - 1].astype(np.int64)


def _read_matlab(paths: list[Path], entry: DatasetInfo, part: str) -> LabeledPixels:
    from scipy.io import loadmat  # type: ignore[import-untyped]  # scikit-learn brings it

    try:
        found = loadmat(paths[0], variable_names=("X", "y"))
        pixels, targets = found["X"], found["y"].ravel().astype(np.int64)  # H W C N
    except Exception as error:  # a damaged file can raise anything
        raise DataError(f"{paths[0]} cannot be read: {error}; copy or download it again.") from error
    return np.ascontiguousarray(np.moveaxis(pixels, -1, 0)), targets % 10  # its 10 is the digit 0


def _read_parquet(paths: list[Path], entry: DatasetInfo, part: str) -> LabeledPixels:
    config = DataConfig(label_column="fine_label") if entry.name == "cifar100" else DataConfig()
    rows = open_table({"train": paths}, config, entry.name).train
    pixels = np.empty((len(rows), *entry.shape), np.uint8)
    with progress.progress_bar(f"decoding {entry.name}, {part}", len(rows)) as advance:
        for index in range(len(rows)):  # threads do not help: Pillow reads WebP with Python's lock held
            pixels[index] = _check_shape(decode(rows[index].image, entry.shape[2]), entry, rows.key(index))
            advance(1)
    return pixels, np.asarray(rows.targets, np.int64)


def _check_shape(pixels: npt.NDArray[np.uint8], entry: DatasetInfo, key: str) -> npt.NDArray[np.uint8]:
    if pixels.shape != entry.shape:
        raise DataError(f"{key} is an image of shape {pixels.shape}; those of {entry.name} have {entry.shape}.")
    return pixels


READERS: dict[str, Callable[[list[Path], DatasetInfo, str], LabeledPixels]] = {
    "IDX": _read_idx,
    "pickles": _read_pickles,
    "binary": _read_binary,
    "MATLAB": _read_matlab,
    "Parquet": _read_parquet,
    "archive": _read_archive,
}


def _find_file(folder: Path, names: list[str]) -> Path | None:
    """The file of one of these names, compressed or not."""
    return next((p for n in names for p in (folder / n, folder / f"{n}.gz") if p.is_file()), None)


def _cifar_folder(entry: DatasetInfo, kind: str) -> str:
    if entry.name == "cifar100":
        return "cifar-100-python" if kind == "py" else "cifar-100-binary"
    return f"cifar-10-batches-{kind}"


def _cifar_names(entry: DatasetInfo, part: str) -> list[str]:
    if entry.name == "cifar100":
        return [part]
    return [f"data_batch_{i}" for i in range(1, 6)] if part == "train" else ["test_batch"]


def _join_batches(batches: Sequence[dict[bytes, Any]], entry: DatasetInfo) -> LabeledPixels:
    key = b"fine_labels" if entry.name == "cifar100" else b"labels"
    try:
        pixels = np.concatenate([np.asarray(batch[b"data"], np.uint8) for batch in batches])
        targets = np.concatenate([np.asarray(batch[key], np.int64) for batch in batches])
    except (KeyError, ValueError, TypeError) as error:
        raise DataError(f"the pickles of {entry.name} lack what they should hold: {error!r}.") from None
    return _to_hwc(pixels), targets


def _to_hwc(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """N 3072, color by color -> N 32 32 3."""
    return np.ascontiguousarray(rows.reshape(-1, 3, IMAGE_SIDE, IMAGE_SIDE).transpose(0, 2, 3, 1))


def _unpickle(data: bytes, path: Path | str) -> dict[bytes, Any]:
    try:
        found = _ArrayUnpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(f"{path} is no pickle of CIFAR's: {error}.") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} holds {type(found).__name__}, wanted a dictionary of pixels and labels.")
    return found


class _ArrayUnpickler(pickle.Unpickler):
    """Arrays, and nothing else that has a name: no code of a pickle's choosing is run."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np.empty(0, np.uint8).__reduce__()[0]
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes into an old pickle
            return lambda text, _: text.encode("latin-1")
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no data of CIFAR's need")
