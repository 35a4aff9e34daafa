"""Unreadable images: each is logged once and counted, and too many of them are an error."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from vitrail.errors import DataError
from vitrail.runtime import warn_once

PARENT_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^\s/:]+/)+")
"""The folders of an absolute path inside a sentence."""
MAX_LISTED = 20
"""Number of unreadable images that the error names."""


class BadImages:
    """The images of a source that could not be read, with the reasons."""

    def __init__(self, name: str, total: int, max_fraction: float | None) -> None:
        self.name, self.total = name, total
        self.max_fraction = max_fraction
        """Largest fraction of all images that may be bad; None: evaluation, where none may be."""
        self.reasons: dict[str, str] = {}
        """Key of a bad image -> why it could not be read."""
        self.num_shared = 0
        """Number of them that every process has."""

    def add(self, key: str, reason: str) -> None:
        """Record a bad image and log it the first time."""
        if key not in self.reasons:
            reason = _without_folders(reason, key)
            self.reasons[key] = reason
            warn_once([f"{key} cannot be used: {reason}"], about=self.name)

    def merge(self, found_by_rank: Iterable[Mapping[str, str]]) -> None:
        """Replace the list by the union of all processes' lists, in the order of ranks."""
        self.reasons = {key: reason for found in found_by_rank for key, reason in found.items()}
        self.num_shared = len(self.reasons)

    def too_many(self, count: int) -> bool:
        return count > (self.max_fraction or 0.0) * self.total

    def raise_if_too_many(self) -> None:
        """Raise a `DataError` that lists the bad images, if there are more than allowed."""
        if not self.too_many(len(self.reasons)):
            return
        these = f"{len(self.reasons):,} of {self.total:,} images of {self.name}"
        if self.max_fraction is None:
            raise DataError(
                f"{these} cannot be read; remove or repair them, or skip them with --skip-bad "
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
    """The reason without folders of this machine, because reports with it are sent to others."""
    before, match, after = reason.partition(key)
    if match and (before[:1] in ("/", "\\") or before[1:2] == ":"):
        reason = key + after
    return PARENT_FOLDERS.sub("", reason)
