"""A folder of Parquet parts, which any number of processes write in any order, and which a killed process continues.

    manifest.json         how the rows are made and how many parts there are; written first
    part-00000.parquet    the rows of one part, in order; its metadata lists the unreadable images
    complete.json         number of rows and of unreadable images; written when all parts exist

Every file is written atomically. A part names the digest of its manifest, so parts of different runs are never mixed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vitrail.config import format_version
from vitrail.errors import CheckpointError, ConfigError, DataError, NotFoundError
from vitrail.runtime import warn_once
from vitrail.storage.atomic_write import explain_write_errors, new_file, write_json
from vitrail.storage.locks import file_lock, try_lock

MANIFEST, COMPLETE = "manifest.json", "complete.json"
METADATA_KEY = b"vitrail"
"""Key of a Parquet file's metadata; its value is a JSON object."""
PARQUET_OPTIONS: dict[str, Any] = {"compression": "zstd", "use_dictionary": ["split", "label", "error"]}
MAX_NAMED = 5
"""Ranges of parts that a message names."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a folder of parts holds when it is complete."""

    task: str
    """embed or predict."""
    num_images: int
    images_per_part: int
    num_parts: int
    settings: Mapping[str, Any]
    """How the rows are made, as plain JSON values."""
    processor: str = ""
    """The processor that the folder was begun on; another one may round differently."""

    @property
    def split_sizes(self) -> list[int]:
        """Number of images of each split, in order."""
        return [count for count, _ in self.settings["images"].values()]

    @property
    def digest(self) -> str:
        """Hash of everything but the processor."""
        return hashlib.sha256(json.dumps(self._contents(), sort_keys=True).encode()).hexdigest()[:16]

    def _contents(self) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in ("task", "num_images", "images_per_part", "num_parts")}
        return {**counts, "settings": dict(self.settings)}

    def to_dict(self) -> dict[str, Any]:
        version = {format_version.KEYS["parts"]: format_version.VERSION}
        return version | self._contents() | {"processor": self.processor}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Manifest:
        return cls(**format_version.upgrade("parts", values))

    def check_same(self, other: Manifest, where: Path, advice: str = "") -> None:
        """Raise ConfigError if `other`, the manifest found at `where`, is about other rows; name what differs."""
        mine, stored = self._contents(), other._contents()
        if (task := stored["task"]) != mine["task"]:
            advice = advice or "choose another --out"
            raise ConfigError(f"{where} was made by vitrail {task}, not {mine['task']}; {advice}.")
        check_same_settings(mine.pop("settings"), stored.pop("settings"), where, advice)
        check_same_settings(mine, stored, where, advice)


def check_same_settings(expected: Mapping[str, Any], stored: Mapping[str, Any], where: Path, advice: str = "") -> None:
    """Raise ConfigError that names the first setting which differs. What an older version did not store is accepted."""
    for name, value in expected.items():
        if (found := stored.get(name, value)) != value:
            advice = advice or "choose another --out, or delete it to start over"
            raise ConfigError(f"{where} was made with {name}={truncated(found)}, not {truncated(value)}; {advice}.")


@dataclass(frozen=True)
class PartFolder:
    """A folder of parts that is being written or is complete."""

    path: Path
    manifest: Manifest

    @classmethod
    def begin(cls, path: Path, manifest: Manifest, overwrite: bool = False) -> PartFolder:
        """Create the folder with its manifest, or continue one with the same manifest.

        With `overwrite`, parts of another manifest or of a complete folder are deleted; incomplete ones are continued.
        """
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path} is a file; choose another --out.")
        replaced = overwrite and (path / MANIFEST).exists()
        if replaced and ((path / COMPLETE).exists() or read_manifest(path).digest != manifest.digest):
            if is_being_written(path):
                raise ConfigError(_describe_lock(path))
            remove_parts(path)
        if not (path / MANIFEST).exists():
            if not replaced and _has_files(path) and not (path / MANIFEST).exists():  # others may just have begun it
                raise ConfigError(f"{path} is not empty and has no {MANIFEST}; choose another --out.")
            with explain_write_errors(path):
                path.mkdir(parents=True, exist_ok=True)
                _write_first(path, manifest)
        stored = read_manifest(path)
        manifest.check_same(stored, path)
        folder = cls(path, stored)
        folder.note_processor(manifest.processor)
        return folder

    def note_processor(self, processor: str) -> None:
        """Log it if parts are computed on another processor than the first ones; empty: unknown."""
        first = self.manifest.processor
        if first and processor and first != processor:
            warn_once(
                [f"begun on {first}, continued on {processor}: rows of the two agree to rounding"], about=str(self.path)
            )

    @classmethod
    def open(cls, path: Path) -> PartFolder:
        """A folder that exists."""
        return cls(path, read_manifest(path))

    def part_path(self, number: int) -> Path:
        digits = max(5, len(str(self.manifest.num_parts - 1)))  # so that names are in the order of numbers
        return self.path / f"part-{number:0{digits}d}.parquet"

    def missing(self, numbers: Iterable[int] | None = None) -> list[int]:
        """Those of these parts (None: of all) that do not exist yet, in order."""
        existing = {entry.name for entry in self.path.iterdir()}
        numbers = range(self.manifest.num_parts) if numbers is None else numbers
        return [n for n in numbers if self.part_path(n).name not in existing]

    def part_paths(self) -> list[Path]:
        """All parts in order; DataError if one is missing."""
        if missing := self.missing():
            raise DataError(
                f"{self.path} is not complete: {describe_missing(missing, self.manifest.num_parts)}; run the command "
                "that made it again to continue."
            )
        return [self.part_path(n) for n in range(self.manifest.num_parts)]

    def write_part(self, number: int, table: pa.Table, num_images: int, unreadable: Mapping[str, str]) -> None:
        """Write a part. Several processes may write the same part, since all write the same rows."""
        about = {"part": number, "manifest": self.manifest.digest, "num_images": num_images}
        schema = table.schema.with_metadata({METADATA_KEY: json.dumps(about | {"unreadable": dict(unreadable)})})
        try:
            with new_file(self.part_path(number), overwrite=True) as temporary:
                pq.write_table(table.cast(schema), temporary, **PARQUET_OPTIONS)
        except CheckpointError:
            if not self.part_path(number).exists():  # else another process has written it, and may have called `finish`
                raise

    def read_part_metadata(self, number: int) -> dict[str, Any]:
        """A part's metadata and its number of rows, checked against the manifest."""
        path = self.part_path(number)
        try:
            footer = pq.read_metadata(path)
            about = json.loads(footer.metadata[METADATA_KEY])
            rows = footer.num_rows
            unexpected = about["part"] != number or about["manifest"] != self.manifest.digest
        except (OSError, pa.ArrowInvalid, KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{path} is damaged ({type(error).__name__}); delete it and run the command again."
            ) from None
        if unexpected:
            raise DataError(f"{path} belongs to another run than {self.path / MANIFEST}; delete it and run again.")
        return about | {"num_rows": rows}

    def part_sizes(self) -> list[int]:
        """Number of images of each part: a part never spans two splits."""
        counts, size = self.manifest.split_sizes, self.manifest.images_per_part
        return [min(size, count - first) for count in counts for first in range(0, count, size)]

    def summarize(self, numbers: Iterable[int]) -> tuple[int, dict[str, str]]:
        """Number of rows of these parts, and their unreadable images; DataError if a part is not what it should be."""
        rows, unreadable = 0, dict[str, str]()
        for number in numbers:
            about = self.read_part_metadata(number)
            rows += about["num_rows"]
            add_unreadable(unreadable, about)
        return rows, unreadable

    def finish(self) -> tuple[int, dict[str, str]]:
        """Check all parts, which must exist, and write complete.json; returns what `summarize` does."""
        rows, unreadable = self.summarize(range(self.manifest.num_parts))
        for leftover in self.path.glob(".part-*.tmp"):  # of killed processes
            leftover.unlink(missing_ok=True)
        summary = {"num_parts": self.manifest.num_parts, "num_rows": rows, "num_unreadable": len(unreadable)}
        if _read_json(self.path / COMPLETE) != summary:
            write_json(self.path / COMPLETE, summary, overwrite=True)
        return rows, unreadable

    @property
    def is_complete(self) -> bool:
        return (self.path / COMPLETE).exists()

    def count_attempt(self, number: int) -> int:
        """Record that a part is being computed; returns how often that was recorded."""
        with self._attempts_path(number).open("ab") as file:
            file.write(b".")
            return file.tell()

    def forget_attempts(self, number: int | None = None) -> None:
        """Delete the record of a part, or of all."""
        for path in self.path.glob(".attempts-*") if number is None else [self._attempts_path(number)]:
            path.unlink(missing_ok=True)

    def _attempts_path(self, number: int) -> Path:
        return self.path / f".attempts-{number:05d}"

    @contextmanager
    def lock(self, name: str = "") -> Iterator[None]:
        """Hold the lock of this shard (of everything, without a name): two writers would do all the work twice."""
        locked = _describe_lock(self.path, name)
        with explain_write_errors(self.path):
            try:
                file = (self.path / f".lock{f'-{name}'.replace('/', '-of-') * bool(name)}").open("a")
            except FileNotFoundError:  # the other process has just joined the parts
                raise ConfigError(locked) from None
        with file:
            if not try_lock(file.fileno()) or not self.path.exists():
                raise ConfigError(locked)
            yield


def is_being_written(path: Path) -> bool:
    """Whether a process holds one of the locks of a folder of parts."""
    for lock in path.glob(".lock*"):
        with suppress(FileNotFoundError), lock.open("a") as file:
            if not try_lock(file.fileno()):
                return True
    return False


def _describe_lock(path: Path, name: str = "") -> str:
    """The error message for a folder that another process writes; `name`: its shard."""
    shown = path.with_name(path.name.removesuffix(".parts"))
    shard = f" (shard {name})" if name else ""
    return f"another process is writing {shown}{shard}; wait for it to finish, or choose another --out."


def add_unreadable(all_parts: dict[str, str], about: Mapping[str, Any]) -> None:
    """Add the unreadable images of a part to those of other parts, which may have images of the same name."""
    for key, reason in about["unreadable"].items():
        all_parts[key if key not in all_parts else f"{key} (part {about['part']})"] = reason


def file_metadata(settings: Mapping[str, Any], unreadable: Mapping[str, str]) -> dict[str, Any]:
    """Metadata of the file that all parts make."""
    return {format_version.KEYS["features"]: format_version.VERSION, **settings, "unreadable": dict(unreadable)}


def read_file_metadata(path: Path) -> dict[str, Any]:
    """The settings a file was made with, and its unreadable images."""
    if not path.exists():
        raise NotFoundError(f"there is no file {path}; create it with vitrail embed.")
    try:
        metadata = (pq.read_schema(path).metadata or {}).get(METADATA_KEY)
    except (OSError, pa.ArrowInvalid):
        metadata = None
    if metadata is None:
        raise DataError(f"{path} is not a feature file; create one with vitrail embed.")
    return format_version.upgrade("features", json.loads(metadata))


def join_parts(parts: Sequence[Path], metadata: Mapping[str, Any], out: Path, *, folder: Path | None = None) -> None:
    """Write the rows of Parquet files into one, with this metadata; one part is in memory at a time."""
    schema = pq.read_schema(parts[0]).with_metadata({METADATA_KEY: json.dumps(metadata)})
    with (
        new_file(out, overwrite=True, folder=folder) as temporary,
        pq.ParquetWriter(temporary, schema, **PARQUET_OPTIONS) as writer,
    ):
        for part in parts:  # one at a time: there may be more parts than files may be open
            with pq.ParquetFile(part) as file:
                for group in range(file.num_row_groups):
                    writer.write_table(file.read_row_group(group).replace_schema_metadata(schema.metadata))


def _write_first(path: Path, manifest: Manifest) -> None:
    """Write the manifest unless another process, which begins the same folder, is faster."""
    lock = path / ".lock-begin"
    with file_lock(lock):
        if not (path / MANIFEST).exists():
            write_json(path / MANIFEST, manifest.to_dict())
        with suppress(OSError):  # from now on nobody needs it; Windows cannot delete an open file
            lock.unlink(missing_ok=True)


def _has_files(path: Path) -> bool:
    """Whether a folder exists and has files that are not hidden."""
    return path.is_dir() and any(not entry.name.startswith(".") for entry in path.iterdir())


def read_manifest(path: Path) -> Manifest:
    """The manifest of a folder of parts."""
    if not path.is_dir():
        raise NotFoundError(f"there is no folder {path}; create it with vitrail embed or vitrail predict.")
    values = _read_json(path / MANIFEST)
    try:
        if values is not None:
            return Manifest.from_dict(values)
    except (TypeError, KeyError):
        pass
    raise DataError(f"{path} has no readable {MANIFEST}: vitrail embed or vitrail predict did not make it.")


def remove_parts(path: Path) -> None:
    """Delete what a folder of parts consists of, and nothing else."""
    with explain_write_errors(path):
        for name in (COMPLETE, MANIFEST):  # first, so that a killed call leaves nothing that looks complete
            (path / name).unlink(missing_ok=True)
        for pattern in ("part-*.parquet", ".part-*.tmp", ".attempts-*", ".lock*"):
            for file in path.glob(pattern):
                file.unlink(missing_ok=True)


def delete_folder(path: Path) -> None:
    """Delete a folder of parts that have been joined."""
    shutil.rmtree(path, ignore_errors=True)


def delete_leftovers(path: Path) -> None:
    """Delete the folder of parts of a process that was killed after it had joined them."""
    if not is_being_written(path):
        delete_folder(path)


def format_ranges(numbers: Collection[int]) -> str:
    """[0, 1, 2, 5] -> "0 to 2, 5"."""
    runs = [list(run) for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])]
    shown = [f"{run[0][1]} to {run[-1][1]}" if len(run) > 1 else str(run[0][1]) for run in runs]
    return ", ".join(shown[:MAX_NAMED]) + (f" and {len(shown) - MAX_NAMED} more" if len(shown) > MAX_NAMED else "")


def describe_missing(missing: Sequence[int], total: int) -> str:
    """parts 3, 5 to 7 of 12 are missing."""
    one = len(missing) == 1
    return f"part{'s' * (not one)} {format_ranges(missing)} of {total:,} {'is' if one else 'are'} missing"


def truncated(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _read_json(path: Path) -> Any:
    with suppress(OSError, ValueError):
        return json.loads(path.read_text(encoding="utf-8"))
    return None
