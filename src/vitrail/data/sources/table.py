"""A table of images: CSV, TSV or Parquet.

One column holds the image: a path relative to the table's folder, a URL, or bytes. Another holds
its label or labels. An optional column `split` assigns rows to splits; so do the names of Parquet
files in one folder (train-00000-of-00002.parquet, test-...).
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from vitrail.config import DataConfig
from vitrail.data.csv_escape import unescape_formulas
from vitrail.data.sources.base import IMAGE_EXTENSIONS, Sample, Source, SourceSplits, Targets
from vitrail.data.sources.folder import SPLIT_NAMES
from vitrail.data.sources.label_encoding import EncodedLabels, encode_labels, find_name, parse_class_names
from vitrail.data.sources.packed_strings import PackedStrings
from vitrail.data.sources.parquet import ParquetSource, read_columns, read_schema
from vitrail.data.sources.remote import fetch, is_remote
from vitrail.data.sources.subset import Subset
from vitrail.errors import DataError, NotFoundError

_IMAGE = """image img picture photo pixel_values image_path img_path image_file file_path filepath path file_name
    filename file image_id bytes image_bytes jpg jpeg png webp url image_url"""
_LABEL = "label labels class classes class_name category target targets y cls fine_label tag tags"
IMAGE_COLUMNS, LABEL_COLUMNS = _IMAGE.split(), _LABEL.split()
"""Usual column names, most likely first."""
SPLIT_COLUMNS = ("split", "part", "subset")
NUM_PATHS_CHECKED = 50
"""Paths checked for existence when a table is opened."""


class PathSource:
    """Images as files or URLs; the key is the path or URL in the table."""

    pixels = None
    blocks = None

    def __init__(
        self, name: str, root: Path, paths: PackedStrings, targets: Targets, labels: tuple[str, ...], multi_label: bool
    ) -> None:
        self.name, self.root, self.paths = name, root, paths
        self.targets, self.labels, self.multi_label = targets, labels, multi_label

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Sample:
        target = self.targets[index]
        classes = tuple(np.flatnonzero(target).tolist()) if self.multi_label else int(target)
        file = self.file(index)
        return Sample(self.key(index), fetch(file) if is_remote(file) else file, classes)

    def key(self, index: int) -> str:
        return self.paths[index]

    def file(self, index: int) -> str:
        path = self.paths[index]
        return path if is_remote(path) else os.path.join(self.root, path)


@dataclass(frozen=True)
class TableSplit:
    """The images of one split, with the split and group columns of the table."""

    source: Source
    splits: list[str | None] | None
    groups: PackedStrings | None
    notes: tuple[str, ...]


def open_table(
    files: dict[str, list[Path]], config: DataConfig, name: str, *, require_labels: bool = True
) -> SourceSplits:
    """Open a table given its splits (split -> files of one format); the first one is the training split.

    require_labels: raise DataError for a table without a column of labels.
    """
    opened: dict[str, TableSplit] = {}
    names, multi_label = config.class_names, None
    for split, paths in files.items():
        for path in paths:
            if not path.is_file():
                raise NotFoundError(f"{path} is a folder, expected a table." if path.is_dir() else f"no table {path}.")
        split_name = f"{name}/{split}" if len(files) > 1 else name
        table_split = _open_split(paths, config, split_name, names, multi_label, require_labels)
        names, multi_label = table_split.source.labels, table_split.source.multi_label
        opened[split] = table_split
    notes = tuple(note for table_split in opened.values() for note in table_split.notes)
    first = next(iter(opened.values()))
    if len(opened) == 1 and first.splits is not None:
        return _split_rows(first, name, notes)
    sources = {split: table_split.source for split, table_split in opened.items()}
    return SourceSplits(first.source, sources.get("validation"), sources.get("test"), notes, first.groups)


def find_parquet_files(folder: Path) -> dict[str, list[Path]]:
    """Split -> the Parquet files in a folder and its subfolders; all are `train` if none is named so."""
    by_split: dict[str, list[Path]] = {}
    for path in sorted([*folder.glob("*.parquet"), *folder.glob("*/*.parquet")]):
        if not path.name.startswith("."):
            by_split.setdefault(split_from_name(path.relative_to(folder).as_posix()), []).append(path)
    return order_splits(by_split)


def order_splits(by_split: dict[str, list[Path]]) -> dict[str, list[Path]]:
    """Put the training split first: the files named `train`, else those without a split name, else all."""
    if "train" not in by_split:
        by_split = (
            {"train": by_split[""], **by_split}
            if "" in by_split
            else {"train": [p for ps in by_split.values() for p in ps]}
        )
    return {split: by_split[split] for split in ("train", "validation", "test") if split in by_split}


def split_from_name(path: str) -> str:
    """train, validation or test if a word of the path names it, else an empty string."""
    for word in reversed(re.split(r"[^a-z]+", path.lower())):
        if word in SPLIT_NAMES:
            return SPLIT_NAMES[word]
    return ""


def _open_split(
    files: list[Path],
    config: DataConfig,
    name: str,
    names: Sequence[str] | None,
    multi_label: bool | None,
    require_labels: bool,
) -> TableSplit:
    where = str(files[0])
    parquet = files[0].suffix.lower() in (".parquet", ".pq")
    table = None if parquet else _read_csv(files[0])
    schema = read_schema(files[0]) if table is None else table.schema
    image = _find_image_column(schema, config.image_column, table, where)
    label = find_name(schema.names, LABEL_COLUMNS, config.label_column, "column", where)
    if label is None and require_labels:
        raise DataError(
            f"{where} has no label column among {_format_names(schema.names)}; name it with data.label_column=."
        )
    split = find_name(schema.names, SPLIT_COLUMNS, None, "column", where)
    groups = config.groups if config.groups in schema.names else None
    as_paths = _is_text(schema.field(image).type)
    expected = [c for c in (label, split, groups, image if as_paths else None) if c]
    table = read_columns(files, list(dict.fromkeys(expected))) if table is None else table
    if label is None:
        encoded = EncodedLabels(np.full(len(table), -1, np.int64), (), False)
    else:
        class_names = names or _schema_class_names(schema, label, where)
        encoded = encode_labels(table[label], class_names, f"{where}, column {label!r},", multi_label)
    notes = []
    if label is None:
        notes.append("the images have no labels")
    elif unlabeled := _count_unlabeled(encoded):
        notes.append(f"{unlabeled:,} of {len(table):,} images have no label")
    source: Source
    if as_paths:
        paths = PackedStrings(str(p or "") for p in table[image].to_pylist())
        root, root_notes = _find_root(files[0], paths)
        notes += root_notes
        source = PathSource(name, root, paths, encoded.targets, encoded.labels, encoded.multi_label)
    else:
        absolute = [Path(os.path.abspath(f)) for f in files]
        source = ParquetSource(name, absolute, image, encoded.targets, encoded.labels, encoded.multi_label)
    image_groups = PackedStrings(str(g) for g in table[groups].to_pylist()) if groups else None
    return TableSplit(source, table[split].to_pylist() if split else None, image_groups, tuple(notes))


def _read_csv(path: Path) -> Any:
    """Read every column as text; label_encoding decides later whether a whole column is numeric."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as text: {error}; expected UTF-8.") from error
    delimiter = "\t" if path.suffix.lower() == ".tsv" else max(",;\t", key=first.count)
    header = next(csv.reader([first], delimiter=delimiter), [])
    if not header or any(os.path.splitext(cell)[1].lower() in IMAGE_EXTENSIONS for cell in header):
        raise DataError(f"{path} begins with {first.strip()[:60]!r}; expected a header line with the column names.")
    try:
        table = pyarrow.csv.read_csv(
            path,
            parse_options=pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(header, pa.string())),
        )
    except pa.ArrowInvalid as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise DataError(f"{path} does not match its header line: {reason}.") from error
    return pa.table([unescape_formulas(column) for column in table.columns], names=table.column_names)


def _find_image_column(schema: Any, requested: str | None, table: Any, where: str) -> str:
    """Find the image column by name, else the only column that can contain images."""
    if column_name := find_name(schema.names, IMAGE_COLUMNS, requested, "column", where):
        return column_name
    candidates = [f.name for f in schema if _holds_bytes(f.type)]
    if table is not None and len(table):
        row = table.slice(0, 1).to_pylist()[0]
        candidates = [n for n, v in row.items() if os.path.splitext(v or "")[1].lower() in IMAGE_EXTENSIONS]
    if len(candidates) == 1:
        return candidates[0]
    raise DataError(
        f"{where} has no image column among {_format_names(schema.names)}; name it with data.image_column=."
    )


def _holds_bytes(kind: Any) -> bool:
    if pa.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _is_text(kind: Any) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _schema_class_names(schema: Any, label: str, where: str) -> tuple[str, ...] | None:
    """Class names that Hugging Face's `datasets` library stored in the schema."""
    try:
        features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
        feature = features[label]
        while "names" not in feature:
            feature = feature["feature"]
        return parse_class_names(feature["names"], where)
    except (TypeError, KeyError, ValueError):
        return None


def _find_root(table: Path, paths: PackedStrings) -> tuple[Path, list[str]]:
    """The folder that paths are relative to: the table's, or the subfolder of it that has the images."""
    root = Path(os.path.abspath(table)).parent
    checked = [p for p in (paths[i] for i in range(min(len(paths), NUM_PATHS_CHECKED))) if not is_remote(p)]
    if not checked or any((root / p).is_file() for p in checked):
        return root, []
    subfolders = [f for f in sorted(root.iterdir()) if f.is_dir() and (f / checked[0]).is_file()]
    if len(subfolders) == 1:
        return subfolders[0], [f"the images of {table.name} are in {subfolders[0].name}/"]
    raise NotFoundError(
        f"the images of {table} were not found, such as {root / checked[0]}; "
        "expected paths relative to the table's folder."
    )


def _split_rows(opened: TableSplit, name: str, notes: tuple[str, ...]) -> SourceSplits:
    """Divide the rows by the values of the `split` column."""
    rows: dict[str, list[int]] = {}
    for row, word in enumerate(opened.splits or ()):
        split = SPLIT_NAMES.get((word or "").strip().lower())
        if split is None:
            raise DataError(f"row {row + 1} of {name} has the split {word!r}; expected train, validation or test.")
        rows.setdefault(split, []).append(row)
    if "train" not in rows:
        raise DataError(f"{name} has no rows with the split 'train', only {_format_names(list(rows))}.")
    splits = {split: Subset(opened.source, indices, f"{name}/{split}") for split, indices in rows.items()}
    groups = opened.groups.take(rows["train"]) if opened.groups is not None else None
    return SourceSplits(splits["train"], splits.get("validation"), splits.get("test"), notes, groups)


def _count_unlabeled(encoded: EncodedLabels) -> int:
    """Number of images without a label; 0 for multi-label data, where that is a valid target."""
    return 0 if encoded.multi_label else int(np.count_nonzero(encoded.targets < 0))


def _format_names(names: Sequence[str]) -> str:
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
