"""CSV cells that a spreadsheet must not run as formulas."""

from __future__ import annotations

import csv
import io

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.data.csv_escape import csv_line, escape_formula, unescape_formulas


@pytest.mark.parametrize("text", ["=1+1", "+cmd|' /C calc'!A0", "-x.jpg", "@SUM(A1)", "\t=1", "\r=1", "'=1", "＝1"])
def test_a_formula_is_written_as_text(text: str):
    assert escape_formula(text) == f"'{text}"


@pytest.mark.parametrize("text", ["", "cat", "0.5", "-0.000001", "+3", "-inf", "it's", "'quoted'", "a=b"])
def test_numbers_and_other_text_stay_as_they_are(text: str):
    assert escape_formula(text) == text


def test_numbers_of_any_type_stay_numbers():
    assert csv_line(["=a", -0.5, -3, "-2.5"]) == "'=a,-0.5,-3,-2.5\n"


@given(st.lists(st.text("'=+-@\t＝ab1.", max_size=8), min_size=1, max_size=4))
def test_what_is_written_is_read_again(cells: list[str]):
    [row] = csv.reader(io.StringIO(csv_line(cells)))
    assert unescape_formulas(pa.array(row, pa.string())).to_pylist() == cells
