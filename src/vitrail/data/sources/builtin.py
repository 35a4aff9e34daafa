"""Data sets by name: found where they are, downloaded where they are not.

Looked for in the folder the user names, in the cache, in the system's own folder for data sets, in
any layout of layouts.py; what is found is held against the catalog's digest of the content.
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
from vitrail.errors import DataError, NotFound

DIGITS_TEST_FRACTION = 0.2
"""Share of scikit-learn's digits that is the test part."""


@dataclass(frozen=True)
class DatasetLocation:
    """Where a data set lies, and how."""

    folder: Path
    layout: str
    unambiguous: bool = True
    """Whether it is told from others by the names of its files and folder."""


def open_builtin(name: str, config: DataConfig) -> SourceSplits:
    """A data set of the catalog: its train part and its test part."""
    entry = CATALOG[name]
    parts, notes = _load_or_download(entry, config.root)
    order = _class_order(entry, config.class_names)
    sources = {
        part: ArraySource(name, part, pixels, order[targets], config.class_names or entry.labels)
        for part, (pixels, targets) in parts.items()
    }
    return SourceSplits(sources["train"], None, sources["test"], tuple(notes), stratify=True)


def find_dataset(entry: DatasetInfo, root: str | None = None) -> DatasetLocation | None:
    """Where a data set lies on this machine; None: nowhere."""
    for place in _candidates(entry, root):
        if not place.unambiguous:  # several data sets have files of these names
            try:
                if _read_verified(entry, place) is None:
                    continue
            except DataError:
                continue
        return place
    return None


def ensure_available(entry: DatasetInfo, root: str | None = None) -> None:
    """Find a data set, or download it into the cache; its content is verified either way."""
    _load_or_download(entry, root)


def _candidates(entry: DatasetInfo, root: str | None) -> Iterator[DatasetLocation]:
    """Every place that has files of the right names, best first."""
    if root is not None:
        given = Path(root).expanduser()
        if not given.is_dir():
            raise NotFound(f"there is no folder {given} to look for {entry.name} in (root=).")
        yield from _candidates_in(given, entry)
        if layout := detect_layout(given, entry):
            yield DatasetLocation(given, layout, unambiguous=layout != "IDX")
    if decoded_cache.load(entry) is not None:
        yield DatasetLocation(decoded_cache.decoded_dir(entry), decoded_cache.DECODED)
    yield from _candidates_in(data_cache.cache_dir(), entry)
    yield from _candidates_in(data_cache.SYSTEM_DIR, entry)


def _candidates_in(above: Path, entry: DatasetInfo) -> Iterator[DatasetLocation]:
    for folder in (above / entry.name, *(above / name for name in entry.folder_names)):
        if layout := detect_layout(folder, entry):
            yield DatasetLocation(folder, layout)


def _load_or_download(entry: DatasetInfo, root: str | None) -> tuple[dict[str, LabeledPixels], list[str]]:
    """train and test, from wherever they are, and what to say about them."""
    if entry.name == "digits":
        return _digits(entry), []
    for place in _candidates(entry, root):
        if (found := _read_verified(entry, place)) is not None:
            parts, sure = found
            unsure = f"the content of {place.folder} could not be verified: no digest of {entry.name} is known"
            return parts, [] if sure else [unsure]
    found = _read_verified(entry, _download(entry), downloaded=True)
    assert found is not None
    return found[0], []


def _read_verified(
    entry: DatasetInfo, place: DatasetLocation, downloaded: bool = False
) -> tuple[dict[str, LabeledPixels], bool] | None:
    """The content, and whether it is known to be right; None where it is another data set in the same layout."""
    if (
        place.layout in (*SLOW_LAYOUTS, decoded_cache.DECODED)
        and (kept := decoded_cache.load(entry, place.folder)) is not None
    ):
        return kept
    parts = read_layout(place.folder, entry, place.layout)
    found = decoded_cache.content_digest(parts)
    if any(found == other.digest for other in CATALOG.values() if other is not entry):
        return None
    if entry.digest and found != entry.digest:
        if downloaded:
            for file in entry.files:
                (place.folder / file.name).unlink(missing_ok=True)
        gone = "it has been removed; try again" if downloaded else "remove it, or name another folder with root="
        raise DataError(
            f"{place.folder} does not hold {entry.name} as it was published: the content's SHA-256 is {found[:12]}..., "
            f"wanted {entry.digest[:12]}...; {gone}."
        )
    sure = bool(entry.digest) or all(matches_md5(place.folder / file.name, file) for file in entry.files)
    if place.layout in SLOW_LAYOUTS:
        decoded_cache.store(entry, parts, found, place.folder, sure)
    return parts, sure


def _download(entry: DatasetInfo) -> DatasetLocation:
    """Into the cache, from the data set's own addresses."""
    folder = data_cache.cache_dir() / entry.name
    try:
        for file in entry.files:
            download(file, entry.base_urls, folder, verify=not entry.digest)
    except DownloadError as error:
        names = ", ".join(file.name for file in entry.files)
        debian = f" (on Debian and Ubuntu: apt install {entry.debian_package})" if entry.debian_package else ""
        raise NotFound(
            f"{entry.name} is not on this machine and could not be downloaded ({error}); put {names} into "
            f"{data_cache.display_path(folder)}, or name the folder that has them with root={debian}."
        ) from error
    layout = detect_layout(folder, entry)
    assert layout is not None
    return DatasetLocation(folder, layout)


def _digits(entry: DatasetInfo) -> dict[str, LabeledPixels]:
    """scikit-learn's 1,797 digits, 0 to 16 scaled to 0 to 255; the same fifth of each class is the test part."""
    from sklearn.datasets import load_digits

    found = load_digits()
    pixels = np.rint(found.images * (255 / 16)).astype(np.uint8)[..., None]
    targets = found.target.astype(np.int64)
    tested = hold_out_stratified((f"digits/{i:05d}" for i in range(len(targets))), targets, DIGITS_TEST_FRACTION)
    parts = {"train": (pixels[~tested], targets[~tested]), "test": (pixels[tested], targets[tested])}
    if decoded_cache.content_digest(parts) != entry.digest:
        raise DataError("scikit-learn's digits are not those that are known; try another version of it.")
    return parts


def _class_order(entry: DatasetInfo, classes: Sequence[str] | None) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Our class numbers -> those of the classes in the order asked for."""
    if classes is None or len(classes) != len(entry.labels) or set(classes) != set(entry.labels):
        if classes is not None and len(classes) != len(entry.labels):
            raise DataError(f"data.class_names gives {len(classes)}, and {entry.name} has {len(entry.labels)}.")
        return np.arange(len(entry.labels))
    return np.array([classes.index(label) for label in entry.labels])
