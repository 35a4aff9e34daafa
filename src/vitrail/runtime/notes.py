"""Notes to the user: assumptions and choices, each logged once to the logger "vitrail" at level WARNING.

A plain script shows them; `logging.getLogger("vitrail").setLevel("ERROR")` silences them.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

CONTROL_CHARS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Characters that move a terminal's cursor, change its state or reverse its text; not tab and newline."""

log = logging.getLogger("vitrail")
_logged: set[tuple[str, str]] = set()
_suppressed: set[str] = set()


def escape_control(text: str) -> str:
    """Replace control characters with escapes (`\\x1b[31m`): names read from a file must not control a terminal."""
    return CONTROL_CHARS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def warn_once(notes: Iterable[str], about: str = "") -> None:
    """Log each note at level WARNING, prefixed with `about`; each pair of `about` and note is logged once."""
    for note in notes:
        if note in _suppressed:
            continue
        note = escape_control(note if note.endswith((".", "…")) else f"{note}.")
        if (about, note) not in _logged:
            _logged.add((about, note))
            log.warning("%s", f"{escape_control(about)}: {note}" if about else note, extra={"note": note})


@contextmanager
def suppress_note(note: str) -> Iterator[None]:
    """Do not log this note inside the block: the caller does not use what it is about."""
    _suppressed.add(note)
    try:
        yield
    finally:
        _suppressed.discard(note)


def is_main_process() -> bool:
    """Whether this process prints to the user: always, except for ranks above 0 under torchrun."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def log_on_main_process() -> Iterator[None]:
    """Inside the block only the main process logs, since all processes would log the same."""
    before, log.disabled = log.disabled, log.disabled or not is_main_process()
    try:
        yield
    finally:
        log.disabled = before
