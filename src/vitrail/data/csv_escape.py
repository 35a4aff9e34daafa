"""CSV cells that are safe to open in a spreadsheet: text that would run as a formula gets a leading apostrophe.

A cell is escaped if it starts with = + - @ (also full width), a tab or a line break, after any apostrophes, and is
not a number. Reading removes one apostrophe, so that what vitrail writes is what it reads.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable
from typing import Any

_FORMULA_START = "'*[=+\\-@\t\r\n＝＋－＠]"
FORMULA = re.compile(_FORMULA_START)
ESCAPED = f"^'({_FORMULA_START})"


def csv_line(cells: Iterable[Any]) -> str:
    """One line of a CSV file, with formulas escaped and numbers unchanged."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow([escape_formula(str(cell)) for cell in cells])
    return text.getvalue()


def escape_formula(text: str) -> str:
    """The text, with a leading apostrophe if a spreadsheet would read it as a formula."""
    if not FORMULA.match(text) or _is_number(text):
        return text
    return f"'{text}"


def unescape_formulas(column: Any) -> Any:
    """Undo `escape_formula` in a pyarrow column of text."""
    import pyarrow.compute as pc

    return pc.replace_substring_regex(column, ESCAPED, r"\1")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
