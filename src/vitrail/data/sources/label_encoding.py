"""From what people write down as a label to class numbers and class names.

Numbers, words, lists of either, words with `|` between them; from a table's column or a shard's
files alike, as an Arrow array.
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
from vitrail.errors import DataError, nearest

LABEL_SEPARATOR = "|"
"""What stands between several labels of one image."""
INTEGER = r"^-?(0|[1-9][0-9]*)$"  # 007 is a name, not a number

# N images, K classes, M labels of all images together

Codes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class EncodedLabels:
    """Labels as numbers."""

    targets: Targets
    labels: tuple[str, ...]
    multi_label: bool


def encode_labels(
    column: Any, names: Sequence[str] | None, where: str, multi_label: bool | None = None
) -> EncodedLabels:
    """Class numbers of a column of labels; `names` are the classes where they are known already.

    `several` is what another part of the same data has been found to be.
    """
    column = _normalize_column(column)
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        flat, lengths = column.flatten(), pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        return _encode_lists(flat, lengths, names, where)
    words = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    if words and (multi_label or (multi_label is None and pc.any(pc.match_substring(column, LABEL_SEPARATOR)).as_py())):
        lists = pc.split_pattern(pc.fill_null(column, ""), LABEL_SEPARATOR)
        flat = pc.utf8_trim_whitespace(lists.flatten())
        there = pc.not_equal(flat, "")
        owner = np.repeat(np.arange(len(lists)), pc.list_value_length(lists).to_numpy())
        kept = owner[there.to_numpy(zero_copy_only=False)]
        return _encode_lists(flat.filter(there), np.bincount(kept, minlength=len(lists)), names, where)
    codes, labels = _encode(column, names, where)
    if multi_label:
        return EncodedLabels(_multi_hot(codes, np.ones_like(codes), len(labels)), labels, True)
    return EncodedLabels(codes, labels, False)


def parse_class_names(file: Any, where: str) -> tuple[str, ...]:
    """Class names as JSON holds them: a list, `{"0": "cat"}` or `{"cat": 0}`."""
    if isinstance(file, dict):
        if all(isinstance(v, int) for v in file.values()):
            file = {v: k for k, v in file.items()}
        try:
            by_number = {int(k): v for k, v in file.items()}
            file = [by_number[i] for i in range(len(by_number))]
        except (KeyError, ValueError, TypeError):
            file = None
    if not isinstance(file, list) or not file or not all(isinstance(n, str) for n in file):
        raise DataError(f'{where} does not name the classes; wanted a list, {{"0": "cat", ...}} or {{"cat": 0, ...}}.')
    return tuple(file)


def _encode_lists(flat: Any, lengths: Codes, names: Sequence[str] | None, where: str) -> EncodedLabels:
    codes, labels = _encode(_normalize_column(flat), names, where)
    return EncodedLabels(_multi_hot(codes, lengths, len(labels)), labels, True)


def _multi_hot(codes: Codes, lengths: Codes, num_classes: int) -> npt.NDArray[np.bool_]:
    """M numbers, so many for each image -> N K; -1 is no label."""
    targets = np.zeros((len(lengths), num_classes), np.bool_)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    targets[rows[codes >= 0], codes[codes >= 0]] = True
    return targets


def _normalize_column(column: Any) -> Any:
    """One array, without dictionaries; numbers as int64 where nothing is lost; words that are numbers too."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
        column = pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), None, column)
        if pc.all(pc.equal(pc.floor(column), column)).as_py() is False:
            odd = next(v for v in column.to_pylist() if v is not None and v != int(v))
            raise DataError(f"the labels are fractions, such as {odd}; wanted classes: whole numbers or words.")
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
    """Numbers of the classes, -1 for none, and the classes' names."""
    if pa.types.is_boolean(column.type):
        names = names or ("false", "true")
        column = column.cast(pa.int64())
    if pa.types.is_nested(column.type):
        raise DataError(f"{where} holds {column.type}; wanted whole numbers, words, or lists of them.")
    encoded = pc.dictionary_encode(column)
    values = encoded.dictionary.to_pylist()
    if pa.types.is_integer(column.type):
        meant, labels = _encode_integers(values, names, where)
    elif pa.types.is_null(column.type):
        meant, labels = [], tuple(names or ())
    elif values and not isinstance(values[0], str):
        raise DataError(f"{where} holds {column.type}; wanted whole numbers, words, or lists of them.")
    else:
        labels = tuple(names) if names is not None else tuple(sorted(values))
        place = {name: i for i, name in enumerate(labels)}
        for value in values:
            if value not in place:
                raise DataError(
                    f"{where} has the label {value!r}, which is none of the classes{nearest(value, labels)}"
                )
        meant = [place[value] for value in values]
    table = np.array([*meant, -1], np.int64)  # the last one is for what has no label
    indices = pc.fill_null(encoded.indices, len(meant)).to_numpy(zero_copy_only=False)
    return table[indices.astype(np.int64)], labels


def _encode_integers(values: list[int], names: Sequence[str] | None, where: str) -> tuple[list[int], tuple[str, ...]]:
    """Whole numbers are places in the list of names, or names themselves; below zero is no label."""
    there = sorted(v for v in values if v >= 0)
    labels = tuple(names) if names is not None else tuple(str(v) for v in there)
    place = {name: i for i, name in enumerate(labels)}
    if all(str(v) in place for v in there):
        return [place.get(str(v), -1) for v in values], labels
    if there[-1] >= len(labels):
        raise DataError(
            f"{where} has the label {there[-1]}, and there are {len(labels)} classes, counted from 0; "
            "name as many with data.class_names=."
        )
    return [max(v, -1) for v in values], labels


def find_name(names: Sequence[str], known: Sequence[str], given: str | None, what: str, where: str) -> str | None:
    """The name asked for, else the first usual one that is there, whatever its capitals; None: there is none."""
    if given is not None:
        if given not in names:
            raise DataError(f"{where} has no {what} {given!r}{nearest(given, names)}")
        return given
    plain = {re.sub(r"[\s_\-]+", "_", name.lower()): name for name in reversed(names)}
    return next((plain[name] for name in known if name in plain), None)
