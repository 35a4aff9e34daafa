"""Images that cannot be read: named once each, counted, and refused where there are too many."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from vitrail.errors import DataError
from vitrail.runtime import warn_once

PARENT_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^\s/:]+/)+")
"""Of an absolute path in a sentence, all but its last part."""
MAX_LISTED = 20
"""So many unreadable images are named when there are too many to go on."""


class BadImages:
    """Images of a source that could not be read."""

    def __init__(self, name: str, total: int, max_fraction: float | None) -> None:
        self.name, self.total = name, total
        self.max_fraction = max_fraction
        """Of all images that may be bad; None: of those to measure on, none."""
        self.reasons: dict[str, str] = {}
        self.num_shared = 0
        """So many of them every process knows."""

    def add(self, key: str, reason: str) -> None:
        """Remember it, and say so the first time."""
        if key not in self.reasons:
            reason = _without_folders(reason, key)
            self.reasons[key] = reason
            warn_once([f"{key} cannot be used: {reason}"], about=self.name)

    def merge(self, found_by_rank: Iterable[Mapping[str, str]]) -> None:
        """What each process has found, in the order of ranks: then all of them know the same."""
        self.reasons = {key: reason for found in found_by_rank for key, reason in found.items()}
        self.num_shared = len(self.reasons)

    def too_many(self, count: int) -> bool:
        return count > (self.max_fraction or 0.0) * self.total

    def raise_if_too_many(self) -> None:
        """Refuse more of them than there may be, with the list."""
        if not self.too_many(len(self.reasons)):
            return
        these = f"{len(self.reasons):,} of {self.total:,} images of {self.name}"
        if self.max_fraction is None:
            raise DataError(
                f"{these} cannot be measured on; remove or repair them, or leave them out with --skip-bad "
                f"(data.skip_bad=true):{self._listing(len(self.reasons))}"
            )
        raise DataError(
            f"{these} cannot be read, more than data.max_bad_fraction={self.max_fraction:g} allows; remove or repair "
            f"them, or raise that limit (continue with --resume):{self._listing(MAX_LISTED)}"
        )

    def _listing(self, limit: int) -> str:
        lines = [f"{key}: {reason}" for key, reason in list(self.reasons.items())[:limit]]
        if len(self.reasons) > limit:
            lines.append(f"and {len(self.reasons) - limit:,} more")
        return "".join(f"\n  {line}" for line in lines)


def _without_folders(reason: str, key: str) -> str:
    """A reason without the folders of this machine: it is written into files that are sent to others."""
    before, found, after = reason.partition(key)
    if found and (before[:1] in ("/", "\\") or before[1:2] == ":"):
        reason = key + after
    return PARENT_FOLDERS.sub("", reason)
