"""Read the files of built-in datasets in their usual layouts.

IDX            train-images-idx3-ubyte and the three other files, with or without .gz
pickles        CIFAR's data_batch_1 ... test_batch, or train and test
archive        the same in CIFAR's .tar.gz
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
from vitrail.data.sources.catalog import DatasetInfo
from vitrail.data.sources.progress import progress_bar
from vitrail.data.sources.table import open_table
from vitrail.errors import DataError

LabeledPixels = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]
"""N H W C pixels and N class indices."""
IMAGE_SIDE = 32
"""Height and width of CIFAR's images."""


def detect_layout(folder: Path, dataset: DatasetInfo) -> str | None:
    """The layout of this dataset in a folder, detected by file names; None if it is not there."""
    if not folder.is_dir():
        return None
    for name, find in LAYOUTS.items():
        if find(folder, dataset) is not None:
            return name
    return None


def read_layout(folder: Path, dataset: DatasetInfo, layout: str) -> dict[str, LabeledPixels]:
    """Decode the train and test splits; DataError if a file is damaged or a shape is wrong."""
    files = LAYOUTS[layout](folder, dataset)
    assert files is not None
    splits = {split: READERS[layout](paths, dataset, split) for split, paths in files.items()}
    for (split, (pixels, targets)), count in zip(splits.items(), dataset.split_sizes, strict=True):
        if pixels.shape != (count, *dataset.shape) or len(targets) != count:
            raise DataError(
                f"{folder} has {len(targets):,} labels and images of shape {pixels.shape} for the {split} split of "
                f"{dataset.name}; expected {(count, *dataset.shape)}."
            )
        if not 0 <= targets.min() <= targets.max() < len(dataset.labels):
            raise DataError(
                f"{folder} has labels from {targets.min()} to {targets.max()}; "
                f"{dataset.name} has 0 to {len(dataset.labels) - 1}."
            )
    return splits


Files = dict[str, list[Path]]


def _idx_files(folder: Path, dataset: DatasetInfo) -> Files | None:
    if not dataset.files or "idx" not in dataset.files[0].name:
        return None
    files: Files = {}
    for split, words in (("train", ("train",)), ("test", ("t10k", "test"))):
        for kind in ("images-idx3", "labels-idx1"):
            path = _find_file(folder, [f"{w}-{k}-ubyte" for w in words for k in (kind, kind.replace("-idx", ".idx"))])
            if path is None:
                return None
            files.setdefault(split, []).append(path)
    return files


def _pickle_files(folder: Path, dataset: DatasetInfo) -> Files | None:
    if not dataset.name.startswith("cifar"):
        return None
    for inside in (folder, folder / _cifar_folder(dataset, "py")):
        train = [inside / n for n in _cifar_names(dataset, "train")]
        test = [inside / n for n in _cifar_names(dataset, "test")]
        if all(p.is_file() for p in train + test):
            return {"train": train, "test": test}
    return None


def _archive_files(folder: Path, dataset: DatasetInfo) -> Files | None:
    archive = folder / f"{dataset.name.replace('cifar', 'cifar-')}-python.tar.gz"
    return {"train": [archive], "test": [archive]} if dataset.name.startswith("cifar") and archive.is_file() else None


def _binary_files(folder: Path, dataset: DatasetInfo) -> Files | None:
    if not dataset.name.startswith("cifar"):
        return None
    for inside in (folder, folder / _cifar_folder(dataset, "bin")):
        files = {p: [inside / f"{n}.bin" for n in _cifar_names(dataset, p)] for p in ("train", "test")}
        if all(path.is_file() for paths in files.values() for path in paths):
            return files
    return None


def _matlab_files(folder: Path, dataset: DatasetInfo) -> Files | None:
    files = {split: [folder / f"{split}_32x32.mat"] for split in ("train", "test")}
    return files if dataset.name == "svhn" and all(p.is_file() for [p] in files.values()) else None


def _parquet_files(folder: Path, dataset: DatasetInfo) -> Files | None:
    for inside in (folder, folder / "data", folder / "plain_text", folder / dataset.name, folder / "cropped_digits"):
        files = {split: sorted(inside.glob(f"{split}-*.parquet")) for split in ("train", "test")}
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
"""Layouts whose decoded content is cached."""


def _read_idx(paths: list[Path], dataset: DatasetInfo, split: str) -> LabeledPixels:
    pixels, targets = (_parse_idx(path) for path in paths)
    return pixels[..., None], targets.astype(np.int64)


def _parse_idx(path: Path) -> npt.NDArray[np.uint8]:
    """The array of an IDX file: two zero bytes, the type, the number of dimensions, the dimensions, the data."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}; copy or download it again.") from error
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise DataError(f"{path} is not an IDX file of bytes (it begins with {data[:4]!r}).")
    sizes = struct.unpack(f">{data[3]}I", data[4 : 4 + 4 * data[3]])
    values = np.frombuffer(data, np.uint8, offset=4 + 4 * data[3])
    if len(values) != np.prod(sizes):
        raise DataError(f"{path} is truncated: it has {len(values):,} of {int(np.prod(sizes)):,} bytes.")
    return values.reshape(sizes)


def _read_pickles(paths: list[Path], dataset: DatasetInfo, split: str) -> LabeledPixels:
    return _join_batches([_unpickle(path.read_bytes(), path) for path in paths], dataset)


def _read_archive(paths: list[Path], dataset: DatasetInfo, split: str) -> LabeledPixels:
    """CIFAR's .tar.gz, read without extracting it."""
    expected = _cifar_names(dataset, split)
    batches = {}
    try:
        with tarfile.open(paths[0], "r:gz") as archive:
            for member in archive:
                name = member.name.rpartition("/")[2]
                if name in expected and member.isfile() and (file := archive.extractfile(member)):
                    batches[name] = _unpickle(file.read(), f"{name} in {paths[0]}")
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise DataError(f"{paths[0]} is damaged: {error}; copy or download it again.") from error
    if missing := [name for name in expected if name not in batches]:
        raise DataError(f"{paths[0]} lacks {', '.join(missing)}; copy or download it again.")
    return _join_batches([batches[name] for name in expected], dataset)


def _read_binary(paths: list[Path], dataset: DatasetInfo, split: str) -> LabeledPixels:
    """Records of one label byte (CIFAR-100: the coarse label, then the fine one) and 3 x 32 x 32 bytes."""
    label_bytes = 2 if dataset.name == "cifar100" else 1
    data = np.concatenate([np.fromfile(path, np.uint8) for path in paths])
    width = label_bytes + 3 * IMAGE_SIDE * IMAGE_SIDE
    if len(data) % width:
        raise DataError(f"{paths[-1]} is truncated: expected whole records of {width:,} bytes.")
    rows = data.reshape(-1, width)
    return _to_hwc(rows[:, label_bytes:]), rows[:, label_bytes - 1].astype(np.int64)


def _read_matlab(paths: list[Path], dataset: DatasetInfo, split: str) -> LabeledPixels:
    from scipy.io import loadmat  # type: ignore[import-untyped]  # a dependency of scikit-learn

    try:
        arrays = loadmat(paths[0], variable_names=("X", "y"))
        pixels, targets = arrays["X"], arrays["y"].ravel().astype(np.int64)  # H W C N
    except Exception as error:  # a damaged file can raise anything
        raise DataError(f"cannot read {paths[0]}: {error}; copy or download it again.") from error
    return np.ascontiguousarray(np.moveaxis(pixels, -1, 0)), targets % 10  # label 10 is the digit 0


def _read_parquet(paths: list[Path], dataset: DatasetInfo, split: str) -> LabeledPixels:
    config = DataConfig(label_column="fine_label") if dataset.name == "cifar100" else DataConfig()
    rows = open_table({"train": paths}, config, dataset.name).train
    pixels = np.empty((len(rows), *dataset.shape), np.uint8)
    with progress_bar(f"decoding {dataset.name}, {split}", len(rows)) as advance:
        for index in range(len(rows)):  # threads do not help: Pillow holds the GIL while it decodes WebP
            pixels[index] = _check_shape(decode(rows[index].image, dataset.shape[2]), dataset, rows.key(index))
            advance(1)
    return pixels, np.asarray(rows.targets, np.int64)


def _check_shape(pixels: npt.NDArray[np.uint8], dataset: DatasetInfo, key: str) -> npt.NDArray[np.uint8]:
    if pixels.shape != dataset.shape:
        raise DataError(f"{key} is an image of shape {pixels.shape}; expected {dataset.shape} for {dataset.name}.")
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
    """The first of these files that exists, with or without .gz."""
    return next((p for n in names for p in (folder / n, folder / f"{n}.gz") if p.is_file()), None)


def _cifar_folder(dataset: DatasetInfo, kind: str) -> str:
    if dataset.name == "cifar100":
        return "cifar-100-python" if kind == "py" else "cifar-100-binary"
    return f"cifar-10-batches-{kind}"


def _cifar_names(dataset: DatasetInfo, split: str) -> list[str]:
    if dataset.name == "cifar100":
        return [split]
    return [f"data_batch_{i}" for i in range(1, 6)] if split == "train" else ["test_batch"]


def _join_batches(batches: Sequence[dict[bytes, Any]], dataset: DatasetInfo) -> LabeledPixels:
    key = b"fine_labels" if dataset.name == "cifar100" else b"labels"
    try:
        pixels = np.concatenate([np.asarray(batch[b"data"], np.uint8) for batch in batches])
        targets = np.concatenate([np.asarray(batch[key], np.int64) for batch in batches])
    except (KeyError, ValueError, TypeError) as error:
        raise DataError(f"the pickles of {dataset.name} lack the expected arrays: {error!r}.") from None
    return _to_hwc(pixels), targets


def _to_hwc(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """N 3072 in the order C H W -> N 32 32 3."""
    return np.ascontiguousarray(rows.reshape(-1, 3, IMAGE_SIDE, IMAGE_SIDE).transpose(0, 2, 3, 1))


def _unpickle(data: bytes, path: Path | str) -> dict[bytes, Any]:
    try:
        content = _ArrayUnpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(f"{path} is not a CIFAR pickle: {error}.") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} contains a {type(content).__name__}; expected a dict of pixels and labels.")
    return content


class _ArrayUnpickler(pickle.Unpickler):
    """Loads arrays and plain containers only, so that a malicious pickle cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np.empty(0, np.uint8).__reduce__()[0]
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes in pickle protocol 2
            return lambda text, _: text.encode("latin-1")
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which CIFAR's files do not need")
