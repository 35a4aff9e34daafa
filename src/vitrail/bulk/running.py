"""`embed` and `predict`: compute the missing parts of a job, in this process or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pyarrow.parquet as pq

from vitrail.bulk.job import Job, ModelSource, OpenJob
from vitrail.bulk.outputs import FeatureOutput, Output, PredictionOutput
from vitrail.bulk.parts import IMAGES_PER_PART
from vitrail.bulk.shard_selection import Shard, parse_shard
from vitrail.config import DataConfig
from vitrail.engine_model import EngineModel
from vitrail.errors import ConfigError
from vitrail.evaluation.features import FeatureSpec
from vitrail.model import Model
from vitrail.runtime import warn_once
from vitrail.runtime.ray_cluster import check_address
from vitrail.storage.part_folder import (
    Manifest,
    PartFolder,
    check_same_settings,
    delete_folder,
    delete_leftovers,
    file_metadata,
    join_parts,
    read_file_metadata,
)

FILE_SUFFIXES = (".parquet", ".pq")
"""Suffixes of a file; any other name is a folder of parts."""


@dataclass(frozen=True)
class BulkResult:
    """A folder of parts or a file, complete or not."""

    path: Path
    num_images: int
    """Number of rows: of all parts if the result is complete, else of the parts of this shard."""
    width: int
    """Number of features or of classes in a row."""
    settings: Mapping[str, Any]
    """How the rows are made."""
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """Images that could not be read, and why."""
    missing: tuple[int, ...] = ()
    """Numbers of the parts that do not exist yet: other shards compute them."""
    num_parts: int = 1
    written: bool = True
    """False if nothing was left to do."""

    @property
    def features(self) -> str:
        """The `FeatureSpec`, as text; empty for predictions."""
        return str(self.settings.get("features", ""))


class Executor(Protocol):
    """Computes and writes parts."""

    def __call__(self, folder: PartFolder, numbers: Sequence[int], advance: Callable[[int], None]) -> None:
        """Compute and write the parts of these numbers; call `advance(n)` after each n images."""


def embed(
    model: Model | ModelSource | str | Path,
    data: str | DataConfig,
    out: str | Path,
    *,
    spec: FeatureSpec | None = None,
    dtype: str = "float32",
    normalize: bool = False,
    **options: Any,
) -> BulkResult:
    """Write the features of every image of a data set, one row per readable image.

    `out` is a Parquet file, or a folder that keeps the parts. After an interruption the same call continues and writes
    the same bytes. `options` are those of `run`: split, batch_size, threads, shard, on, overwrite, ...
    """
    output = FeatureOutput(spec=spec or FeatureSpec(), dtype=dtype, normalize=normalize)
    return run(model, data, output, out, **options)


def predict(
    model: Model | ModelSource | str | Path, data: str | DataConfig, out: str | Path, *, top: int = 5, **options: Any
) -> BulkResult:
    """Write the `top` best classes of every image of a data set, one row per image; otherwise as `embed`."""
    return run(model, data, PredictionOutput(top=top), out, **options)


def run(
    model: Model | ModelSource | str | Path,
    data: str | DataConfig,
    output: Output,
    out: str | Path,
    *,
    opened: Model | None = None,
    split: str = "all",
    batch_size: int = 64,
    images_per_part: int = IMAGES_PER_PART,
    threads: int = 1,
    shard: str = "1/1",
    on: str | None = None,
    actors: int | None = None,
    device: str = "auto",
    overwrite: bool = False,
    started: Callable[[int, int], None] = lambda total, done: None,
    advance: Callable[[int], None] = lambda count: None,
) -> BulkResult:
    """Compute the missing parts of a job and write them to `out`.

    opened    the model that `model` stands for, if it has been loaded already
    threads   torch's threads for each batch on a CPU, which computes as many batches at a time as the cores allow
    shard     "2/8": only the second eighth of the parts; "auto": as the job array says
    on        "ray" or "ray://ADDRESS": on a Ray cluster, by `actors` actors (None: as its resources allow), on `device`
    started   called first, with the number of images and of those that are done; then `advance(n)` after each n images
    """
    chosen, out = parse_shard(shard), Path(out).expanduser()
    _check_options(out, chosen, on, actors, overwrite)
    source = ModelSource(model) if isinstance(model, str | Path) else model if isinstance(model, ModelSource) else None
    config = DataConfig(source=data) if isinstance(data, str) else data
    job = Job(
        model=source, data=config, output=output, split=split, batch_size=batch_size,
        images_per_part=images_per_part, threads=threads,
    )  # fmt: skip
    if isinstance(model, Model):
        opened = model
    elif opened is None:
        assert source is not None
        opened = source.open()
    if on is None:
        open_job = job.open(opened)
        return _run(open_job.manifest(), out, chosen, overwrite, started, advance, LocalExecutor(open_job))
    from vitrail.bulk.ray_pipeline import RayExecutor

    exported = isinstance(opened, EngineModel)  # runs on CPUs, with all cores of a machine
    with RayExecutor(job, on, actors, "cpu" if exported and device == "auto" else device, exported) as executor:
        manifest = job.open(opened).manifest(executor.device)
        del model, opened  # the actors load it themselves
        return _run(manifest, out, chosen, overwrite, started, advance, executor)


@dataclass(frozen=True)
class LocalExecutor:
    """Computes parts in this process."""

    job: OpenJob

    def __call__(self, folder: PartFolder, numbers: Sequence[int], advance: Callable[[int], None]) -> None:
        parts = self.job.parts
        for computed in self.job.computer().compute((parts[n] for n in numbers), advance):
            folder.write_part(computed.part.number, computed.table, len(computed.part), computed.unreadable)


def _run(
    manifest: Manifest,
    out: Path,
    shard: Shard,
    overwrite: bool,
    started: Callable[[int, int], None],
    advance: Callable[[int], None],
    execute: Executor,
) -> BulkResult:
    """Compute the missing parts of a shard; join them into a file if `out` is one."""
    parts_path = out.with_name(f"{out.name}.parts") if is_file(out) else out
    if is_file(out) and _is_complete_file(out, manifest, overwrite):
        delete_leftovers(parts_path)
        warn_once([f"{out} is already complete"])
        return file_result(out, written=False)
    folder = PartFolder.begin(parts_path, manifest, overwrite)
    with folder.lock("" if shard.count == 1 else str(shard)):
        numbers = shard.select(manifest.num_parts)
        missing = folder.missing(numbers)
        sizes = folder.part_sizes()
        total = sum(sizes[n] for n in numbers)
        started(total, total - sum(sizes[n] for n in missing))
        if missing:
            execute(folder, missing, advance)
        elif not is_file(out):
            warn_once([f"{out} is already complete" if shard.count == 1 else f"shard {shard} of {out} is complete"])
        if not is_file(out):
            return folder_result(folder, numbers, written=bool(missing))
        _, unreadable = folder.summarize(range(manifest.num_parts))
        join_parts(folder.part_paths(), file_metadata(manifest.settings, unreadable), out, folder=parts_path)
        delete_folder(parts_path)
    return file_result(out)


def _is_complete_file(out: Path, manifest: Manifest, overwrite: bool) -> bool:
    """Whether the file exists and is to be kept; ConfigError if it was made with other settings."""
    if out.is_dir():
        raise ConfigError(f"{out} is a folder; give the name of a file in it, or a folder without the suffix.")
    if overwrite or not out.exists():
        return False
    check_same_settings(manifest.settings, read_file_metadata(out), out)
    return True


def folder_result(folder: PartFolder, numbers: Sequence[int], written: bool = True) -> BulkResult:
    """The result of a folder of parts, of which `numbers` exist."""
    missing = folder.missing()
    rows, unreadable = folder.summarize(numbers) if missing else folder.finish()
    width = _width(folder.part_path(numbers[0])) if len(numbers) else 0
    settings, total = folder.manifest.settings, folder.manifest.num_parts
    return BulkResult(folder.path, rows, width, settings, unreadable, tuple(missing), total, written)


def file_result(path: Path, written: bool = True) -> BulkResult:
    """The result of a complete file."""
    metadata = read_file_metadata(path)
    unreadable = metadata.pop("unreadable")
    return BulkResult(path, pq.read_metadata(path).num_rows, _width(path), metadata, unreadable, written=written)


def _width(path: Path) -> int:
    schema = pq.read_schema(path)
    name = "embedding" if "embedding" in schema.names else "top_scores"
    return int(schema.field(name).type.list_size)


def _check_options(out: Path, shard: Shard, on: str | None, actors: int | None, overwrite: bool) -> None:
    if shard.count > 1 and is_file(out):
        raise ConfigError(f"--shard needs a folder, to which all shards write; try --out {out.with_suffix('')}/.")
    if shard.count > 1 and overwrite:
        raise ConfigError("--overwrite would delete the parts of the other shards; delete the folder once instead.")
    if on is not None:
        check_address(on)
    if actors is not None and on is None:
        raise ConfigError("--actors needs --on ray.")
    if actors is not None and actors < 1:
        raise ConfigError(f"--actors {actors}: expected at least 1.")


def is_file(out: Path) -> bool:
    """Whether the output is one file; otherwise it is a folder of parts."""
    return out.suffix.lower() in FILE_SUFFIXES
