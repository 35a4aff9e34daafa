"""Shortened class names for charts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from vitrail.runtime import escape_control


def truncate(text: str, limit: int) -> str:
    """Truncate to `limit` characters, with an ellipsis."""
    return text if len(text) <= limit else f"{text[: limit - 1].rstrip()}…"


def unique_abbreviations(names: Sequence[str], limit: int) -> list[str]:
    """Class names on one line of at most `limit` characters; different names stay different.

    Long names lose their end; if that makes two names equal, their middle; if they are still equal, they get their
    position in the list appended.
    """
    plain = [escape_control(name).replace("_", " ").replace("\n", "\\n") for name in names]
    short = [truncate(name, limit) for name in plain]
    for tail in (limit // 2, limit - 4):
        counts = Counter(short)
        for i, name in enumerate(plain):
            if counts[short[i]] > 1 and short[i] != name:
                short[i] = f"{name[: limit - 1 - tail].rstrip()}…{name[-tail:].lstrip()}"
    counts, first = Counter(short), dict[str, str]()
    for i, name in enumerate(names):
        if counts[short[i]] > 1 and first.setdefault(short[i], name) != name:
            number = f" ({i + 1})"
            short[i] = f"{short[i][: limit - len(number)].rstrip()}{number}"
    return short
