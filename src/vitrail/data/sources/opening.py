"""From a config to images: to learn from, to measure on, to test on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.config import DataConfig
from vitrail.data.sources import shards
from vitrail.data.sources.base import Parts, Source, Splits
from vitrail.data.sources.builtin import open_builtin
from vitrail.data.sources.duplicates import note_shared
from vitrail.data.sources.folder import Folder, open_folder
from vitrail.data.sources.index import index_all
from vitrail.data.sources.part import Part
from vitrail.data.sources.spec import TABLES, parse
from vitrail.data.sources.split import groups_of, hold_out, stratified
from vitrail.data.sources.stream import PROMISE, Stream
from vitrail.data.sources.table import Paths, files_in, in_order, open_table, part_of
from vitrail.errors import ConfigError, DataError, NotFound
from vitrail.runtime import say

SHARE = 0.1
"""Of the training images, kept aside where nothing else can be measured on."""


def open_data(config: DataConfig, *, labeled: bool = True) -> Splits:
    """The data that a config names, split as it says; what was chosen or found is said aloud.

    Measured on, in this order: another source (`validation`), a share of the training images
    (`held_out`), the data's own validation part, its test part, a tenth of the training images.
    labeled: refuse a folder or a table that has no labels.
    """
    if config.validation is not None and config.held_out is not None:
        raise ConfigError(
            f"validation={config.validation!r} and held_out={config.held_out} both say what to measure on; give one."
        )
    parts = open_parts(config, labeled=labeled)
    splits = _split(parts, config, labeled)
    notes = [*splits.notes, *_shared(splits)]
    say(notes, about=config.source)
    return Splits(splits.train, splits.validation, splits.test, splits.measured_on, tuple(notes))


def open_parts(config: DataConfig, *, labeled: bool = True) -> Parts:
    """What a source offers by itself; `parts.measured` is what an evaluation reads."""
    spec = parse(config.source)
    if spec.kind == "builtin":
        return open_builtin(spec.what, config)
    if spec.kind == "folder":
        return open_folder(Path(spec.what), config, labeled=labeled)
    if spec.kind == "table":
        return open_table(_tables(spec.what), config, Path(spec.what).resolve().stem, labeled=labeled)
    if spec.kind == "shards":
        return shards.open_shards(spec.what, config)
    if spec.kind == "stream":
        return _stream(spec.what, config)
    from vitrail.data.sources.hub import open_hub  # imports much that is of no use without it

    return open_hub(spec.what, config, labeled=labeled)


def _split(parts: Parts, config: DataConfig, labeled: bool) -> Splits:
    notes = parts.notes
    if config.validation is not None:
        other = _other(config, parts.train, labeled)
        return Splits(parts.train, other, parts.test, "validation", notes)
    if isinstance(parts.train, Stream) and (config.held_out is not None or not parts.split):
        raise DataError(
            f"nothing can be held out of {config.source}, since a stream cannot be reached into; "
            "name what to measure on with validation=."
        )
    if config.held_out is None and parts.validation is not None:
        return Splits(parts.train, parts.validation, parts.test, "validation", notes)
    if config.held_out is None and parts.test is not None:
        return Splits(parts.train, parts.test, parts.test, "test", notes)
    train, held, said = _held_out(parts, config)
    test = parts.test if parts.test is not None else parts.validation
    return Splits(train, held, test, "held out", (*notes, *said))


def _held_out(parts: Parts, config: DataConfig) -> tuple[Part, Part, list[str]]:
    """The training images in two, by a hash of their keys or of their groups' names."""
    source: Source = parts.train
    share = config.held_out if config.held_out is not None else SHARE
    groups = parts.groups
    if groups is None and config.groups is not None:
        groups = groups_of(_keys(source), config.groups)
    notes: list[str] = []
    # Images without labels are as good as one class, of which something has to be held out.
    targets = source.targets if source.labels else np.zeros(len(source), np.int64)
    if parts.exact and groups is None:
        mask = stratified(_keys(source), targets, share)
    else:
        mask, notes = hold_out(_keys(source), targets, share, source.labels, groups)
        notes = notes if source.labels else []
    if not mask.any():
        raise DataError(
            f"nothing of {config.source} can be held out: {'; '.join(notes) or 'too few images'}; "
            "name what to measure on with validation=."
        )
    said = f"{np.count_nonzero(mask):,} of {len(mask):,} images are held out to measure on, by a hash of "
    said += "their groups' names" if groups is not None else "their names"
    train = Part(source, np.flatnonzero(~mask), f"{source.name}, but those held out")
    return train, Part(source, np.flatnonzero(mask), f"{source.name}, held out"), [said, *notes]


def _other(config: DataConfig, train: Any, labeled: bool) -> Source:
    """What `validation` names, with the classes of what is learned from."""
    assert config.validation is not None
    classes = list(train.labels) if labeled else None
    other = config.replace(source=config.validation, validation=None, num_classes=classes, groups=None, held_out=None)
    parts = open_parts(other, labeled=labeled)
    found: Source = parts.validation if parts.validation is not None else parts.measured
    if isinstance(found, Stream):
        raise DataError(
            f"{config.validation} is a stream, which cannot be measured on; try shards: instead of stream:."
        )
    if labeled and found.multi_label != train.multi_label:
        several, one = (config.source, config.validation) if train.multi_label else (config.validation, config.source)
        raise DataError(f"{several} has several labels to an image and {one} has one; wanted the same of both.")
    return found


def _shared(splits: Splits) -> list[str]:
    """Images that are learned from and measured on."""
    if isinstance(splits.train, Stream):
        return []
    measured = [splits.validation]
    if splits.test is not None and splits.test is not splits.validation:
        measured.append(splits.test)
    return [note for part in measured for note in note_shared(splits.train, part)]


def _keys(source: Source) -> Iterable[str]:
    """All keys, in order."""
    if isinstance(source, Folder | Paths):
        return source.paths  # the quick way
    return (source.key(i) for i in range(len(source)))


def _tables(what: str) -> dict[str, list[Path]]:
    """Part -> files: a table, a folder of Parquet files, or a pattern."""
    path = Path(what)
    if path.is_dir():
        found = files_in(path)
    elif "*" in what or "{" in what:
        files = [Path(p) for p in shards.find(what)]
        by_part: dict[str, list[Path]] = {}
        for file in files:
            by_part.setdefault(part_of(file.name), []).append(file)
        found = in_order(by_part)
    else:
        found = {"train": [path]}
    if not found.get("train"):
        raise NotFound(f"{what} holds no tables; wanted {', '.join(TABLES[:3])}.")
    kinds = {file.suffix.lower() for files in found.values() for file in files}
    if not kinds <= set(TABLES):
        raise DataError(f"{what} is no table; wanted a name that ends in {', '.join(TABLES[:3])}.")
    if len(kinds - {".parquet", ".pq"}) and sum(map(len, found.values())) > 1:
        raise DataError(
            f"{what} are several tables of text; join them into one, with a column `split` if they are parts."
        )
    return found


def _stream(what: str, config: DataConfig) -> Parts:
    """Shards without an index; those of the other parts have one, since they are measured on."""
    parts = shards.parts_of(shards.find(what))
    names = config.class_names or shards.class_names(parts["train"][0])
    others: dict[str, Source] = {}
    for part in ("validation", "test"):
        if part in parts:
            indexes = index_all(parts[part])
            others[part] = shards.Shards(f"{shards.title(what)}/{part}", indexes, config, names, None)
            names = names or others[part].labels
    if names is None and config.validation is not None:
        names = open_parts(config.replace(source=config.validation, validation=None)).measured.labels
    if names is None:
        raise DataError(
            f"the classes of {what} are not known, and a stream cannot be looked through for them; "
            f"put {shards.CLASSES} beside the shards, or name them with data.class_names=."
        )
    stream = Stream(shards.title(what), parts["train"], names, config)
    return Parts(stream, others.get("validation"), others.get("test"), (PROMISE,))
