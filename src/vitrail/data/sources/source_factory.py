"""From a config to images: to learn from, to measure on, to test on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.config import DataConfig
from vitrail.data.sources import shards
from vitrail.data.sources.base import Source, SourceSplits, Splits
from vitrail.data.sources.builtin import open_builtin
from vitrail.data.sources.duplicates import describe_duplicates
from vitrail.data.sources.folder import FolderSource, open_folder
from vitrail.data.sources.holdout import group_names, hold_out, hold_out_stratified
from vitrail.data.sources.shard_index import load_indexes
from vitrail.data.sources.source_spec import TABLE_EXTENSIONS, parse_source
from vitrail.data.sources.stream import LIMITATIONS, ShardStream
from vitrail.data.sources.subset import Subset
from vitrail.data.sources.table import PathSource, find_parquet_files, open_table, order_splits, split_from_name
from vitrail.errors import ConfigError, DataError, NotFound
from vitrail.runtime import warn_once

DEFAULT_HELD_OUT = 0.1
"""Of the training images, kept aside where nothing else can be measured on."""


def open_data(config: DataConfig, *, require_labels: bool = True) -> Splits:
    """The data that a config names, split as it says; what was chosen or found is said aloud.

    Measured on, in this order: another source (`validation`), a share of the training images
    (`held_out`), the data's own validation part, its test part, a tenth of the training images.
    labeled: refuse a folder or a table that has no labels.
    """
    if config.validation is not None and config.held_out is not None:
        raise ConfigError(
            f"validation={config.validation!r} and held_out={config.held_out} both say what to measure on; give one."
        )
    parts = open_source_splits(config, require_labels=require_labels)
    splits = _choose_splits(parts, config, require_labels)
    notes = [*splits.notes, *_describe_duplicates(splits)]
    warn_once(notes, about=config.source)
    return Splits(splits.train, splits.validation, splits.test, splits.eval_split, tuple(notes))


def open_source_splits(config: DataConfig, *, require_labels: bool = True) -> SourceSplits:
    """What a source offers by itself; `evaluation_source` is what an evaluation reads."""
    spec = parse_source(config.source)
    if spec.kind == "builtin":
        return open_builtin(spec.location, config)
    if spec.kind == "folder":
        return open_folder(Path(spec.location), config, require_labels=require_labels)
    if spec.kind == "table":
        return open_table(
            _find_tables(spec.location), config, Path(spec.location).resolve().stem, require_labels=require_labels
        )
    if spec.kind == "shards":
        return shards.open_shards(spec.location, config)
    if spec.kind == "stream":
        return _open_stream(spec.location, config)
    from vitrail.data.sources.hub import open_hub  # imports much that is of no use without it

    return open_hub(spec.location, config, require_labels=require_labels)


def _choose_splits(parts: SourceSplits, config: DataConfig, require_labels: bool) -> Splits:
    notes = parts.notes
    if config.validation is not None:
        other = _open_validation(config, parts.train, require_labels)
        return Splits(parts.train, other, parts.test, "validation", notes)
    if isinstance(parts.train, ShardStream) and (config.held_out is not None or not parts.has_eval_split):
        raise DataError(
            f"nothing can be held out of {config.source}, since a stream cannot be reached into; "
            "name what to measure on with validation=."
        )
    if config.held_out is None and parts.validation is not None:
        return Splits(parts.train, parts.validation, parts.test, "validation", notes)
    if config.held_out is None and parts.test is not None:
        return Splits(parts.train, parts.test, parts.test, "test", notes)
    train, held, said = _hold_out(parts, config)
    test = parts.test if parts.test is not None else parts.validation
    return Splits(train, held, test, "held out", (*notes, *said))


def _hold_out(parts: SourceSplits, config: DataConfig) -> tuple[Subset, Subset, list[str]]:
    """The training images in two, by a hash of their keys or of their groups' names."""
    source: Source = parts.train
    share = config.held_out if config.held_out is not None else DEFAULT_HELD_OUT
    groups = parts.groups
    if groups is None and config.groups is not None:
        groups = group_names(_keys(source), config.groups)
    notes: list[str] = []
    # Images without labels are as good as one class, of which something has to be held out.
    targets = source.targets if source.labels else np.zeros(len(source), np.int64)
    if parts.stratify and groups is None:
        mask = hold_out_stratified(_keys(source), targets, share)
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
    train = Subset(source, np.flatnonzero(~mask), f"{source.name}, but those held out")
    return train, Subset(source, np.flatnonzero(mask), f"{source.name}, held out"), [said, *notes]


def _open_validation(config: DataConfig, train: Any, require_labels: bool) -> Source:
    """What `validation` names, with the classes of what is learned from."""
    assert config.validation is not None
    classes = list(train.labels) if require_labels else None
    other = config.replace(source=config.validation, validation=None, class_names=classes, groups=None, held_out=None)
    parts = open_source_splits(other, require_labels=require_labels)
    found: Source = parts.validation if parts.validation is not None else parts.evaluation_source
    if isinstance(found, ShardStream):
        raise DataError(
            f"{config.validation} is a stream, which cannot be measured on; try shards: instead of stream:."
        )
    if require_labels and found.multi_label != train.multi_label:
        several, one = (config.source, config.validation) if train.multi_label else (config.validation, config.source)
        raise DataError(f"{several} has several labels to an image and {one} has one; wanted the same of both.")
    return found


def _describe_duplicates(splits: Splits) -> list[str]:
    """Images that are learned from and measured on."""
    if isinstance(splits.train, ShardStream):
        return []
    measured = [splits.validation]
    if splits.test is not None and splits.test is not splits.validation:
        measured.append(splits.test)
    return [note for part in measured for note in describe_duplicates(splits.train, part)]


def _keys(source: Source) -> Iterable[str]:
    """All keys, in order."""
    if isinstance(source, FolderSource | PathSource):
        return source.paths  # the quick way
    return (source.key(i) for i in range(len(source)))


def _find_tables(what: str) -> dict[str, list[Path]]:
    """Part -> files: a table, a folder of Parquet files, or a pattern."""
    path = Path(what)
    if path.is_dir():
        found = find_parquet_files(path)
    elif "*" in what or "{" in what:
        files = [Path(p) for p in shards.find_shards(what)]
        by_part: dict[str, list[Path]] = {}
        for file in files:
            by_part.setdefault(split_from_name(file.name), []).append(file)
        found = order_splits(by_part)
    else:
        found = {"train": [path]}
    if not found.get("train"):
        raise NotFound(f"{what} holds no tables; wanted {', '.join(TABLE_EXTENSIONS[:3])}.")
    kinds = {file.suffix.lower() for files in found.values() for file in files}
    if not kinds <= set(TABLE_EXTENSIONS):
        raise DataError(f"{what} is no table; wanted a name that ends in {', '.join(TABLE_EXTENSIONS[:3])}.")
    if len(kinds - {".parquet", ".pq"}) and sum(map(len, found.values())) > 1:
        raise DataError(
            f"{what} are several tables of text; join them into one, with a column `split` if they are parts."
        )
    return found


def _open_stream(what: str, config: DataConfig) -> SourceSplits:
    """Shards without an index; those of the other parts have one, since they are measured on."""
    parts = shards.group_by_split(shards.find_shards(what))
    names = config.class_names or shards.read_class_names(parts["train"][0])
    others: dict[str, Source] = {}
    for part in ("validation", "test"):
        if part in parts:
            indexes = load_indexes(parts[part])
            others[part] = shards.ShardSource(f"{shards.display_name(what)}/{part}", indexes, config, names, None)
            names = names or others[part].labels
    if names is None and config.validation is not None:
        names = open_source_splits(config.replace(source=config.validation, validation=None)).evaluation_source.labels
    if names is None:
        raise DataError(
            f"the classes of {what} are not known, and a stream cannot be looked through for them; "
            f"put {shards.CLASS_NAMES_FILE} beside the shards, or name them with data.class_names=."
        )
    stream = ShardStream(shards.display_name(what), parts["train"], names, config)
    return SourceSplits(stream, others.get("validation"), others.get("test"), (LIMITATIONS,))
