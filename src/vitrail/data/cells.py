"""Text in CSV files: a cell that a spreadsheet would compute as a formula is written with an apostrophe before it.

A cell is guarded where it begins with = + - @ (also full width), tab or a line break, after any apostrophes, and is
not a number; reading takes one apostrophe off again, so that what vitrail writes is what it reads.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable
from typing import Any

_STARTS = "'*[=+\\-@\t\r\n＝＋－＠]"
FORMULA = re.compile(_STARTS)
GUARDED = f"^'({_STARTS})"


def csv_line(cells: Iterable[Any]) -> str:
    """One line of a CSV file; numbers stay numbers."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow([guarded(str(cell)) for cell in cells])
    return text.getvalue()


def guarded(text: str) -> str:
    """The text, with an apostrophe before it where a spreadsheet would take it for a formula."""
    if not FORMULA.match(text) or _is_number(text):
        return text
    return f"'{text}"


def unguarded(column: Any) -> Any:
    """A pyarrow column of text as it was before `guarded`."""
    import pyarrow.compute as pc

    return pc.replace_substring_regex(column, GUARDED, r"\1")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
