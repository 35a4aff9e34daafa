"""Folders of parts that several machines wrote -> one complete folder or file."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq

from vitrail.bulk.running import BulkResult, file_result, folder_result, is_file
from vitrail.errors import ConfigError, DataError
from vitrail.storage.atomic_write import new_file
from vitrail.storage.part_folder import PartFolder, add_unreadable, describe_missing, file_metadata, join_parts


def join(
    folders: Sequence[str | Path], out: str | Path, *, task: str | None = None, overwrite: bool = False
) -> BulkResult:
    """Join folders of parts into a folder or a Parquet file.

    All must have the same settings. A part that is in several folders must be the same in all of them, and every part
    must be in one. `task`: embed or predict, if the parts must be of that command.
    """
    opened = [PartFolder.open(Path(folder).expanduser()) for folder in folders]
    first, out = opened[0], Path(out).expanduser()
    if task is not None and first.manifest.task != task:
        raise ConfigError(f"{first.path} was made by vitrail {first.manifest.task}; join it with that command.")
    for other in opened[1:]:
        first.manifest.check_same(other.manifest, other.path, f"{first.path} has the latter, so they cannot be joined")
    holders = {
        n: [folder for folder in opened if folder.part_path(n).exists()] for n in range(first.manifest.num_parts)
    }
    if missing := [n for n, found in holders.items() if not found]:
        where = ", ".join(str(folder.path) for folder in opened)
        raise DataError(f"{describe_missing(missing, len(holders))} in {where}; compute them first, with --shard.")
    unreadable: dict[str, str] = {}
    for number, (keeper, *others) in holders.items():
        add_unreadable(unreadable, keeper.read_part_metadata(number))
        for other in others:
            other.read_part_metadata(number)
            if not _same_rows(keeper.part_path(number), other.part_path(number)):
                raise DataError(
                    f"part {number} differs between {keeper.path} and {other.path}, which other processors or versions "
                    "may have computed; delete one of them."
                )
    parts = [found[0].part_path(number) for number, found in holders.items()]
    if is_file(out):
        if out.exists() and not overwrite:
            raise ConfigError(f"{out} already exists; choose another --out, or pass --overwrite.")
        out.parent.mkdir(parents=True, exist_ok=True)
        join_parts(parts, file_metadata(first.manifest.settings, unreadable), out)
        return file_result(out)
    joined = PartFolder.begin(out, first.manifest, overwrite and all(out.resolve() != f.path.resolve() for f in opened))
    for number in joined.missing():
        with new_file(joined.part_path(number), overwrite=True) as temporary:
            shutil.copyfile(parts[number], temporary)
    return folder_result(joined, range(len(parts)))


def _same_rows(a: Path, b: Path) -> bool:
    """Whether two parts have the same rows and unreadable images; the files of two versions of Arrow may differ."""
    if a.samefile(b) or a.read_bytes() == b.read_bytes():
        return True
    tables = [pq.read_table(path) for path in (a, b)]
    return bool(tables[0].equals(tables[1], check_metadata=True))
