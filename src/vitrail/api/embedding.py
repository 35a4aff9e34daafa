"""`vitrail embed`: from a model and images to a file of features, killed and resumed at will."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.api.exporting import Running
from vitrail.api.model import Model
from vitrail.config import DataConfig
from vitrail.data.loader import Loader
from vitrail.data.sources import open_source_splits
from vitrail.data.sources.base import Source, SourceSplits
from vitrail.data.sources.subset import Subset
from vitrail.errors import ConfigError, DataError, did_you_mean
from vitrail.evaluate.feature_file import FeatureFile, feature_table
from vitrail.evaluate.features import FeatureSpec, extract_batches, image_batches, resolve_features, weights_checksum
from vitrail.runtime import warn_once
from vitrail.weights.model_info import strip_local_folders

SPLITS = ("train", "validation", "test", "all")
DTYPES = ("float32", "float16")
IMAGES_PER_PART = 1024
"""Images about in one part, and so lost at most when a run is killed."""


@dataclass(frozen=True)
class EmbedResult:
    """A file of features that is complete."""

    path: Path
    num_images: int
    """Rows in it."""
    width: int
    features: str
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """Images that are not in it, and why."""
    written: bool = True
    """Whether anything had to be done."""


def embed(
    model: Model,
    data: str | DataConfig,
    out: str | Path,
    *,
    split: str = "all",
    spec: FeatureSpec | None = None,
    dtype: str = "float32",
    normalize: bool = False,
    batch_size: int = 64,
    images_per_part: int = IMAGES_PER_PART,
    overwrite: bool = False,
    started: Callable[[int, int], None] | None = None,
    advance: Callable[[int], None] | None = None,
) -> EmbedResult:
    """Features of every image of some data, with its key, in a Parquet file.

    The same call goes on after an interruption, and gives the same file. `started` hears how many
    images there are and how many are done already, `advance` of each few more.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"features cannot be kept as {dtype!r}{did_you_mean(dtype, DTYPES)}")
    config = DataConfig(source=data) if isinstance(data, str) else data
    spec = _resolve_spec(spec or FeatureSpec(), model)
    sources = _select_splits(open_source_splits(config, require_labels=False), config, split)
    pieces = list(_part_ranges(sources, max(images_per_part // batch_size, 1) * batch_size))
    file = FeatureFile(
        Path(out).expanduser(), _settings(model, config, split, spec, sources, dtype, normalize, batch_size)
    )
    total = sum(len(source) for source in sources.values())
    if file.begin(overwrite):
        with file.lock():
            missing = [n for n in range(len(pieces)) if not file.part_path(n).exists()]
            if started is not None:
                started(total, total - sum(len(pieces[n][1]) for n in missing))
            _write_missing_parts(model, sources, pieces, missing, file, spec, batch_size, dtype, normalize, advance)
            file.join(len(pieces))
        written = True
    else:
        warn_once([f"{file.path} is complete already"])
        written = False
    return _result(file.path, spec, written)


def _resolve_spec(spec: FeatureSpec, model: Model) -> FeatureSpec:
    """Where features are taken; an exported file gives its own or none."""
    if not isinstance(model, Running):
        return resolve_features(spec, model.net)
    model.check_features()
    if spec != FeatureSpec():
        model.check_has_network()
    return spec


def _extract_batches(model: Model, batches: Loader, spec: FeatureSpec) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each batch the numbers of its readable images, and their features."""
    if not isinstance(model, Running):
        yield from extract_batches(model.net, batches, preprocess=model.preprocess, spec=spec)
        return
    for batch in batches:
        kept = (batch.weights > 0).cpu()
        yield batch.indices[kept], model.outputs(batch.images)[kept]


def _result(path: Path, spec: FeatureSpec, written: bool) -> EmbedResult:
    import pyarrow.parquet as pq

    from vitrail.evaluate.feature_file import read_metadata

    width = pq.read_schema(path).field("embedding").type.list_size
    return EmbedResult(
        path, pq.read_metadata(path).num_rows, width, str(spec), read_metadata(path)["unreadable"], written
    )


def _select_splits(parts: SourceSplits, config: DataConfig, split: str) -> dict[str, Source]:
    """The parts that were asked for, by name."""
    if split not in SPLITS:
        raise ConfigError(f"no split is called {split!r}{did_you_mean(split, SPLITS)}")
    if hasattr(parts.train, "samples"):
        raise DataError(f"{config.source} is a stream, whose images have no numbers to go on by; try shards:.")
    warn_once(parts.notes, about=config.source)
    there = {"train": parts.train, "validation": parts.validation, "test": parts.test}
    there = {name: source for name, source in there.items() if source is not None and len(source)}
    if split != "all" and split not in there:
        raise DataError(f"{config.source} has no {split} split; it has {', '.join(there) or 'no images at all'}.")
    if not there:
        raise DataError(f"{config.source} has no images.")
    return there if split == "all" else {split: there[split]}


def _part_ranges(sources: Mapping[str, Source], size: int) -> Iterator[tuple[str, range]]:
    """The images of each part of the file, always the same ones: whole batches."""
    for split, source in sources.items():
        yield from ((split, range(i, min(i + size, len(source)))) for i in range(0, len(source), size))


def _write_missing_parts(
    model: Model,
    sources: Mapping[str, Source],
    pieces: list[tuple[str, range]],
    missing: list[int],
    file: FeatureFile,
    spec: FeatureSpec,
    batch_size: int,
    dtype: str,
    normalize: bool,
    advance: Callable[[int], None] | None,
) -> None:
    """Every missing part of the file, split by split, through one loader each."""
    for split, source in sources.items():
        wanted = [n for n in missing if pieces[n][0] == split]
        if not wanted:
            continue
        numbers = np.concatenate([np.asarray(pieces[n][1]) for n in wanted])
        rest = Subset(source, numbers)
        ends = dict(zip(np.cumsum([len(pieces[n][1]) for n in wanted]).tolist(), wanted, strict=True))
        seen, waiting = 0, list[tuple[Tensor, Tensor]]()
        told: set[str] = set()
        with image_batches(rest, model.preprocess, batch_size=batch_size, device=model.device) as batches:
            for indices, values in _extract_batches(model, batches, spec):
                waiting.append(
                    (torch.from_numpy(numbers)[indices], F.normalize(values, dim=1) if normalize else values)
                )
                step = min(batch_size, len(rest) - seen)
                seen += step
                if seen in ends:
                    index, found = (torch.cat(parts) for parts in zip(*waiting, strict=True))
                    bad = {key: why for key, why in batches.bad.items() if key not in told}
                    # Workers are ahead: only what lies in this part is told in it.
                    mine = {source.key(i) for i in pieces[ends[seen]][1]} if bad else set()
                    bad = {key: why for key, why in bad.items() if key in mine}
                    told |= bad.keys()
                    file.write_part(ends[seen], feature_table(source, split, index, found, dtype), bad)
                    waiting = []
                if advance is not None:
                    advance(step)


def _settings(
    model: Model,
    config: DataConfig,
    split: str,
    spec: FeatureSpec,
    sources: Mapping[str, Source],
    dtype: str,
    normalize: bool,
    batch_size: int,
) -> dict[str, Any]:
    """All that decides the file's content."""
    first = next(iter(sources.values()))
    said = {
        "model": model.info.title,
        "weights": model.fingerprint if isinstance(model, Running) else weights_checksum(model.net),
        "features": str(spec),
        "preprocess": model.info.preprocess.to_dict(),
        "data": strip_local_folders(config.source),
        "data_digest": f"{zlib.crc32(config.source.encode(errors='surrogateescape')):08x}",
        "split": split,
        "images": {name: [len(source), _keys_checksum(source)] for name, source in sources.items()},
        "labels": list(first.labels),
        "dtype": dtype,
        "normalize": normalize,
        "batch_size": batch_size,
        "vitrail": version("vitrail"),
    }
    return dict(json.loads(json.dumps(said)))  # as it will be read back


def _keys_checksum(source: Source) -> str:
    """Eight letters that differ where images have come, gone or changed places."""
    found = 0
    for i in range(len(source)):
        found = zlib.crc32(source.key(i).encode(errors="surrogateescape") + b"\n", found)
    return f"{found:08x}"
