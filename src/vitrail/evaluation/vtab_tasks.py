"""VTAB-1k (arXiv 1910.04867): 19 tasks in three groups, each with 1,000 images for training and validation.

Hyperparameters are selected with 800 training and 200 validation images; the final model is trained on all 1,000 and
measured on the whole test split. A task is a folder of its name, or of an alias, in any of these layouts:

    train800.txt val200.txt test.txt       `path label` on each line, as in the published lists
    train800/ val200/ test/                folders of class folders
    train/ [val/] test/                    folders, a table or shards; the 1,000 are sampled by a hash of their names

or a data set of the catalog.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitrail.config import DataConfig
from vitrail.data.sources import open_source_splits
from vitrail.data.sources.base import Source
from vitrail.data.sources.builtin import find_dataset
from vitrail.data.sources.catalog import CATALOG
from vitrail.data.sources.folder import FolderSource
from vitrail.data.sources.holdout import hash_names
from vitrail.data.sources.packed_strings import PackedStrings
from vitrail.data.sources.subset import Subset
from vitrail.errors import DataError, NotFoundError, did_you_mean
from vitrail.evaluation.intervals import Estimate, mean_of_proportions
from vitrail.runtime import warn_once

GROUPS = ("Natural", "Specialized", "Structured")
NUM_TRAIN, NUM_VALIDATION = 800, 200


@dataclass(frozen=True)
class Task:
    """One of the 19 tasks."""

    name: str
    title: str
    group: str
    aliases: tuple[str, ...] = ()
    """Other names of its folder."""


TASKS = {
    task.name: task
    for task in (
        Task("caltech101", "Caltech101", "Natural"),
        Task("cifar100", "CIFAR-100", "Natural", ("cifar",)),
        Task("dtd", "DTD", "Natural"),
        Task("flowers102", "Flowers102", "Natural", ("oxford_flowers102",)),
        Task("pets", "Pets", "Natural", ("oxford_iiit_pet",)),
        Task("svhn", "SVHN", "Natural"),
        Task("sun397", "Sun397", "Natural"),
        Task("patch_camelyon", "Patch Camelyon", "Specialized", ("pcam",)),
        Task("eurosat", "EuroSAT", "Specialized"),
        Task("resisc45", "Resisc45", "Specialized"),
        Task("retinopathy", "Retinopathy", "Specialized", ("diabetic_retinopathy",)),
        Task("clevr_count", "Clevr/count", "Structured"),
        Task("clevr_distance", "Clevr/distance", "Structured", ("clevr_dist",)),
        Task("dmlab", "DMLab", "Structured"),
        Task("kitti_distance", "KITTI/distance", "Structured", ("kitti",)),
        Task("dsprites_location", "dSprites/location", "Structured", ("dsprites_loc",)),
        Task("dsprites_orientation", "dSprites/orientation", "Structured", ("dsprites_ori",)),
        Task("smallnorb_azimuth", "SmallNORB/azimuth", "Structured", ("smallnorb_azi",)),
        Task("smallnorb_elevation", "SmallNORB/elevation", "Structured", ("smallnorb_ele",)),
    )
}


@dataclass(frozen=True)
class TaskData:
    """The splits of a task."""

    train: Source
    """800 training images."""
    validation: Source
    """200 validation images, to select hyperparameters; the final model is trained on both."""
    test: Source


def select_tasks(texts: Sequence[str]) -> tuple[Task, ...]:
    """Tasks by name or title, in VTAB's order; all tasks for an empty sequence."""
    known = {_normalize_name(name): task for task in TASKS.values() for name in (task.name, task.title, *task.aliases)}
    for text in texts:
        if _normalize_name(text) not in known:
            raise NotFoundError(f"unknown VTAB task {text!r}{did_you_mean(text, TASKS)}")
    expected = {known[_normalize_name(text)].name for text in texts} or set(TASKS)
    return tuple(task for name, task in TASKS.items() if name in expected)


def locate_tasks(root: Path, tasks: Sequence[Task]) -> dict[str, str]:
    """Task name -> its data, for the tasks that are found: a folder in `root`, or a name in the catalog."""
    if not root.is_dir():
        raise NotFoundError(f"there is no folder {root}; expected one that contains a folder for each task of VTAB.")
    folders = {
        _normalize_name(path.name): path for path in sorted(root.iterdir()) if path.is_dir() and any(path.iterdir())
    }
    found = {}
    for task in tasks:
        for name in (task.name, task.title, *task.aliases):
            if folder := folders.get(_normalize_name(name)):
                found[task.name] = str(folder)
                break
        else:
            entry = CATALOG.get(task.name)
            if entry is not None and find_dataset(entry, str(root)) is not None:
                found[task.name] = task.name
    return found


def open_task(task: Task, where: str, root: Path) -> TaskData:
    """Open the three splits of a task."""
    folder = Path(where)
    if (folder / "train800.txt").exists():
        return _open_lists(task, folder)
    if (folder / "train800").is_dir():
        first = open_source_splits(DataConfig(source=f"folder:{folder / 'train800'}")).train
        config = DataConfig(class_names=first.labels)
        rest = [
            open_source_splits(config.replace(source=f"folder:{folder / part}")).train for part in ("val200", "test")
        ]
        return TaskData(first, rest[0], rest[1])
    parts = open_source_splits(DataConfig(source=where, root=str(root)))
    test = parts.test if parts.test is not None else parts.validation
    if test is None:
        raise DataError(f"{task.title}: {where} has no test split; expected train and test in it.")
    if hasattr(parts.train, "samples"):
        raise DataError(f"{task.title}: {where} is a stream, which cannot be sampled from; try shards:.")
    validation = parts.validation if parts.test is not None else None
    return TaskData(*sample_train_validation(parts.train, validation, task), test)


def sample_train_validation(train: Source, validation: Source | None, task: Task) -> tuple[Source, Source]:
    """800 and 200 images, sampled by a hash of their names; with fewer than 1,000 images, four fifths and one fifth."""
    order = np.argsort(_key_hashes(train), kind="stable")
    if validation is not None:
        second = np.argsort(_key_hashes(validation), kind="stable")
        sizes = min(NUM_TRAIN, len(train)), min(NUM_VALIDATION, len(validation))
        parts = Subset(train, np.sort(order[: sizes[0]])), Subset(validation, np.sort(second[: sizes[1]]))
    else:
        count = min(NUM_TRAIN + NUM_VALIDATION, len(train))
        sizes = count - count // 5, count // 5
        parts = Subset(train, np.sort(order[: sizes[0]])), Subset(train, np.sort(order[sizes[0] : count]))
    if min(sizes) == 0:
        raise DataError(f"{task.title} has {len(train):,} training images, too few for a validation split.")
    if sizes != (NUM_TRAIN, NUM_VALIDATION):
        used = f"{sizes[0]} for training, {sizes[1]} for validation"
        warn_once([f"{task.title} has {sum(sizes):,} images, not 1,000: {used}"])
    return parts


def _open_lists(task: Task, folder: Path) -> TaskData:
    """Open the published lists."""
    lists = {name: _read_list(folder / f"{name}.txt", task) for name in ("train800", "val200", "test")}
    numbers = sorted({number for lines in lists.values() for _, number in lines})
    labels = tuple(str(n) for n in range(numbers[-1] + 1))

    def source(name: str) -> Source:
        lines = lists[name]
        targets = np.array([number for _, number in lines], np.int64)
        return FolderSource(f"{task.title}/{name}", folder, PackedStrings([path for path, _ in lines]), targets, labels)

    return TaskData(source("train800"), source("val200"), source("test"))


def _read_list(path: Path, task: Task) -> list[tuple[str, int]]:
    if not path.exists():
        raise NotFoundError(f"{task.title}: {path} is missing; expected it next to train800.txt.")
    found = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        name, _, label = line.strip().rpartition(" ")
        if not line.strip():
            continue
        if not name or not label.isdecimal():
            raise DataError(f"{path} line {number} is {line!r}; expected a path, a space and a class index.")
        found.append((name, int(label)))
    if not found:
        raise DataError(f"{path} lists no images.")
    return found


def group_means(scores: Mapping[str, tuple[float, int]]) -> dict[str, Estimate]:
    """Mean accuracy of each group whose tasks are all present; and "VTAB", the mean over all 19 tasks, if present.

    `scores` maps a task's name to its accuracy and its number of test images.
    """
    found = {}
    for group in GROUPS:
        tasks = [name for name, task in TASKS.items() if task.group == group]
        if all(name in scores for name in tasks):
            found[group] = mean_of_proportions([scores[name] for name in tasks])
    if all(name in scores for name in TASKS):
        found["VTAB"] = mean_of_proportions([scores[name] for name in TASKS])
    return found


def _key_hashes(source: Source) -> np.ndarray:
    return hash_names(source.key(i) for i in range(len(source)))


def _normalize_name(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
