"""Built-in datasets by name: found on this machine, or downloaded.

They are searched in the folder given with root=, in the cache and in the system's folder for
datasets, in any layout of layouts.py. Their content is verified against the digest in the catalog.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitrail.config import DataConfig
from vitrail.data.sources import data_cache, decoded_cache
from vitrail.data.sources.arrays import ArraySource
from vitrail.data.sources.base import SourceSplits
from vitrail.data.sources.catalog import CATALOG, DatasetInfo
from vitrail.data.sources.download import DownloadError, download, matches_md5
from vitrail.data.sources.holdout import hold_out_stratified
from vitrail.data.sources.layouts import SLOW_LAYOUTS, LabeledPixels, detect_layout, read_layout
from vitrail.errors import DataError, NotFoundError

DIGITS_TEST_FRACTION = 0.2
"""Fraction of scikit-learn's digits in the test split."""


@dataclass(frozen=True)
class DatasetLocation:
    """The folder of a dataset on disk, and the layout of its files."""

    folder: Path
    layout: str
    unambiguous: bool = True
    """Whether the names of the files and the folder identify the dataset."""


def open_builtin(name: str, config: DataConfig) -> SourceSplits:
    """Open the training and test splits of a dataset in the catalog."""
    dataset = CATALOG[name]
    splits, notes = _load_or_download(dataset, config.root)
    order = _class_order(dataset, config.class_names)
    sources = {
        split: ArraySource(name, split, pixels, order[targets], config.class_names or dataset.labels)
        for split, (pixels, targets) in splits.items()
    }
    return SourceSplits(sources["train"], None, sources["test"], tuple(notes), stratify=True)


def find_dataset(dataset: DatasetInfo, root: str | None = None) -> DatasetLocation | None:
    """Where a dataset is on this machine; None if it is not there."""
    for location in _candidates(dataset, root):
        if not location.unambiguous:  # several datasets have files with these names
            try:
                if _read_verified(dataset, location) is None:
                    continue
            except DataError:
                continue
        return location
    return None


def ensure_available(dataset: DatasetInfo, root: str | None = None) -> None:
    """Find a dataset or download it to the cache, and verify its content."""
    _load_or_download(dataset, root)


def _candidates(dataset: DatasetInfo, root: str | None) -> Iterator[DatasetLocation]:
    """Locations with files of the expected names, in the order of preference."""
    if root is not None:
        folder = Path(root).expanduser()
        if not folder.is_dir():
            raise NotFoundError(f"root={root} is not a folder; expected one that contains {dataset.name}.")
        yield from _candidates_in(folder, dataset)
        if layout := detect_layout(folder, dataset):
            yield DatasetLocation(folder, layout, unambiguous=layout != "IDX")
    if decoded_cache.load(dataset) is not None:
        yield DatasetLocation(decoded_cache.decoded_dir(dataset), decoded_cache.DECODED)
    yield from _candidates_in(data_cache.cache_dir(), dataset)
    yield from _candidates_in(data_cache.SYSTEM_DIR, dataset)


def _candidates_in(parent: Path, dataset: DatasetInfo) -> Iterator[DatasetLocation]:
    for folder in (parent / dataset.name, *(parent / name for name in dataset.folder_names)):
        if layout := detect_layout(folder, dataset):
            yield DatasetLocation(folder, layout)


def _load_or_download(dataset: DatasetInfo, root: str | None) -> tuple[dict[str, LabeledPixels], list[str]]:
    """The train and test splits from the first location that has them, else downloaded; and notes."""
    if dataset.name == "digits":
        return _digits(dataset), []
    for location in _candidates(dataset, root):
        if (content := _read_verified(dataset, location)) is not None:
            splits, verified = content
            note = f"the content of {location.folder} could not be verified: no digest of {dataset.name} is known"
            return splits, [] if verified else [note]
    content = _read_verified(dataset, _download(dataset), downloaded=True)
    assert content is not None
    return content[0], []


def _read_verified(
    dataset: DatasetInfo, location: DatasetLocation, downloaded: bool = False
) -> tuple[dict[str, LabeledPixels], bool] | None:
    """The content, and whether it was verified; None if it is another dataset with the same layout."""
    folder, layout = location.folder, location.layout
    if layout in (*SLOW_LAYOUTS, decoded_cache.DECODED) and (cached := decoded_cache.load(dataset, folder)) is not None:
        return cached
    splits = read_layout(folder, dataset, layout)
    digest = decoded_cache.content_digest(splits)
    if any(digest == other.digest for other in CATALOG.values() if other is not dataset):
        return None
    if dataset.digest and digest != dataset.digest:
        if downloaded:
            for file in dataset.files:
                (folder / file.name).unlink(missing_ok=True)
        hint = "it has been removed; try again" if downloaded else "remove it, or give another folder with root="
        raise DataError(
            f"{folder} does not contain {dataset.name} as published: the SHA-256 of its content is {digest[:12]}..., "
            f"expected {dataset.digest[:12]}...; {hint}."
        )
    verified = bool(dataset.digest) or all(matches_md5(folder / file.name, file) for file in dataset.files)
    if layout in SLOW_LAYOUTS:
        decoded_cache.store(dataset, splits, digest, folder, verified)
    return splits, verified


def _download(dataset: DatasetInfo) -> DatasetLocation:
    """Download the published files to the cache."""
    folder = data_cache.cache_dir() / dataset.name
    try:
        for file in dataset.files:
            download(file, dataset.base_urls, folder, verify=not dataset.digest)
    except DownloadError as error:
        names = ", ".join(file.name for file in dataset.files)
        debian = f" (on Debian and Ubuntu: apt install {dataset.debian_package})" if dataset.debian_package else ""
        raise NotFoundError(
            f"{dataset.name} is not on this machine and could not be downloaded ({error}); put {names} into "
            f"{data_cache.display_path(folder)}, or give the folder that has them with root={debian}."
        ) from error
    layout = detect_layout(folder, dataset)
    assert layout is not None
    return DatasetLocation(folder, layout)


def _digits(dataset: DatasetInfo) -> dict[str, LabeledPixels]:
    """scikit-learn's 1,797 digits, scaled from 0..16 to 0..255; a fixed fifth of each class is the test split."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)[..., None]
    targets = digits.target.astype(np.int64)
    test = hold_out_stratified((f"digits/{i:05d}" for i in range(len(targets))), targets, DIGITS_TEST_FRACTION)
    splits = {"train": (pixels[~test], targets[~test]), "test": (pixels[test], targets[test])}
    if decoded_cache.content_digest(splits) != dataset.digest:
        raise DataError("the digits in this version of scikit-learn are not the expected ones; try another version.")
    return splits


def _class_order(dataset: DatasetInfo, classes: Sequence[str] | None) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The dataset's class indices -> indices into `classes`."""
    if classes is None or len(classes) != len(dataset.labels) or set(classes) != set(dataset.labels):
        if classes is not None and len(classes) != len(dataset.labels):
            raise DataError(
                f"data.class_names= gives {len(classes)} names, but {dataset.name} has {len(dataset.labels)} classes."
            )
        return np.arange(len(dataset.labels))
    return np.array([classes.index(label) for label in dataset.labels])
