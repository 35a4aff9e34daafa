"""Parquet files of features, written in parts so that a killed run can continue where it stopped.

A Parquet file cannot be appended to. So each part of about a thousand images is written atomically to a file of its own
in a folder next to the result. When all parts exist, they are joined in order and the folder is deleted. The folder's
settings.json records how the parts were made; parts with different settings are never joined.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from vitrail.config import format_version
from vitrail.data.sources.base import Source
from vitrail.data.sources.holdout import hold_out
from vitrail.data.sources.source_factory import DEFAULT_HELD_OUT
from vitrail.errors import CheckpointError, ConfigError, DataError, NotFoundError
from vitrail.evaluation.features import Features
from vitrail.runtime import warn_once
from vitrail.storage.atomic_write import explain_write_errors, new_file, new_folder, write_json
from vitrail.storage.locks import try_lock

METADATA_KEY = b"vitrail"
"""Key of the Parquet file's metadata; its value is a JSON object."""
MUST_MATCH = ("model", "weights", "features")
"""Settings that must be equal in two files whose features are compared."""


@dataclass(frozen=True)
class FeatureFile:
    """A feature file that is being written."""

    path: Path
    settings: Mapping[str, Any]
    """How the features are made, as plain JSON values; the same for all parts."""

    @property
    def parts_folder(self) -> Path:
        return self.path.with_name(f"{self.path.name}.parts")

    def begin(self, overwrite: bool = False) -> bool:
        """Create the folder of parts, or continue with it. Returns False if the file is already complete."""
        if self.path.is_dir():
            raise ConfigError(f"{self.path} is a folder; give the name of a file in it.")
        if self.path.exists() and not overwrite:
            self._check_same_settings(read_metadata(self.path), self.path)
            shutil.rmtree(self.parts_folder, ignore_errors=True)  # killed after joining
            return False
        if self.parts_folder.exists():
            self._check_same_settings(self._stored_settings(), self.parts_folder)
            return True
        with explain_write_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with new_folder(self.parts_folder) as folder:  # it never exists without its settings
                write_json(folder / "settings.json", self._versioned_settings())
        except CheckpointError:
            if not self.parts_folder.exists():
                raise
            self._check_same_settings(self._stored_settings(), self.parts_folder)  # another process was faster
        return True

    def _stored_settings(self) -> dict[str, Any]:
        """The settings of the existing parts."""
        return format_version.upgrade("features", json.loads((self.parts_folder / "settings.json").read_text()))

    def _versioned_settings(self) -> dict[str, Any]:
        return {format_version.KEYS["features"]: format_version.VERSION, **self.settings}

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the parts for this process: two writers would do all the work twice and delete each other's files."""
        locked = f"another process is writing {self.path}; wait for it to finish, or choose another --out."
        with explain_write_errors(self.path):
            try:
                file = (self.parts_folder / ".lock").open("a")
            except FileNotFoundError:  # the other process has just joined the parts
                raise ConfigError(locked) from None
        with file:
            if not try_lock(file.fileno()) or not self.parts_folder.exists():
                raise ConfigError(locked)
            yield

    def _check_same_settings(self, stored: Mapping[str, Any], where: Path) -> None:
        for name, value in self.settings.items():
            if stored.get(name) != value:
                raise ConfigError(
                    f"{where} was made with {name}={_truncated(stored.get(name))}, not {_truncated(value)}; "
                    "choose another --out, or delete it to start over."
                )

    def part_path(self, number: int) -> Path:
        return self.parts_folder / f"{number:05d}.parquet"

    def write_part(self, number: int, table: pa.Table, unreadable: Mapping[str, str]) -> None:
        with new_file(self.part_path(number), overwrite=True) as temporary:
            schema = table.schema.with_metadata({METADATA_KEY: json.dumps({"unreadable": dict(unreadable)})})
            pq.write_table(table.cast(schema), temporary, **PARQUET_OPTIONS)

    def join(self, count: int) -> dict[str, str]:
        """Join all parts into one file, in order. Returns the unreadable images and why."""
        unreadable: dict[str, str] = {}
        for n in range(count):  # one at a time: there may be more parts than files may be open
            schema = pq.read_schema(self.part_path(n))
            unreadable |= json.loads(schema.metadata[METADATA_KEY])["unreadable"]
        metadata = self._versioned_settings() | {"unreadable": unreadable}
        schema = schema.with_metadata({METADATA_KEY: json.dumps(metadata)})
        with (
            new_file(self.path, overwrite=True, folder=self.parts_folder) as temporary,
            pq.ParquetWriter(temporary, schema, **PARQUET_OPTIONS) as writer,
        ):
            for n in range(count):
                with pq.ParquetFile(self.part_path(n)) as file:
                    for group in range(file.num_row_groups):
                        writer.write_table(file.read_row_group(group).replace_schema_metadata(schema.metadata))
        shutil.rmtree(self.parts_folder)
        return unreadable


PARQUET_OPTIONS: dict[str, Any] = {"compression": "zstd", "use_dictionary": ["split", "label"]}


def feature_table(source: Source, split: str, indices: Tensor, values: Tensor, dtype: str) -> pa.Table:
    """One row per image: key, split, label, target, embedding."""
    numbers = indices.tolist()
    kind = pa.float16() if dtype == "float16" else pa.float32()
    flat = values.numpy().astype(np.float16 if dtype == "float16" else np.float32).reshape(-1)
    label, target = _label_columns(source, numbers)
    columns = {
        "key": pa.array([source.key(i) for i in numbers], pa.string()),
        "split": pa.array([split] * len(numbers), pa.string()),
        "label": label,
        "target": target,
        "embedding": pa.FixedSizeListArray.from_arrays(pa.array(flat, kind), values.shape[1]),
    }
    return pa.table(columns)


def _label_columns(source: Source, numbers: Sequence[int]) -> tuple[pa.Array, pa.Array]:
    """Class names and class indices: null for an unlabeled image, lists for multi-label data."""
    chosen = source.targets[list(numbers)]
    if source.multi_label:
        lists = [np.flatnonzero(row).tolist() for row in chosen]
        names = [[source.labels[i] for i in row] for row in lists]
        return pa.array(names, pa.list_(pa.string())), pa.array(lists, pa.list_(pa.int32()))
    known = [int(t) if t >= 0 and source.labels else None for t in chosen]
    return pa.array([None if t is None else source.labels[t] for t in known], pa.string()), pa.array(known, pa.int32())


def read_metadata(path: Path) -> dict[str, Any]:
    """The settings a feature file was made with, and its unreadable images."""
    if not path.exists():
        raise NotFoundError(f"there is no file {path}; create it with vitrail embed.")
    try:
        metadata = (pq.read_schema(path).metadata or {}).get(METADATA_KEY)
    except (OSError, pa.ArrowInvalid):
        metadata = None
    if metadata is None:
        raise DataError(f"{path} is not a feature file; create one with vitrail embed.")
    return format_version.upgrade("features", json.loads(metadata))


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
                f"{paths[-1]} was made with another {name} than {paths[0]} ({_truncated(metadata[-1].get(name))}, not "
                f"{_truncated(metadata[0].get(name))}); embed both with the same settings."
            )
    names = tuple(metadata[0].get("labels") or ())
    if metadata[0].get("labels") != metadata[-1].get("labels"):
        raise DataError(f"{paths[-1]} has other classes than {paths[0]}; embed two splits of the same data.")
    tables = [pq.read_table(path, columns=["key", "split", "target", "embedding"]) for path in paths]
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


def _truncated(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
