"""The cache folder for datasets."""

from __future__ import annotations

import os
import sys
from pathlib import Path

SYSTEM_DIR = Path("/usr/share/datasets")
"""Folder of the datasets that Debian packages install."""


def cache_dir() -> Path:
    """$VITRAIL_DATA, else `vitrail/data` in the user's cache folder."""
    if configured := os.environ.get("VITRAIL_DATA"):
        return Path(configured).expanduser()
    if sys.platform == "win32":
        home = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        home = "~/Library/Caches"
    else:
        home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "vitrail" / "data"


def display_path(path: Path) -> str:
    """The path as text, with ~ for the home folder."""
    home = Path.home()
    return f"~/{path.relative_to(home).as_posix()}" if path.is_relative_to(home) and path != home else str(path)
