"""Abbreviations of class names."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vitrail.explain.label_text import unique_abbreviations


def test_short_names_are_kept_and_long_names_are_cut_at_the_end():
    assert unique_abbreviations(["chain_saw", "church"], 26) == ["chain saw", "church"]
    assert unique_abbreviations(["chain saw", "golden retriever"], 10) == ["chain saw", "golden re…"]


def test_names_with_a_common_prefix_are_cut_in_the_middle():
    assert unique_abbreviations(["American black bear", "American black duck"], 12) == ["Ameri…k bear", "Ameri…k duck"]


def test_line_breaks_and_control_characters_are_escaped():
    assert unique_abbreviations(["a\x1b[31m\x07", "new\nline", "a\x1b[32m\x07"], 16) == [
        r"a\x1b[31m\x07",
        r"new\nline",
        r"a\x1b[32m\x07",
    ]


@given(st.sets(st.text("ab_ ", min_size=1, max_size=40), min_size=2, max_size=12), st.integers(10, 30))
def test_abbreviations_are_unique(names: set[str], max_length: int):
    abbreviations = unique_abbreviations(sorted(names), max_length)
    assert len(set(abbreviations)) == len(names)
    assert max(map(len, abbreviations)) <= max_length
