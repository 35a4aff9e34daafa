"""PackedStrings behaves like a list of strings."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.data.sources.packed_strings import PackedStrings


@given(st.lists(st.text(st.characters(codec="utf-8"))), st.data())
def test_packed_strings_are_an_immutable_list(texts, data):
    packed = PackedStrings(texts)
    assert list(packed) == texts
    assert len(packed) == len(texts)
    assert [packed[i] for i in range(-len(texts), len(texts))] == texts + texts
    assert list(pickle.loads(pickle.dumps(packed))) == texts
    if texts:
        some = data.draw(st.lists(st.integers(0, len(texts) - 1)))
        assert list(packed.take(some)) == [texts[i] for i in some]


def test_file_names_that_are_not_valid_unicode_are_preserved():
    assert PackedStrings(["caf\udce9"])[0] == "caf\udce9"


@pytest.mark.parametrize("index", [3, -4])
def test_outside_is_an_index_error(index):
    with pytest.raises(IndexError):
        PackedStrings("abc")[index]
