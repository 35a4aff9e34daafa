"""A folder of images, one folder for each class; or, where no labels are wanted, images anywhere below it.

`train/`, `val/` (`valid/`, `validation/`) and `test/` inside it are the data's own parts. Folders
inside a class's folder belong to the class. What is hidden is not looked at; what is no image by
its name, and a class without images, is left out and said.
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
from vitrail.errors import DataError, NotFound, nearest

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
"""What people call a part -> which one it is."""
MAX_EXAMPLES = 3
"""So many examples are named in a note."""


class FolderSource:
    """Images as files; the key is the path from the folder on."""

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
    """What lies in one folder of class folders."""

    classes: dict[str, list[str]] = field(default_factory=dict)
    """Paths of each class's images, from the data's root on."""
    non_images: list[str] = field(default_factory=list)
    """Files that are no images by their names."""
    unclassified: list[str] = field(default_factory=list)
    """Images that are in no class's folder."""

    @property
    def empty_classes(self) -> list[str]:
        return [name for name, paths in self.classes.items() if not paths]

    @property
    def nonempty_classes(self) -> set[str]:
        """Classes with images."""
        return {name for name, paths in self.classes.items() if paths}


def open_folder(path: Path, config: DataConfig, *, require_labels: bool = True) -> SourceSplits:
    """The parts of a folder of class folders; without `labeled` also of one that has none."""
    if not path.is_dir():
        raise NotFound(f"there is no folder {path}" + (", it is a file." if path.exists() else "."))
    path = Path(os.path.abspath(path))  # a program may change its folder; links stay what they are
    layout = detect_splits(path, require_labels)
    found = {part: scan(path, folder) for part, folder in layout.items()} or {"train": scan(path, "")}
    if require_labels or _all_classified(found, config.class_names):
        labels, notes = _resolve_labels(path, found, config.class_names)
    else:
        found = {part: _as_unlabeled(here, layout.get(part, "")) for part, here in found.items()}
        labels, notes = (), ["the images have no labels"]
        if not found["train"].nonempty_classes:
            raise DataError(f"{path / layout.get('train', '')} holds no images.")
    sources = {}
    for part, here in found.items():
        where = layout.get(part, "")
        notes += _notes(here, where)
        if any(here.classes.values()):
            sources[part] = _source(path, where, here, labels)
    if layout:
        others = [e.name for e in _subfolders(path) if e.name not in layout.values()]
        if others:
            notes.append(f"{_format_examples(others, 'folder')} beside {layout['train']}/ left out")
    return SourceSplits(sources["train"], sources.get("validation"), sources.get("test"), tuple(notes))


def detect_splits(path: Path, require_labels: bool = True) -> dict[str, str]:
    """train, validation, test -> the folder's own name for it; empty where it has no such parts.

    A class may be called train too: then it holds images, or stands among classes alone.
    Where no labels are wanted, a folder that holds images is a part as well.
    """
    names = {e.name: SPLIT_NAMES.get(e.name.lower(), "") for e in _subfolders(path)}
    layout = {part: name for name, part in reversed(names.items()) if part}
    if "train" not in layout:
        return {}
    inside = path / layout["train"]
    with os.scandir(inside) as entries:
        images = any(_is_image(e.name) for e in entries)
    classes = bool(_subfolders(inside)) and not images
    alone = len(layout) == 1 and any(not part for part in names.values())
    return layout if (classes or not require_labels) and not alone else {}


def scan(root: Path, part: str) -> FolderScan:
    """Everything in one folder of class folders, in the order of the names."""
    top = os.path.join(root, part)
    found = FolderScan()
    prefix = f"{part}/" if part else ""
    with os.scandir(top) as entries:
        inside = sorted(entries, key=lambda e: e.name)
    for entry in inside:
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


def _collect_files(folder: str, prefix: str, images: list[str], non_images: list[str], above: frozenset[str]) -> None:
    """Images in a folder and in those inside it; no file is asked for anything but its name and kind."""
    inner, first = [], len(images)
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name
            if name[0] == ".":
                continue
            if entry.is_dir():
                inner.append(entry)
            elif _is_image(name):
                images.append(prefix + name)
            else:
                non_images.append(prefix + name)
    images[first:] = sorted(images[first:])
    for entry in sorted(inner, key=lambda e: e.name):
        passed = above
        if entry.is_symlink():  # a link may lead back to where we are
            real = os.path.realpath(entry.path)
            if real in above or f"{os.path.realpath(folder)}{os.sep}".startswith(real + os.sep):
                continue
            passed = above | {real}
        _collect_files(entry.path, f"{prefix}{entry.name}/", images, non_images, passed)


def _is_image(name: str) -> bool:
    point = name.rfind(".")
    return point > 0 and name[point:].lower() in IMAGE_EXTENSIONS


def _subfolders(path: Path) -> list[os.DirEntry[str]]:
    with os.scandir(path) as entries:
        return sorted((e for e in entries if e.is_dir() and e.name[0] != "."), key=lambda e: e.name)


def _all_classified(found: dict[str, FolderScan], given: Sequence[str] | None) -> bool:
    """Whether every image is in the folder of a class that can be learned."""
    known = set(given) if given is not None else found["train"].nonempty_classes
    return bool(found["train"].nonempty_classes) and all(
        here.nonempty_classes <= known and not here.unclassified for here in found.values()
    )


def _as_unlabeled(found: FolderScan, part: str) -> FolderScan:
    """The same images, wherever they are, as what has no name."""
    loose = [f"{part}/{name}" if part else name for name in found.unclassified]
    return FolderScan({"": [*loose, *(p for paths in found.classes.values() for p in paths)]}, found.non_images)


def _resolve_labels(
    path: Path, found: dict[str, FolderScan], given: Sequence[str] | None
) -> tuple[tuple[str, ...], list[str]]:
    """The classes, in order: those asked for, else the training part's folders that hold images."""
    train = found["train"]
    there = sorted(name for name, paths in train.classes.items() if paths)
    if not there:
        raise DataError(_no_classes_message(path, train))
    labels = tuple(given) if given is not None else tuple(there)
    for here in found.values():
        for name, paths in here.classes.items():
            if paths and name not in labels:
                known = "named by class_names=" if given is not None else "that can be learned"
                raise DataError(f"{paths[0]} is of the class {name!r}, which is none {known}{nearest(name, labels)}")
    absent = [name for name in labels if name not in there]
    return labels, [f"{_format_examples(absent, 'class')} without images to learn from"] if absent else []


def _no_classes_message(path: Path, found: FolderScan) -> str:
    """Why a folder cannot be learned from, and what to try."""
    wanted = "wanted one folder for each class with its images in it"
    if found.unclassified:
        tables = sorted(n for n in found.non_images if re.search(r"\.(csv|tsv|parquet)$", n.lower()))
        hint = f"; or is table:{path / tables[0]} what you mean?" if tables else f", such as {path / 'cat'}/1.jpg."
        return f"{path} holds {_format_examples(found.unclassified, 'image')} and no class folders; {wanted}{hint}"
    if found.classes:
        return f"the folders in {path} ({_format_examples(list(found.classes), 'folder')}) hold no images; {wanted}."
    return f"{path} holds no folders with images; {wanted}."


def _notes(found: FolderScan, where: str) -> list[str]:
    beside = f" in {where}/" if where else ""
    notes = []
    if found.empty_classes:
        notes.append(f"{_format_examples(found.empty_classes, 'folder')}{beside} without images left out")
    if found.non_images:
        notes.append(f"{_format_examples(found.non_images, 'file')} left out: by the name no image")
    if found.unclassified:
        notes.append(f"{_format_examples(found.unclassified, 'image')}{beside} left out: in no class's folder")
    return notes


def _source(root: Path, part: str, found: FolderScan, labels: tuple[str, ...]) -> FolderSource:
    place = {name: i for i, name in enumerate(labels)}
    counts = [len(paths) for paths in found.classes.values()]
    numbers = np.repeat([place.get(name, -1) for name in found.classes], counts).astype(np.int64)
    paths = PackedStrings(p for paths in found.classes.values() for p in paths)
    return FolderSource(f"{root.name}{f'/{part}' if part else ''}", root, paths, numbers, labels)


def _format_examples(names: Sequence[str], what: str) -> str:
    """`2 files (a, b)`, `12 files (a, b, c, ...)`."""
    plural = what if len(names) == 1 else f"{what}es" if what.endswith("s") else f"{what}s"
    more = ", ..." if len(names) > MAX_EXAMPLES else ""
    shown = ", ".join(names[:MAX_EXAMPLES]).encode("utf-8", "replace").decode()  # a name may be no Unicode
    return f"{len(names):,} {plural} ({shown}{more})"
