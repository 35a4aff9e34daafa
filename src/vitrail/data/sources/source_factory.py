"""Open the source that a config names and choose its training, validation and test splits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.config import DataConfig
from vitrail.data.sources import shards
from vitrail.data.sources.base import Source, SourceSplits, Splits
from vitrail.data.sources.builtin import open_builtin
from vitrail.data.sources.dataset import splits_from
from vitrail.data.sources.duplicates import describe_duplicates
from vitrail.data.sources.folder import FolderSource, open_folder
from vitrail.data.sources.holdout import group_names, hold_out, hold_out_stratified, select_range
from vitrail.data.sources.shard_index import load_indexes
from vitrail.data.sources.source_spec import KINDS, TABLE_EXTENSIONS, parse_source
from vitrail.data.sources.stream import LIMITATIONS, ShardStream
from vitrail.data.sources.subset import Subset
from vitrail.data.sources.table import PathSource, find_parquet_files, open_table, order_splits, split_from_name
from vitrail.errors import ConfigError, DataError, NotFoundError
from vitrail.plugins import load_plugin, plugin_errors
from vitrail.runtime import warn_once

DEFAULT_HELD_OUT = 0.1
"""Fraction of the training images held out if the source has no validation or test split."""


def open_data(config: DataConfig, *, require_labels: bool = True, source_splits: SourceSplits | None = None) -> Splits:
    """Open the data that a config names and choose its splits. Remarks are logged.

    The validation split is the first of: the source that `validation` names, a fraction of the
    training images (`held_out`), the source's own validation split, its test split, a tenth of the
    training images.
    require_labels: raise DataError for a folder or a table without labels.
    source_splits: the data itself, for a config that has no more than its name.
    """
    if config.validation is not None and config.held_out is not None:
        raise ConfigError(
            f"validation={config.validation!r} and held_out={config.held_out} both define the validation split; "
            "give one of them."
        )
    source_splits = source_splits or open_source_splits(config, require_labels=require_labels)
    splits = _choose_splits(source_splits, config, require_labels)
    if config.fraction is not None:
        splits = replace(splits, train=_select_fraction(splits.train, config))
    notes = [*splits.notes, *_describe_duplicates(splits)]
    warn_once(notes, about=config.source)
    return Splits(splits.train, splits.validation, splits.test, splits.eval_split, tuple(notes))


def open_source_splits(config: DataConfig, *, require_labels: bool = True) -> SourceSplits:
    """Open the splits that a source defines itself; `.evaluation_source` is the one to evaluate on."""
    spec = parse_source(config.source)
    if spec.kind == "builtin":
        return open_builtin(spec.location, config)
    if spec.kind == "folder":
        return open_folder(Path(spec.location), config, require_labels=require_labels)
    if spec.kind == "table":
        name = Path(spec.location).resolve().stem
        return open_table(_find_tables(spec.location), config, name, require_labels=require_labels)
    if spec.kind == "shards":
        return shards.open_shards(spec.location, config)
    if spec.kind == "stream":
        return _open_stream(spec.location, config)
    if spec.kind == "memory":
        raise DataError(f"{config.source} was a dataset in memory; pass it again with data=.")
    if spec.kind not in KINDS:
        with plugin_errors("sources", spec.kind):
            return splits_from(load_plugin("sources", spec.kind)(spec.location), config.source)
    from vitrail.data.sources.hub_dataset import open_hub  # slow to import

    return open_hub(spec.location, config, require_labels=require_labels)


def _choose_splits(splits: SourceSplits, config: DataConfig, require_labels: bool) -> Splits:
    notes = splits.notes
    if config.validation is not None:
        other = _open_validation(config, splits.train, require_labels)
        return Splits(splits.train, other, splits.test, "validation", notes)
    if isinstance(splits.train, ShardStream) and (config.held_out is not None or not splits.has_eval_split):
        raise DataError(
            f"no images of {config.source} can be held out, because a stream has no random access; "
            "give a validation source with validation=."
        )
    if config.held_out is None and splits.validation is not None:
        return Splits(splits.train, splits.validation, splits.test, "validation", notes)
    if config.held_out is None and splits.test is not None:
        return Splits(splits.train, splits.test, splits.test, "test", notes)
    train, held_out, remarks = _hold_out(splits, config)
    test = splits.test if splits.test is not None else splits.validation
    return Splits(train, held_out, test, "held out", (*notes, *remarks))


def _hold_out(splits: SourceSplits, config: DataConfig) -> tuple[Subset, Subset, list[str]]:
    """Split the training images in two by a hash of their keys or group names: (train, held out, notes)."""
    source: Source = splits.train
    fraction = config.held_out if config.held_out is not None else DEFAULT_HELD_OUT
    groups = splits.groups
    if groups is None and config.groups is not None:
        groups = group_names(_keys(source), config.groups)
    notes: list[str] = []
    # Images without labels count as one class, so that at least one of them is held out.
    targets = source.targets if source.labels else np.zeros(len(source), np.int64)
    if splits.stratify and groups is None:
        mask = hold_out_stratified(_keys(source), targets, fraction)
    else:
        mask, notes = hold_out(_keys(source), targets, fraction, source.labels, groups)
        notes = notes if source.labels else []
    if not mask.any():
        raise DataError(
            f"no images of {config.source} can be held out: {'; '.join(notes) or 'too few images'}; "
            "give a validation source with validation=."
        )
    note = f"{np.count_nonzero(mask):,} of {len(mask):,} images are held out for validation, by a hash of their "
    note += "group names" if groups is not None else "names"
    train = Subset(source, np.flatnonzero(~mask), f"{source.name}, without those held out")
    return train, Subset(source, np.flatnonzero(mask), f"{source.name}, held out"), [note, *notes]


def _select_fraction(train: Any, config: DataConfig) -> Subset:
    """The part of the training images that `config.fraction` names."""
    if isinstance(train, ShardStream):
        raise DataError(f"no part of {config.source} can be selected: a stream has no random access; try shards:.")
    classes = train.targets if train.labels and not train.multi_label else np.zeros(len(train), np.int64)
    low, high = config.fraction_range
    part = f"{low:g} to {high:g} of each class" if low else f"{high:g} of each class"
    return Subset(train, select_range(_keys(train), classes, low, high), f"{train.name}, {part}")


def _open_validation(config: DataConfig, train: Any, require_labels: bool) -> Source:
    """Open the source that `config.validation` names, with the classes of the training data."""
    assert config.validation is not None
    classes = list(train.labels) if require_labels else None
    other = config.replace(source=config.validation, validation=None, class_names=classes, groups=None, held_out=None)
    splits = open_source_splits(other, require_labels=require_labels)
    validation: Source = splits.validation if splits.validation is not None else splits.evaluation_source
    if isinstance(validation, ShardStream):
        raise DataError(
            f"{config.validation} is a stream, which cannot be used for validation; try shards: instead of stream:."
        )
    if require_labels and validation.multi_label != train.multi_label:
        multi, single = (config.source, config.validation) if train.multi_label else (config.validation, config.source)
        raise DataError(
            f"{multi} is multi-label and {single} has one label per image; expected the same kind for both."
        )
    return validation


def _describe_duplicates(splits: Splits) -> list[str]:
    """Notes about images that are both in the training split and in another."""
    if isinstance(splits.train, ShardStream):
        return []
    eval_splits = [splits.validation]
    if splits.test is not None and splits.test is not splits.validation:
        eval_splits.append(splits.test)
    return [note for split in eval_splits for note in describe_duplicates(splits.train, split)]


def _keys(source: Source) -> Iterable[str]:
    if isinstance(source, FolderSource | PathSource):
        return source.paths  # the same strings, without a call for each
    return (source.key(i) for i in range(len(source)))


def _find_tables(location: str) -> dict[str, list[Path]]:
    """Split -> files, for the path of a table, a folder of Parquet files, or a pattern."""
    path = Path(location)
    if path.is_dir():
        splits = find_parquet_files(path)
    elif "*" in location or "{" in location:
        files = [Path(p) for p in shards.find_shards(location)]
        by_split: dict[str, list[Path]] = {}
        for file in files:
            by_split.setdefault(split_from_name(file.name), []).append(file)
        splits = order_splits(by_split)
    else:
        splits = {"train": [path]}
    if not splits.get("train"):
        raise NotFoundError(f"{location} contains no tables; expected {', '.join(TABLE_EXTENSIONS[:3])}.")
    extensions = {file.suffix.lower() for files in splits.values() for file in files}
    if not extensions <= set(TABLE_EXTENSIONS):
        raise DataError(f"{location} is not a table; expected a name that ends in {', '.join(TABLE_EXTENSIONS[:3])}.")
    if len(extensions - {".parquet", ".pq"}) and sum(map(len, splits.values())) > 1:
        raise DataError(
            f"{location} matches several text tables; join them into one, with a column `split` if they are splits."
        )
    return splits


def _open_stream(location: str, config: DataConfig) -> SourceSplits:
    """Shards read without an index; the validation and test shards are indexed, for random access."""
    files = shards.group_by_split(shards.find_shards(location))
    names = config.class_names or shards.read_class_names(files["train"][0])
    indexed: dict[str, Source] = {}
    for split in ("validation", "test"):
        if split in files:
            indexes = load_indexes(files[split])
            indexed[split] = shards.ShardSource(
                f"{shards.display_name(location)}/{split}", indexes, config, names, None
            )
            names = names or indexed[split].labels
    if names is None and config.validation is not None:
        names = open_source_splits(config.replace(source=config.validation, validation=None)).evaluation_source.labels
    if names is None:
        raise DataError(
            f"the class names of {location} are unknown, and a stream is not scanned for them; "
            f"put {shards.CLASS_NAMES_FILE} next to the shards, or give them with data.class_names=."
        )
    stream = ShardStream(shards.display_name(location), files["train"], names, config)
    return SourceSplits(stream, indexed.get("validation"), indexed.get("test"), (LIMITATIONS,))
