"""Shortened class names for charts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from vitrail.runtime import escape_control


def truncate(text: str, most: int) -> str:
    """Truncate to `most` characters, with an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


def unique_abbreviations(names: Sequence[str], most: int) -> list[str]:
    """Class names on one line of at most `most` characters; different names stay different.

    Long names lose their end; if that makes two names equal, their middle; if they are still equal, they get their
    position in the list appended.
    """
    plain = [escape_control(name).replace("_", " ").replace("\n", "\\n") for name in names]
    short = [truncate(name, most) for name in plain]
    for tail in (most // 2, most - 4):
        counts = Counter(short)
        for i, name in enumerate(plain):
            if counts[short[i]] > 1 and short[i] != name:
                short[i] = f"{name[: most - 1 - tail].rstrip()}…{name[-tail:].lstrip()}"
    counts, first = Counter(short), dict[str, str]()
    for i, name in enumerate(names):
        if counts[short[i]] > 1 and first.setdefault(short[i], name) != name:
            number = f" ({i + 1})"
            short[i] = f"{short[i][: most - len(number)].rstrip()}{number}"
    return short
