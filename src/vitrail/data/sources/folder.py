"""A folder of images with one subfolder per class; without labels, images anywhere below the folder.

`train/`, `val/` (`valid/`, `validation/`) and `test/` subfolders are splits. Images in nested
folders belong to the class of the outermost one. Hidden files are ignored. Files without an image
extension and classes without images are skipped, with a note.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vitrail.config import DataConfig
from vitrail.data.sources.base import IMAGE_EXTENSIONS, Sample, SourceSplits
from vitrail.data.sources.packed_strings import PackedStrings
from vitrail.errors import DataError, NotFoundError, did_you_mean

SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
}
"""Usual names of splits -> train, validation or test."""
MAX_EXAMPLES = 3
"""Names listed in a note."""


class FolderSource:
    """Image files; the key is the path relative to the folder."""

    multi_label = False
    pixels = None
    blocks = None

    def __init__(
        self, name: str, root: Path, paths: PackedStrings, targets: npt.NDArray[np.int64], labels: tuple[str, ...]
    ) -> None:
        self.name = name
        self.root = root
        self.paths = paths
        self.targets = targets
        self.labels = labels

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Sample:
        key = self.paths[index]
        return Sample(key, os.path.join(self.root, key), int(self.targets[index]))

    def key(self, index: int) -> str:
        return self.paths[index]


@dataclass
class FolderScan:
    """The contents of one folder of class folders."""

    classes: dict[str, list[str]] = field(default_factory=dict)
    """Class -> paths of its images, relative to the root of the data."""
    non_images: list[str] = field(default_factory=list)
    """Files without an image extension."""
    unclassified: list[str] = field(default_factory=list)
    """Images that are not in a class folder."""

    @property
    def empty_classes(self) -> list[str]:
        return [name for name, paths in self.classes.items() if not paths]

    @property
    def nonempty_classes(self) -> set[str]:
        return {name for name, paths in self.classes.items() if paths}


def open_folder(path: Path, config: DataConfig, *, require_labels: bool = True) -> SourceSplits:
    """Open the splits of a folder of class folders; if not require_labels, also a folder without any."""
    if not path.is_dir():
        raise NotFoundError(f"{path} is a file, expected a folder." if path.exists() else f"no folder {path}.")
    path = Path(os.path.abspath(path))  # the working directory may change; symbolic links are not resolved
    layout = detect_splits(path, require_labels)
    scans = {split: scan(path, folder) for split, folder in layout.items()} or {"train": scan(path, "")}
    if require_labels or _all_classified(scans, config.class_names):
        labels, notes = _resolve_labels(path, scans, config.class_names)
    else:
        scans = {split: _as_unlabeled(found, layout.get(split, "")) for split, found in scans.items()}
        labels, notes = (), ["the images have no labels"]
        if not scans["train"].nonempty_classes:
            raise DataError(f"{path / layout.get('train', '')} contains no images.")
    sources = {}
    for split, found in scans.items():
        folder = layout.get(split, "")
        notes += _notes(found, folder)
        if any(found.classes.values()):
            sources[split] = _source(path, folder, found, labels)
    if layout:
        others = [e.name for e in _subfolders(path) if e.name not in layout.values()]
        if others:
            notes.append(f"skipped {_format_examples(others, 'folder')} next to {layout['train']}/")
    return SourceSplits(sources["train"], sources.get("validation"), sources.get("test"), tuple(notes))


def detect_splits(path: Path, require_labels: bool = True) -> dict[str, str]:
    """train, validation, test -> name of the subfolder; empty if the folder is not divided into splits.

    A class may be called train too: its folder then contains images, or is one of several class
    folders. If not require_labels, a folder of images also counts as a split.
    """
    names = {e.name: SPLIT_NAMES.get(e.name.lower(), "") for e in _subfolders(path)}
    layout = {split: name for name, split in reversed(names.items()) if split}
    if "train" not in layout:
        return {}
    train = path / layout["train"]
    with os.scandir(train) as entries:
        has_images = any(_is_image(e.name) for e in entries)
    has_classes = bool(_subfolders(train)) and not has_images
    among_classes = len(layout) == 1 and any(not split for split in names.values())
    return layout if (has_classes or not require_labels) and not among_classes else {}


def scan(root: Path, folder: str) -> FolderScan:
    """List one folder of class folders, sorted by name."""
    found = FolderScan()
    prefix = f"{folder}/" if folder else ""
    with os.scandir(os.path.join(root, folder)) as entries:
        ordered = sorted(entries, key=lambda e: e.name)
    for entry in ordered:
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            paths = found.classes.setdefault(entry.name, [])
            _collect_files(entry.path, f"{prefix}{entry.name}/", paths, found.non_images, frozenset())
        elif _is_image(entry.name):
            found.unclassified.append(entry.name)
        else:
            found.non_images.append(f"{prefix}{entry.name}")
    return found


def _collect_files(folder: str, prefix: str, images: list[str], non_images: list[str], links: frozenset[str]) -> None:
    """Append the files below a folder to `images` or `non_images`, by name alone. `links`: targets of links above."""
    subfolders, first = [], len(images)
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name
            if name[0] == ".":
                continue
            if entry.is_dir():
                subfolders.append(entry)
            elif _is_image(name):
                images.append(prefix + name)
            else:
                non_images.append(prefix + name)
    images[first:] = sorted(images[first:])
    for entry in sorted(subfolders, key=lambda e: e.name):
        links_below = links
        if entry.is_symlink():  # a link may point to a folder above: skip it
            real = os.path.realpath(entry.path)
            if real in links or f"{os.path.realpath(folder)}{os.sep}".startswith(real + os.sep):
                continue
            links_below = links | {real}
        _collect_files(entry.path, f"{prefix}{entry.name}/", images, non_images, links_below)


def _is_image(name: str) -> bool:
    dot = name.rfind(".")
    return dot > 0 and name[dot:].lower() in IMAGE_EXTENSIONS


def _subfolders(path: Path) -> list[os.DirEntry[str]]:
    with os.scandir(path) as entries:
        return sorted((e for e in entries if e.is_dir() and e.name[0] != "."), key=lambda e: e.name)


def _all_classified(scans: dict[str, FolderScan], given: Sequence[str] | None) -> bool:
    """Whether every image is in the folder of a known class."""
    known = set(given) if given is not None else scans["train"].nonempty_classes
    return bool(scans["train"].nonempty_classes) and all(
        found.nonempty_classes <= known and not found.unclassified for found in scans.values()
    )


def _as_unlabeled(found: FolderScan, folder: str) -> FolderScan:
    """All images as one class without a name."""
    unclassified = [f"{folder}/{name}" if folder else name for name in found.unclassified]
    return FolderScan({"": [*unclassified, *(p for paths in found.classes.values() for p in paths)]}, found.non_images)


def _resolve_labels(
    path: Path, scans: dict[str, FolderScan], given: Sequence[str] | None
) -> tuple[tuple[str, ...], list[str]]:
    """Class names, in order (those given, else the training folders that contain images), and notes."""
    train = scans["train"]
    present = sorted(train.nonempty_classes)
    if not present:
        raise DataError(_no_classes_message(path, train))
    labels = tuple(given) if given is not None else tuple(present)
    for found in scans.values():
        for name, paths in found.classes.items():
            if paths and name not in labels:
                known = "in class_names=" if given is not None else "among the training classes"
                raise DataError(f"{paths[0]} has the class {name!r}, which is not {known}{did_you_mean(name, labels)}")
    absent = [name for name in labels if name not in present]
    return labels, [f"{_format_examples(absent, 'class')} without training images"] if absent else []


def _no_classes_message(path: Path, found: FolderScan) -> str:
    """Why a folder has no classes, and what to try."""
    expected = "expected one folder per class, with its images in it"
    if found.unclassified:
        tables = sorted(n for n in found.non_images if re.search(r"\.(csv|tsv|parquet)$", n.lower()))
        hint = f"; did you mean table:{path / tables[0]}?" if tables else f", such as {path / 'cat'}/1.jpg."
        return f"{path} contains {_format_examples(found.unclassified, 'image')} and no class folders; {expected}{hint}"
    if found.classes:
        folders = _format_examples(list(found.classes), "folder")
        return f"the folders in {path} ({folders}) contain no images; {expected}."
    return f"{path} contains no folders with images; {expected}."


def _notes(found: FolderScan, folder: str) -> list[str]:
    within = f" in {folder}/" if folder else ""
    notes = []
    if found.empty_classes:
        notes.append(f"skipped {_format_examples(found.empty_classes, 'folder')}{within} without images")
    if found.non_images:
        notes.append(f"skipped {_format_examples(found.non_images, 'file')} without an image file extension")
    if found.unclassified:
        notes.append(f"skipped {_format_examples(found.unclassified, 'image')}{within} not in a class folder")
    return notes


def _source(root: Path, folder: str, found: FolderScan, labels: tuple[str, ...]) -> FolderSource:
    class_index = {name: i for i, name in enumerate(labels)}
    counts = [len(paths) for paths in found.classes.values()]
    targets = np.repeat([class_index.get(name, -1) for name in found.classes], counts).astype(np.int64)
    paths = PackedStrings(p for paths in found.classes.values() for p in paths)
    return FolderSource(f"{root.name}{f'/{folder}' if folder else ''}", root, paths, targets, labels)


def _format_examples(names: Sequence[str], noun: str) -> str:
    """`2 files (a, b)`, `12 files (a, b, c, ...)`."""
    plural = noun if len(names) == 1 else f"{noun}es" if noun.endswith("s") else f"{noun}s"
    more = ", ..." if len(names) > MAX_EXAMPLES else ""
    shown = ", ".join(names[:MAX_EXAMPLES]).encode("utf-8", "replace").decode()  # a name may not be valid Unicode
    return f"{len(names):,} {plural} ({shown}{more})"
