"""Features in a Parquet file, written so that a killed run goes on where it stopped.

Parquet cannot be added to. So each thousand images or so become a file of their own in a folder
beside the result, complete or not there at all; when the last one is, they are joined, one after
the other, and the folder goes. settings.json in it says what they were made with: parts of two
kinds are never joined.
"""

from __future__ import annotations

import json
import os
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

from vitrail.data.sources.base import Source
from vitrail.data.sources.holdout import hold_out
from vitrail.data.sources.source_factory import DEFAULT_HELD_OUT
from vitrail.errors import ConfigError, DataError, NotFoundError
from vitrail.evaluate.features import Features
from vitrail.runtime import warn_once
from vitrail.runtime.locks import try_lock
from vitrail.weights.writers import explain_write_errors, fsync, write_json

METADATA_KEY = b"vitrail"
"""Of the file's own metadata: a JSON object."""
MUST_MATCH = ("model", "weights", "features")
"""What two files must share for their features to be compared."""


@dataclass(frozen=True)
class FeatureFile:
    """A file of features that is being written."""

    path: Path
    settings: Mapping[str, Any]
    """What it is made with: plain values, the same for every part."""

    @property
    def parts_folder(self) -> Path:
        return self.path.with_name(f"{self.path.name}.parts")

    def begin(self, overwrite: bool = False) -> bool:
        """Make the folder of parts, or go on with it; False where the file is complete already."""
        if self.path.is_dir():
            raise ConfigError(f"{self.path} is a folder; give the name of a file in it.")
        if self.path.exists() and not overwrite:
            self._check(read_metadata(self.path), self.path)
            shutil.rmtree(self.parts_folder, ignore_errors=True)  # killed after joining
            return False
        if self.parts_folder.exists():
            self._check(self._begun(), self.parts_folder)
            return True
        with explain_write_errors(self.path):
            fresh = self.parts_folder.with_name(f".{self.parts_folder.name}.{os.getpid()}")
            fresh.mkdir(parents=True)
            write_json(fresh / "settings.json", dict(self.settings))
            try:
                fresh.rename(self.parts_folder)  # never there without its settings
            except OSError:
                shutil.rmtree(fresh, ignore_errors=True)
                if not self.parts_folder.exists():
                    raise
                self._check(self._begun(), self.parts_folder)  # another process was quicker
        return True

    def _begun(self) -> dict[str, Any]:
        """What the parts that are there are made with."""
        return dict(json.loads((self.parts_folder / "settings.json").read_text()))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """The parts for this process alone: two would do everything twice, and one take the other's away."""
        taken = f"another process is writing {self.path}; wait for its end, or choose another --out."
        with explain_write_errors(self.path):
            try:
                file = (self.parts_folder / ".lock").open("a")
            except FileNotFoundError:  # it has just joined them
                raise ConfigError(taken) from None
        with file:
            if not try_lock(file.fileno()) or not self.parts_folder.exists():
                raise ConfigError(taken)
            yield

    def _check(self, there: Mapping[str, Any], where: Path) -> None:
        for name, value in self.settings.items():
            if there.get(name) != value:
                raise ConfigError(
                    f"{where} was made with {name}={_truncated(there.get(name))}, not {_truncated(value)}; "
                    "choose another --out, or remove it to start anew."
                )

    def part_path(self, number: int) -> Path:
        return self.parts_folder / f"{number:05d}.parquet"

    def write_part(self, number: int, table: pa.Table, bad: Mapping[str, str]) -> None:
        with _atomic_file(self.part_path(number), self.parts_folder) as temporary:
            schema = table.schema.with_metadata({METADATA_KEY: json.dumps({"unreadable": dict(bad)})})
            pq.write_table(table.cast(schema), temporary, **PARQUET_OPTIONS)

    def join(self, count: int) -> dict[str, str]:
        """All parts in one file, in order; which images could not be read, and why."""
        bad: dict[str, str] = {}
        for n in range(count):  # one open at a time: there may be more of them than files may be open
            schema = pq.read_schema(self.part_path(n))
            bad |= json.loads(schema.metadata[METADATA_KEY])["unreadable"]
        schema = schema.with_metadata({METADATA_KEY: json.dumps(dict(self.settings) | {"unreadable": bad})})
        with (
            _atomic_file(self.path, self.parts_folder) as temporary,
            pq.ParquetWriter(temporary, schema, **PARQUET_OPTIONS) as writer,
        ):
            for n in range(count):
                with pq.ParquetFile(self.part_path(n)) as file:
                    for group in range(file.num_row_groups):
                        writer.write_table(file.read_row_group(group).replace_schema_metadata(schema.metadata))
        shutil.rmtree(self.parts_folder)
        return bad


PARQUET_OPTIONS: dict[str, Any] = {"compression": "zstd", "use_dictionary": ["split", "label"]}


def feature_table(source: Source, split: str, indices: Tensor, values: Tensor, dtype: str) -> pa.Table:
    """One row for each image: key, split, label, target, embedding."""
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
    """Names and numbers of the classes, null where an image has none; lists where it may have several."""
    chosen = source.targets[list(numbers)]
    if source.multi_label:
        lists = [np.flatnonzero(row).tolist() for row in chosen]
        names = [[source.labels[i] for i in row] for row in lists]
        return pa.array(names, pa.list_(pa.string())), pa.array(lists, pa.list_(pa.int32()))
    known = [int(t) if t >= 0 and source.labels else None for t in chosen]
    return pa.array([None if t is None else source.labels[t] for t in known], pa.string()), pa.array(known, pa.int32())


@contextmanager
def _atomic_file(path: Path, folder: Path) -> Iterator[Path]:
    """A file in the folder of parts to write, which becomes `path` when it is complete and on the disk."""
    temporary = folder / f".{path.name}.{os.getpid()}.tmp"
    with explain_write_errors(path):
        try:
            yield temporary
            fsync(temporary)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        fsync(path.absolute().parent)


def read_metadata(path: Path) -> dict[str, Any]:
    """What a file of features was made with."""
    if not path.exists():
        raise NotFoundError(f"there is no file {path}; make it with vitrail embed.")
    try:
        said = (pq.read_schema(path).metadata or {}).get(METADATA_KEY)
    except (OSError, pa.ArrowInvalid):
        said = None
    if said is None:
        raise DataError(f"{path} is no file of features; make one with vitrail embed.")
    return dict(json.loads(said))


def read_features(paths: Sequence[Path]) -> tuple[Features, Features]:
    """What to learn from and what to measure on: the splits of one file, or two files in this order.

    Of a file that has nothing but a train split, a tenth is held out.
    """
    if not 1 <= len(paths) <= 2:
        raise ConfigError(f"got {len(paths)} files of features; wanted one with its splits, or two.")
    said = [read_metadata(path) for path in paths]
    for name in MUST_MATCH:
        if said[0].get(name) != said[-1].get(name):
            raise DataError(
                f"{paths[-1]} has features of another {name} than {paths[0]} ({_truncated(said[-1].get(name))}, not "
                f"{_truncated(said[0].get(name))}); embed both alike."
            )
    names = tuple(said[0].get("labels") or ())
    if said[0].get("labels") != said[-1].get("labels"):
        raise DataError(f"{paths[-1]} has other classes than {paths[0]}; embed the parts of one data set.")
    tables = [pq.read_table(path, columns=["key", "split", "target", "embedding"]) for path in paths]
    if len(tables) == 2:
        return _features(tables[0], names, paths[0].name), _features(tables[1], names, paths[1].name)
    splits, name = tables[0]["split"].unique().to_pylist(), paths[0].name
    if splits == ["train"]:
        return _hold_out(tables[0], names, name)
    measured = next((s for s in ("test", "validation") if s in splits), None)
    if measured is None or "train" not in splits:
        raise DataError(
            f"{paths[0]} has {'only ' * bool(splits)}{', '.join(splits) or 'no'} images, and nothing to learn from; "
            f"pass --features twice, a file of training images first: --features train.parquet --features {name}."
        )
    column = tables[0]["split"].to_numpy(zero_copy_only=False)
    parts = [tables[0].filter(pa.array(column == split)) for split in ("train", measured)]
    return _features(parts[0], names, f"{name}/train"), _features(parts[1], names, f"{name}/{measured}")


def _hold_out(table: pa.Table, labels: tuple[str, ...], name: str) -> tuple[Features, Features]:
    """Training images in two, by a hash of their names, as data without a test part is."""
    _check_single(table, name)
    table = table.filter(table["target"].is_valid())
    targets = table["target"].to_numpy().astype(np.int64)
    mask, notes = hold_out(table["key"].to_pylist(), targets, DEFAULT_HELD_OUT, labels)
    if not mask.any():
        raise DataError(
            f"{name} has no test images, and nothing can be held out: {'; '.join(notes) or 'too few images'}; "
            "pass --features twice, a file of test images second."
        )
    said = f"there are no test images: {int(mask.sum()):,} of {len(mask):,} are held out to measure on, by a hash of "
    warn_once([f"{said}their names", *notes], about=name)
    parts = [table.filter(pa.array(which)) for which in (~mask, mask)]
    return _features(parts[0], labels, f"{name}, but those held out"), _features(parts[1], labels, f"{name}, held out")


def _check_single(table: pa.Table, name: str) -> None:
    if not pa.types.is_integer(table["target"].type):
        raise DataError(f"{name} has several labels to an image; features are probed with one each.")


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
