"""Features that `vitrail embed` wrote, read for training and testing: a Parquet file, or a folder of parts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from vitrail.data.sources.holdout import hold_out
from vitrail.data.sources.source_factory import DEFAULT_HELD_OUT
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.features import Features
from vitrail.runtime import warn_once
from vitrail.storage.part_folder import PartFolder, read_file_metadata, truncated

MUST_MATCH = ("model", "weights", "features")
"""Settings that must be equal in two files whose features are compared."""


def read_metadata(path: Path) -> dict[str, Any]:
    """The settings a feature file, or a folder of parts, was made with; and a file's unreadable images."""
    metadata = dict(PartFolder.open(path).manifest.settings) if path.is_dir() else read_file_metadata(path)
    if metadata.get("task", "embed") != "embed":
        raise DataError(
            f"{path} was made by vitrail {metadata['task']} and has no features; create it with vitrail embed."
        )
    return metadata


def read_features(paths: Sequence[Path]) -> tuple[Features, Features]:
    """Features for training and for testing: the splits of one file, or two files in this order.

    If a single file has only a train split, a tenth of it is held out for testing.
    """
    if not 1 <= len(paths) <= 2:
        raise ConfigError(f"got {len(paths)} feature files; expected one with train and test splits, or two.")
    metadata = [read_metadata(path) for path in paths]
    for name in MUST_MATCH:
        if metadata[0].get(name) != metadata[-1].get(name):
            raise DataError(
                f"{paths[-1]} was made with another {name} than {paths[0]} ({truncated(metadata[-1].get(name))}, not "
                f"{truncated(metadata[0].get(name))}); embed both with the same settings."
            )
    names = tuple(metadata[0].get("labels") or ())
    if metadata[0].get("labels") != metadata[-1].get("labels"):
        raise DataError(f"{paths[-1]} has other classes than {paths[0]}; embed two splits of the same data.")
    tables = [_read_columns(path) for path in paths]
    if len(tables) == 2:
        return _features(tables[0], names, paths[0].name), _features(tables[1], names, paths[1].name)
    splits, name = tables[0]["split"].unique().to_pylist(), paths[0].name
    if splits == ["train"]:
        return _hold_out(tables[0], names, name)
    measured = next((s for s in ("test", "validation") if s in splits), None)
    if measured is None or "train" not in splits:
        raise DataError(
            f"{paths[0]} has {'only ' * bool(splits)}{', '.join(splits) or 'no'} images, and nothing to train on; "
            f"pass --features twice, the training images first: --features train.parquet --features {name}."
        )
    column = tables[0]["split"].to_numpy(zero_copy_only=False)
    parts = [tables[0].filter(pa.array(column == split)) for split in ("train", measured)]
    return _features(parts[0], names, f"{name}/train"), _features(parts[1], names, f"{name}/{measured}")


def _read_columns(path: Path) -> pa.Table:
    """The columns that probing needs, of a file or of all parts in order."""
    columns = ["key", "split", "target", "embedding"]
    if not path.is_dir():
        return pq.read_table(path, columns=columns)
    parts = PartFolder.open(path).part_paths()
    return pa.concat_tables(pq.read_table(part, columns=columns).replace_schema_metadata() for part in parts)


def _hold_out(table: pa.Table, labels: tuple[str, ...], name: str) -> tuple[Features, Features]:
    """Split training images by a hash of their keys, as data without a test split is."""
    _check_single(table, name)
    table = table.filter(table["target"].is_valid())
    targets = table["target"].to_numpy().astype(np.int64)
    mask, notes = hold_out(table["key"].to_pylist(), targets, DEFAULT_HELD_OUT, labels)
    if not mask.any():
        raise DataError(
            f"{name} has no test images, and none can be held out: {'; '.join(notes) or 'too few images'}; "
            "pass --features twice, the test images second."
        )
    held_out = f"there are no test images: {int(mask.sum()):,} of {len(mask):,} are held out for testing, by a hash of "
    warn_once([f"{held_out}their names", *notes], about=name)
    parts = [table.filter(pa.array(rows)) for rows in (~mask, mask)]
    return _features(parts[0], labels, f"{name} without held-out"), _features(parts[1], labels, f"{name}, held out")


def _check_single(table: pa.Table, name: str) -> None:
    if not pa.types.is_integer(table["target"].type):
        raise DataError(f"{name} is multi-label; probing needs one label per image.")


def _features(table: pa.Table, labels: tuple[str, ...], name: str) -> Features:
    _check_single(table, name)
    table = table.filter(table["target"].is_valid())
    if not len(table):
        raise DataError(f"{name} has no labeled images.")
    column = table["embedding"].combine_chunks()
    values: npt.NDArray[Any] = column.values.to_numpy(zero_copy_only=False).astype(np.float32)
    values = values[column.offset * column.type.list_size :][: len(column) * column.type.list_size]
    targets = torch.from_numpy(table["target"].to_numpy().astype(np.int64))
    return Features(torch.from_numpy(values).view(len(targets), -1), targets, labels, name)
