"""Features in a Parquet file, written so that a killed run goes on where it stopped.

Parquet cannot be added to. So each thousand pictures or so become a file of their own in a folder
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
from vitrail.errors import ConfigError, DataError, NotFound
from vitrail.evaluate.features import Features
from vitrail.weights.write import explained, sync, write_json

KEY = b"vitrail"
"""Of the file's own metadata: a JSON object."""
SAME = ("model", "weights", "place")
"""What two files must share for their features to be compared."""


@dataclass(frozen=True)
class FeatureFile:
    """A file of features that is being written."""

    path: Path
    settings: Mapping[str, Any]
    """What it is made with: plain values, the same for every part."""

    @property
    def folder(self) -> Path:
        return self.path.with_name(f"{self.path.name}.parts")

    def begin(self, overwrite: bool = False) -> bool:
        """Make the folder of parts, or go on with it; False where the file is complete already."""
        if self.path.is_dir():
            raise ConfigError(f"{self.path} is a folder; give the name of a file in it.")
        if self.path.exists() and not overwrite:
            self._check(about(self.path), self.path)
            shutil.rmtree(self.folder, ignore_errors=True)  # killed after joining
            return False
        if self.folder.exists():
            self._check(json.loads((self.folder / "settings.json").read_text()), self.folder)
            return True
        with explained(self.path):
            fresh = self.folder.with_name(f".{self.folder.name}.{os.getpid()}")
            fresh.mkdir(parents=True)
            write_json(fresh / "settings.json", dict(self.settings))
            fresh.rename(self.folder)  # never there without its settings
        return True

    def _check(self, there: Mapping[str, Any], where: Path) -> None:
        for name, value in self.settings.items():
            if there.get(name) != value:
                raise ConfigError(
                    f"{where} was made with {name}={_short(there.get(name))}, not {_short(value)}; "
                    "choose another --out, or remove it to start anew."
                )

    def part(self, number: int) -> Path:
        return self.folder / f"{number:05d}.parquet"

    def write_part(self, number: int, table: pa.Table, bad: Mapping[str, str]) -> None:
        with _new(self.part(number), self.folder) as temporary:
            schema = table.schema.with_metadata({KEY: json.dumps({"unreadable": dict(bad)})})
            pq.write_table(table.cast(schema), temporary, **WRITTEN)

    def join(self, count: int) -> dict[str, str]:
        """All parts in one file, in order; which pictures could not be read, and why."""
        files = [pq.ParquetFile(self.part(n)) for n in range(count)]
        bad: dict[str, str] = {}
        for file in files:
            bad |= json.loads(file.schema_arrow.metadata[KEY])["unreadable"]
        said = dict(self.settings) | {"unreadable": bad}
        schema = files[0].schema_arrow.with_metadata({KEY: json.dumps(said)})
        with _new(self.path, self.folder) as temporary, pq.ParquetWriter(temporary, schema, **WRITTEN) as writer:
            for file in files:
                for group in range(file.num_row_groups):
                    writer.write_table(file.read_row_group(group).replace_schema_metadata(schema.metadata))
        for file in files:
            file.close()
        shutil.rmtree(self.folder)
        return bad


WRITTEN: dict[str, Any] = {"compression": "zstd", "use_dictionary": ["split", "label"]}


def table_of(source: Source, split: str, indices: Tensor, values: Tensor, dtype: str) -> pa.Table:
    """One row for each picture: key, split, label, target, embedding."""
    numbers = indices.tolist()
    kind = pa.float16() if dtype == "float16" else pa.float32()
    flat = values.numpy().astype(np.float16 if dtype == "float16" else np.float32).reshape(-1)
    label, target = _labels(source, numbers)
    columns = {
        "key": pa.array([source.key(i) for i in numbers], pa.string()),
        "split": pa.array([split] * len(numbers), pa.string()),
        "label": label,
        "target": target,
        "embedding": pa.FixedSizeListArray.from_arrays(pa.array(flat, kind), values.shape[1]),
    }
    return pa.table(columns)


def _labels(source: Source, numbers: Sequence[int]) -> tuple[pa.Array, pa.Array]:
    """Names and numbers of the classes, null where a picture has none; lists where it may have several."""
    chosen = source.targets[list(numbers)]
    if source.several:
        lists = [np.flatnonzero(row).tolist() for row in chosen]
        names = [[source.labels[i] for i in row] for row in lists]
        return pa.array(names, pa.list_(pa.string())), pa.array(lists, pa.list_(pa.int32()))
    known = [int(t) if t >= 0 and source.labels else None for t in chosen]
    return pa.array([None if t is None else source.labels[t] for t in known], pa.string()), pa.array(known, pa.int32())


@contextmanager
def _new(path: Path, folder: Path) -> Iterator[Path]:
    """A file in the folder of parts to write, which becomes `path` when it is complete and on the disk."""
    temporary = folder / f".{path.name}.tmp"
    with explained(path):
        try:
            yield temporary
            sync(temporary)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync(path.absolute().parent)


def about(path: Path) -> dict[str, Any]:
    """What a file of features was made with."""
    if not path.exists():
        raise NotFound(f"there is no file {path}; make it with vitrail embed.")
    try:
        said = (pq.read_schema(path).metadata or {}).get(KEY)
    except (OSError, pa.ArrowInvalid):
        said = None
    if said is None:
        raise DataError(f"{path} is no file of features; make one with vitrail embed.")
    return dict(json.loads(said))


def read_features(paths: Sequence[Path]) -> tuple[Features, Features]:
    """What to learn from and what to measure on: the splits of one file, or two files in this order."""
    if not 1 <= len(paths) <= 2:
        raise ConfigError(f"got {len(paths)} files of features; wanted one with its splits, or two.")
    said = [about(path) for path in paths]
    for name in SAME:
        if said[0].get(name) != said[-1].get(name):
            raise DataError(
                f"{paths[-1]} has features of another {name} than {paths[0]} ({_short(said[-1].get(name))}, not "
                f"{_short(said[0].get(name))}); embed both alike."
            )
    names = tuple(said[0].get("labels") or ())
    if said[0].get("labels") != said[-1].get("labels"):
        raise DataError(f"{paths[-1]} has other classes than {paths[0]}; embed the parts of one data set.")
    tables = [pq.read_table(path, columns=["split", "target", "embedding"]) for path in paths]
    if len(tables) == 2:
        return _features(tables[0], names, paths[0].name), _features(tables[1], names, paths[1].name)
    splits = tables[0]["split"].unique().to_pylist()
    measured = next((s for s in ("test", "validation") if s in splits), None)
    if measured is None or "train" not in splits:
        raise DataError(
            f"{paths[0]} has the splits {', '.join(splits) or 'of nothing'}; wanted train and test. "
            "Use vitrail embed --split all, or pass --features twice."
        )
    column = tables[0]["split"].to_numpy(zero_copy_only=False)
    parts = [tables[0].filter(pa.array(column == split)) for split in ("train", measured)]
    name = paths[0].name
    return _features(parts[0], names, f"{name}/train"), _features(parts[1], names, f"{name}/{measured}")


def _features(table: pa.Table, labels: tuple[str, ...], name: str) -> Features:
    if not pa.types.is_integer(table["target"].type):
        raise DataError(f"{name} has several labels to a picture; features are probed with one each.")
    table = table.filter(table["target"].is_valid())
    if not len(table):
        raise DataError(f"{name} has no labelled pictures.")
    column = table["embedding"].combine_chunks()
    values: npt.NDArray[Any] = column.values.to_numpy(zero_copy_only=False).astype(np.float32)
    values = values[column.offset * column.type.list_size :][: len(column) * column.type.list_size]
    targets = torch.from_numpy(table["target"].to_numpy().astype(np.int64))
    return Features(torch.from_numpy(values).view(len(targets), -1), targets, labels, name)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
