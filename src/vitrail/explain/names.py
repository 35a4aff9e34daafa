"""Names that fit beside a chart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from vitrail.runtime import escape_control


def cut(text: str, most: int) -> str:
    """At most so many characters of it."""
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


def abbreviated(names: Sequence[str], most: int) -> list[str]:
    """Class names as people write them, on one line of at most so many characters, different wherever the names are.

    The end is cut off; of names that would then be equal, the middle; of names that would still be equal, all but
    the beginning and the position in the list.
    """
    plain = [escape_control(name).replace("_", " ").replace("\n", "\\n") for name in names]
    short = [cut(name, most) for name in plain]
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
