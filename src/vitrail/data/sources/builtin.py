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
from vitrail.data.sources import content, places
from vitrail.data.sources.arrays import Arrays
from vitrail.data.sources.base import Parts
from vitrail.data.sources.catalog import CATALOG, Entry
from vitrail.data.sources.download import Unreachable, get, matches
from vitrail.data.sources.layouts import SLOW, Raw, layout_in, read
from vitrail.data.sources.split import stratified
from vitrail.errors import DataError, NotFound

TESTED = 0.2
"""Share of scikit-learn's digits that is the test part."""


@dataclass(frozen=True)
class Place:
    """Where a data set lies, and how."""

    folder: Path
    layout: str
    named: bool = True
    """Whether it is told from others by the names of its files and folder."""


def open_builtin(name: str, config: DataConfig) -> Parts:
    """A data set of the catalog: its train part and its test part."""
    entry = CATALOG[name]
    parts, notes = _content(entry, config.root)
    order = _order(entry, config.class_names)
    sources = {
        part: Arrays(name, part, pixels, order[targets], config.class_names or entry.labels)
        for part, (pixels, targets) in parts.items()
    }
    return Parts(sources["train"], None, sources["test"], tuple(notes), exact=True)


def find(entry: Entry, root: str | None = None) -> Place | None:
    """Where a data set lies on this machine; None: nowhere."""
    for place in _found(entry, root):
        if not place.named:  # several data sets have files of these names
            try:
                if _verified(entry, place) is None:
                    continue
            except DataError:
                continue
        return place
    return None


def fetch(entry: Entry, root: str | None = None) -> None:
    """Find a data set, or download it into the cache; its content is verified either way."""
    _content(entry, root)


def _found(entry: Entry, root: str | None) -> Iterator[Place]:
    """Every place that has files of the right names, best first."""
    if root is not None:
        given = Path(root).expanduser()
        if not given.is_dir():
            raise NotFound(f"there is no folder {given} to look for {entry.name} in (root=).")
        yield from _below(given, entry)
        if layout := layout_in(given, entry):
            yield Place(given, layout, named=layout != "IDX")
    if content.kept(entry) is not None:
        yield Place(content.home_of(entry), content.DECODED)
    yield from _below(places.cache(), entry)
    yield from _below(places.SYSTEM, entry)


def _below(above: Path, entry: Entry) -> Iterator[Place]:
    for folder in (above / entry.name, *(above / name for name in entry.folders)):
        if layout := layout_in(folder, entry):
            yield Place(folder, layout)


def _content(entry: Entry, root: str | None) -> tuple[dict[str, Raw], list[str]]:
    """train and test, from wherever they are, and what to say about them."""
    if entry.name == "digits":
        return _digits(entry), []
    for place in _found(entry, root):
        if (found := _verified(entry, place)) is not None:
            parts, sure = found
            unsure = f"the content of {place.folder} could not be verified: no digest of {entry.name} is known"
            return parts, [] if sure else [unsure]
    found = _verified(entry, _download(entry), just_come=True)
    assert found is not None
    return found[0], []


def _verified(entry: Entry, place: Place, just_come: bool = False) -> tuple[dict[str, Raw], bool] | None:
    """The content, and whether it is known to be right; None where it is another data set in the same layout."""
    if place.layout in (*SLOW, content.DECODED) and (kept := content.kept(entry, place.folder)) is not None:
        return kept
    parts = read(place.folder, entry, place.layout)
    found = content.digest(parts)
    if any(found == other.digest for other in CATALOG.values() if other is not entry):
        return None
    if entry.digest and found != entry.digest:
        if just_come:
            for file in entry.files:
                (place.folder / file.name).unlink(missing_ok=True)
        gone = "it has been removed; try again" if just_come else "remove it, or name another folder with root="
        raise DataError(
            f"{place.folder} does not hold {entry.name} as it was published: the content's SHA-256 is {found[:12]}..., "
            f"wanted {entry.digest[:12]}...; {gone}."
        )
    sure = bool(entry.digest) or all(matches(place.folder / file.name, file) for file in entry.files)
    if place.layout in SLOW:
        content.keep(entry, parts, found, place.folder, sure)
    return parts, sure


def _download(entry: Entry) -> Place:
    """Into the cache, from the data set's own addresses."""
    folder = places.cache() / entry.name
    try:
        for file in entry.files:
            get(file, entry.addresses, folder, check=not entry.digest)
    except Unreachable as error:
        names = ", ".join(file.name for file in entry.files)
        debian = f" (on Debian and Ubuntu: apt install {entry.package})" if entry.package else ""
        raise NotFound(
            f"{entry.name} is not on this machine and could not be downloaded ({error}); put {names} into "
            f"{places.short(folder)}, or name the folder that has them with root={debian}."
        ) from error
    layout = layout_in(folder, entry)
    assert layout is not None
    return Place(folder, layout)


def _digits(entry: Entry) -> dict[str, Raw]:
    """scikit-learn's 1,797 digits, 0 to 16 scaled to 0 to 255; the same fifth of each class is the test part."""
    from sklearn.datasets import load_digits

    found = load_digits()
    pixels = np.rint(found.images * (255 / 16)).astype(np.uint8)[..., None]
    targets = found.target.astype(np.int64)
    tested = stratified((f"digits/{i:05d}" for i in range(len(targets))), targets, TESTED)
    parts = {"train": (pixels[~tested], targets[~tested]), "test": (pixels[tested], targets[tested])}
    if content.digest(parts) != entry.digest:
        raise DataError("scikit-learn's digits are not those that are known; try another version of it.")
    return parts


def _order(entry: Entry, classes: Sequence[str] | None) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Our class numbers -> those of the classes in the order asked for."""
    if classes is None or len(classes) != len(entry.labels) or set(classes) != set(entry.labels):
        if classes is not None and len(classes) != len(entry.labels):
            raise DataError(f"data.class_names gives {len(classes)}, and {entry.name} has {len(entry.labels)}.")
        return np.arange(len(entry.labels))
    return np.array([classes.index(label) for label in entry.labels])
