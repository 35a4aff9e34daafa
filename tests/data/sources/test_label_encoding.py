"""Encoding of labels as class indices, compared with a plain dictionary."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.data.sources.label_encoding import encode_labels, parse_class_names
from vitrail.errors import DataError

WORDS = st.text("abcdé ", min_size=1, max_size=3).map(str.strip).filter(bool)


def numbered(values, names=None, **options):
    return encode_labels(pa.array(values), names, "labels.csv", **options)


@given(st.lists(st.one_of(st.none(), WORDS), min_size=1))
def test_strings_are_encoded_in_sorted_order(values):
    found = encode_labels(pa.array(values, pa.string()), None, "t")
    names = sorted({v for v in values if v is not None})
    assert found.labels == tuple(names)
    assert found.targets.tolist() == [-1 if v is None else names.index(v) for v in values]
    assert not found.multi_label


@given(st.lists(st.lists(WORDS, max_size=3), min_size=1))
def test_lists_are_multi_hot_rows(values):
    found = encode_labels(pa.array(values, pa.list_(pa.string())), None, "t")
    names = sorted({w for row in values for w in row})
    assert found.labels == tuple(names)
    assert found.multi_label
    assert found.targets.tolist() == [[name in row for name in names] for row in values]
    joined = encode_labels(pa.array(["|".join(row) for row in values]), names, "t", multi_label=True)
    assert joined.targets.tolist() == found.targets.tolist()


@given(st.lists(st.integers(-1, 6), min_size=1))
def test_integers_are_class_indices_or_class_names(values):
    named = numbered(values, "abcdefg")
    assert named.targets.tolist() == values
    alone = numbered(values)
    there = sorted({v for v in values if v >= 0})
    assert alone.labels == tuple(map(str, there))
    assert alone.targets.tolist() == [there.index(v) if v >= 0 else -1 for v in values]


@pytest.mark.parametrize("values", [["3", "5", "3"], [3, 5, 3], [3.0, 5.0, 3.0], np.array([3, 5, 3], np.uint8)])
def test_numbers_are_encoded_alike_in_every_type(values):
    found = numbered(values)
    assert (found.labels, found.targets.tolist()) == (("3", "5"), [0, 1, 0])


def test_numbers_with_leading_zeros_are_names():
    assert numbered(["007", "08"]).labels == ("007", "08")


def test_numbers_that_are_all_class_names_are_class_names():
    assert numbered([8, 3], ["3", "8"]).targets.tolist() == [1, 0]


def test_dictionaries_booleans_and_missing_values():
    assert encode_labels(pa.array(["b", "a", "b"]).dictionary_encode(), None, "t").targets.tolist() == [1, 0, 1]
    assert numbered([True, False, None]).targets.tolist() == [1, 0, -1]
    assert numbered([1.0, float("nan"), None]).targets.tolist() == [0, -1, -1]
    assert numbered([" a ", "", None]).targets.tolist() == [0, -1, -1]
    assert numbered([None, None], ["a"]).targets.tolist() == [-1, -1]


def test_strings_with_a_separator_are_multi_label():
    found = numbered(["cat|dog", "cat", "", None, " dog | cat "])
    assert found.labels == ("cat", "dog")
    assert found.targets.tolist() == [[1, 1], [1, 0], [0, 0], [0, 0], [1, 1]]
    assert numbered(["0|2", "1"], "abc").targets.tolist() == [[1, 0, 1], [0, 1, 0]]


def test_chunks_are_one_column():
    column = pa.chunked_array([["a", "b"], ["b"], []])
    assert encode_labels(column, None, "t").targets.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("values", "names", "message"),
    [
        (["cat", "dgo"], ["cat", "dog"], "has the label 'dgo', which is not a class; did you mean 'dog'?"),
        ([0, 3], ["cat", "dog"], "has the label 3, but there are 2 classes, counted from 0"),
        ([0.5, 1.0], None, "the labels are fractions, such as 0.5"),
        ([{"a": 1}], None, "has the type struct"),
    ],
)
def test_invalid_labels_are_refused(values, names, message):
    with pytest.raises(DataError, match=message.replace("?", r"\?")):
        numbered(values, names)


@pytest.mark.parametrize("given", [["cat", "dog"], {"0": "cat", "1": "dog"}, {"cat": 0, "dog": 1}])
def test_class_names_are_read_from_any_json(given):
    assert parse_class_names(given, "classes.json") == ("cat", "dog")


@pytest.mark.parametrize("given", [[], [1], {"0": "cat", "2": "dog"}, "cat", {"a": "b"}])
def test_other_json_is_not_a_list_of_class_names(given):
    with pytest.raises(DataError, match=r"classes\.json does not contain class names"):
        parse_class_names(given, "classes.json")
