"""Images that cannot be read: named once each, counted, and refused where there are too many."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from vitrail.errors import DataError
from vitrail.runtime import say

FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^\s/:]+/)+")
"""Of an absolute path in a sentence, all but its last part."""
NAMED = 20
"""So many unreadable images are named when there are too many to go on."""


class Bad:
    """Images of a source that could not be read."""

    def __init__(self, name: str, total: int, share: float | None) -> None:
        self.name, self.total = name, total
        self.share = share
        """Of all images that may be bad; None: of those to measure on, none."""
        self.found: dict[str, str] = {}
        self.told = 0
        """So many of them every process knows."""

    def add(self, key: str, reason: str) -> None:
        """Remember it, and say so the first time."""
        if key not in self.found:
            reason = _portable(reason, key)
            self.found[key] = reason
            say([f"{key} cannot be used: {reason}"], about=self.name)

    def learn(self, told: Iterable[Mapping[str, str]]) -> None:
        """What each process has found, in the order of ranks: then all of them know the same."""
        self.found = {key: reason for found in told for key, reason in found.items()}
        self.told = len(self.found)

    def too_many(self, count: int) -> bool:
        return count > (self.share or 0.0) * self.total

    def judge(self) -> None:
        """Refuse more of them than there may be, with the list."""
        if not self.too_many(len(self.found)):
            return
        these = f"{len(self.found):,} of {self.total:,} images of {self.name}"
        if self.share is None:
            raise DataError(
                f"{these} cannot be measured on; remove or repair them, or leave them out with --skip-bad "
                f"(data.skip_bad=true):{self._list(len(self.found))}"
            )
        raise DataError(
            f"{these} cannot be used, more than data.max_bad_fraction={self.share:g} allows; remove or repair them, "
            f"or raise it (--resume goes on):{self._list(NAMED)}"
        )

    def _list(self, most: int) -> str:
        lines = [f"{key}: {reason}" for key, reason in list(self.found.items())[:most]]
        if len(self.found) > most:
            lines.append(f"and {len(self.found) - most:,} more")
        return "".join(f"\n  {line}" for line in lines)


def _portable(reason: str, key: str) -> str:
    """A reason without the folders of this machine: it is written into files that are sent to others."""
    before, found, after = reason.partition(key)
    if found and (before[:1] in ("/", "\\") or before[1:2] == ":"):
        reason = key + after
    return FOLDERS.sub("", reason)
