"""Folders of parts for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from vitrail.storage.part_folder import Manifest, PartFolder


def begin_folder(path: Path, settings: dict[str, Any], images_per_part: int = 3, overwrite: bool = False) -> PartFolder:
    """Begin a folder of parts with these settings, of which `task` and `images` are needed."""
    counts = [count for count, _ in settings["images"].values()]
    manifest = Manifest(
        task=settings["task"],
        num_images=sum(counts),
        images_per_part=images_per_part,
        num_parts=sum(-(-count // images_per_part) for count in counts),
        settings=settings,
    )
    return PartFolder.begin(path, manifest, overwrite)


def numbers_folder(
    path: Path, count: int = 7, parts: range | None = None, overwrite: bool = False, **settings: Any
) -> PartFolder:
    """A folder of parts of three images each, with the column `n`; `parts`: those that exist, by default all."""
    folder = begin_folder(
        path,
        {"task": "embed", "images": {"train": [count, "00000000"]}, "features": "last"} | settings,
        overwrite=overwrite,
    )
    for number in range(folder.manifest.num_parts) if parts is None else parts:
        write_numbers(folder, number)
    return folder


def write_numbers(folder: PartFolder, number: int, unreadable: dict[str, str] | None = None) -> None:
    """Write a part of `numbers_folder`."""
    rows = range(3 * number, min(3 * number + 3, folder.manifest.num_images))
    table = pa.table(
        {
            "key": [f"{row}.png" for row in rows],
            "embedding": pa.FixedSizeListArray.from_arrays(pa.array([float(n) for row in rows for n in (row, 0)]), 2),
        }
    )
    folder.write_part(number, table, len(rows), unreadable or {})
