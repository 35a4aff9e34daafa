"""Encode labels as class indices, and find the class names.

Labels are integers, strings, lists of either, or strings with `|` between several labels. They come
as an Arrow array, from a column of a table or from the files of shards.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vitrail.data.sources.base import Targets
from vitrail.errors import DataError, did_you_mean

LABEL_SEPARATOR = "|"
"""Separates the labels of one image in a string."""
INTEGER = r"^-?(0|[1-9][0-9]*)$"  # 007 is a name, not a number

# N images, K classes, M labels of all images together

Codes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class EncodedLabels:
    """Targets, class names in order, and whether the data is multi-label."""

    targets: Targets
    labels: tuple[str, ...]
    multi_label: bool


def encode_labels(
    column: Any, names: Sequence[str] | None, where: str, multi_label: bool | None = None
) -> EncodedLabels:
    """Encode a column of labels.

    names: class names, in order, if they are known.
    where: describes the column in errors.
    multi_label: whether another split of the same data is multi-label; None: detect it.
    """
    column = _normalize_column(column)
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        flat, lengths = column.flatten(), pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        return _encode_lists(flat, lengths, names, where)
    is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    if is_text and (
        multi_label or (multi_label is None and pc.any(pc.match_substring(column, LABEL_SEPARATOR)).as_py())
    ):
        lists = pc.split_pattern(pc.fill_null(column, ""), LABEL_SEPARATOR)
        flat = pc.utf8_trim_whitespace(lists.flatten())
        nonempty = pc.not_equal(flat, "")
        rows = np.repeat(np.arange(len(lists)), pc.list_value_length(lists).to_numpy())
        rows = rows[nonempty.to_numpy(zero_copy_only=False)]
        return _encode_lists(flat.filter(nonempty), np.bincount(rows, minlength=len(lists)), names, where)
    codes, labels = _encode(column, names, where)
    if multi_label:
        return EncodedLabels(_multi_hot(codes, np.ones_like(codes), len(labels)), labels, True)
    return EncodedLabels(codes, labels, False)


def parse_class_names(value: Any, where: str) -> tuple[str, ...]:
    """Class names from JSON: a list, `{"0": "cat"}` or `{"cat": 0}`."""
    if isinstance(value, dict):
        if all(isinstance(v, int) for v in value.values()):
            value = {v: k for k, v in value.items()}
        try:
            by_index = {int(k): v for k, v in value.items()}
            value = [by_index[i] for i in range(len(by_index))]
        except (KeyError, ValueError, TypeError):
            value = None
    if not isinstance(value, list) or not value or not all(isinstance(n, str) for n in value):
        raise DataError(
            f'{where} does not contain class names; expected a list, {{"0": "cat", ...}} or {{"cat": 0, ...}}.'
        )
    return tuple(value)


def _encode_lists(flat: Any, lengths: Codes, names: Sequence[str] | None, where: str) -> EncodedLabels:
    codes, labels = _encode(_normalize_column(flat), names, where)
    return EncodedLabels(_multi_hot(codes, lengths, len(labels)), labels, True)


def _multi_hot(codes: Codes, lengths: Codes, num_classes: int) -> npt.NDArray[np.bool_]:
    """M class indices, of which each image has `lengths[i]` -> N x K booleans; -1 is no label."""
    targets = np.zeros((len(lengths), num_classes), np.bool_)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    targets[rows[codes >= 0], codes[codes >= 0]] = True
    return targets


def _normalize_column(column: Any) -> Any:
    """One array without dictionary encoding; integral floats and strings of integers become int64."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
        column = pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), None, column)
        if pc.all(pc.equal(pc.floor(column), column)).as_py() is False:
            example = next(v for v in column.to_pylist() if v is not None and v != int(v))
            raise DataError(f"the labels are fractions, such as {example}; expected integers or strings.")
        column = column.cast(pa.int64())
    if pa.types.is_integer(column.type):
        return column.cast(pa.int64())
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = pc.utf8_trim_whitespace(column)
        column = pc.if_else(pc.equal(column, ""), None, column)
        if column.null_count < len(column) and pc.all(pc.match_substring_regex(column, INTEGER)).as_py():
            return column.cast(pa.int64())
    return column


def _encode(column: Any, names: Sequence[str] | None, where: str) -> tuple[Codes, tuple[str, ...]]:
    """Class indices, -1 for no label, and class names."""
    if pa.types.is_boolean(column.type):
        names = names or ("false", "true")
        column = column.cast(pa.int64())
    if pa.types.is_nested(column.type):
        raise DataError(f"{where} has the type {column.type}; expected integers, strings, or lists of them.")
    encoded = pc.dictionary_encode(column)
    values = encoded.dictionary.to_pylist()
    if pa.types.is_integer(column.type):
        codes, labels = _encode_integers(values, names, where)
    elif pa.types.is_null(column.type):
        codes, labels = [], tuple(names or ())
    elif values and not isinstance(values[0], str):
        raise DataError(f"{where} has the type {column.type}; expected integers, strings, or lists of them.")
    else:
        labels = tuple(names) if names is not None else tuple(sorted(values))
        class_index = {name: i for i, name in enumerate(labels)}
        for value in values:
            if value not in class_index:
                raise DataError(f"{where} has the label {value!r}, which is not a class{did_you_mean(value, labels)}")
        codes = [class_index[value] for value in values]
    table = np.array([*codes, -1], np.int64)  # the last entry: no label
    indices = pc.fill_null(encoded.indices, len(codes)).to_numpy(zero_copy_only=False)
    return table[indices.astype(np.int64)], labels


def _encode_integers(values: list[int], names: Sequence[str] | None, where: str) -> tuple[list[int], tuple[str, ...]]:
    """Encode integers as class names if all of them are among the names, else as class indices; negative: no label."""
    present = sorted(v for v in values if v >= 0)
    labels = tuple(names) if names is not None else tuple(str(v) for v in present)
    class_index = {name: i for i, name in enumerate(labels)}
    if all(str(v) in class_index for v in present):
        return [class_index.get(str(v), -1) for v in values], labels
    if present[-1] >= len(labels):
        raise DataError(
            f"{where} has the label {present[-1]}, but there are {len(labels)} classes, counted from 0; "
            "give more names with data.class_names=."
        )
    return [max(v, -1) for v in values], labels


def find_name(names: Sequence[str], known: Sequence[str], requested: str | None, what: str, where: str) -> str | None:
    """The requested name, else the first known name that is present, ignoring case and separators; else None."""
    if requested is not None:
        if requested not in names:
            raise DataError(f"{where} has no {what} {requested!r}{did_you_mean(requested, names)}")
        return requested
    normalized = {re.sub(r"[\s_\-]+", "_", name.lower()): name for name in reversed(names)}
    return next((normalized[name] for name in known if name in normalized), None)
