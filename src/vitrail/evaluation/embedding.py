"""`vitrail embed`: write the features of images to a Parquet file; can be killed and resumed."""

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

from vitrail.config import DataConfig
from vitrail.data.loader import Loader
from vitrail.data.sources import open_source_splits
from vitrail.data.sources.base import Source, SourceSplits
from vitrail.data.sources.subset import Subset
from vitrail.engine_model import EngineModel
from vitrail.errors import ConfigError, DataError, did_you_mean
from vitrail.evaluation.feature_file import FeatureFile, feature_table
from vitrail.evaluation.features import FeatureSpec, extract_batches, image_batches, resolve_features
from vitrail.model import Model
from vitrail.runtime import warn_once
from vitrail.weights.checksum import weights_checksum
from vitrail.weights.model_info import strip_local_folders

SPLITS = ("train", "validation", "test", "all")
DTYPES = ("float32", "float16")
IMAGES_PER_PART = 1024
"""Approximate number of images in a part, the most that is lost when a run is killed."""


@dataclass(frozen=True)
class EmbedResult:
    """A complete feature file."""

    path: Path
    num_images: int
    """Number of rows."""
    width: int
    features: str
    """The `FeatureSpec`, as text."""
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """Skipped images, and why each could not be read."""
    written: bool = True
    """False if the file was already complete."""


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
    """Write the features of every image of a data set to a Parquet file, one row per image.

    After an interruption the same call continues and writes the same bytes. `started(total, done)` is called first,
    then `advance(n)` after each n images.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"features cannot be stored as {dtype!r}{did_you_mean(dtype, DTYPES)}")
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
        warn_once([f"{file.path} is already complete"])
        written = False
    return _result(file.path, spec, written)


def _resolve_spec(spec: FeatureSpec, model: Model) -> FeatureSpec:
    """Check `spec` against the model; an exported model only provides the features it was exported with."""
    if not isinstance(model, EngineModel):
        return resolve_features(spec, model.net)
    model.check_features()
    if spec != FeatureSpec():
        model.check_has_network()
    return spec


def _extract_batches(model: Model, batches: Loader, spec: FeatureSpec) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, for each batch, the indices of its readable images and their features."""
    if not isinstance(model, EngineModel):
        yield from extract_batches(model.net, batches, preprocess=model.preprocess, spec=spec)
        return
    for batch in batches:
        readable = (batch.weights > 0).cpu()
        yield batch.indices[readable], model.outputs(batch.images)[readable]


def _result(path: Path, spec: FeatureSpec, written: bool) -> EmbedResult:
    import pyarrow.parquet as pq

    from vitrail.evaluation.feature_file import read_metadata

    width = pq.read_schema(path).field("embedding").type.list_size
    return EmbedResult(
        path, pq.read_metadata(path).num_rows, width, str(spec), read_metadata(path)["unreadable"], written
    )


def _select_splits(parts: SourceSplits, config: DataConfig, split: str) -> dict[str, Source]:
    """The requested splits, by name."""
    if split not in SPLITS:
        raise ConfigError(f"unknown split {split!r}{did_you_mean(split, SPLITS)}")
    if hasattr(parts.train, "samples"):
        raise DataError(f"{config.source} is a stream, whose images have no indices to resume from; try shards:.")
    warn_once(parts.notes, about=config.source)
    present = {"train": parts.train, "validation": parts.validation, "test": parts.test}
    present = {name: source for name, source in present.items() if source is not None and len(source)}
    if split != "all" and split not in present:
        raise DataError(f"{config.source} has no {split} split; it has {', '.join(present) or 'no images at all'}.")
    if not present:
        raise DataError(f"{config.source} has no images.")
    return present if split == "all" else {split: present[split]}


def _part_ranges(sources: Mapping[str, Source], size: int) -> Iterator[tuple[str, range]]:
    """Yield the split and image indices of each part: whole batches, always the same ones."""
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
    """Write every missing part, split by split, with one loader per split."""
    for split, source in sources.items():
        expected = [n for n in missing if pieces[n][0] == split]
        if not expected:
            continue
        numbers = np.concatenate([np.asarray(pieces[n][1]) for n in expected])
        rest = Subset(source, numbers)
        ends = dict(zip(np.cumsum([len(pieces[n][1]) for n in expected]).tolist(), expected, strict=True))
        seen, pending = 0, list[tuple[Tensor, Tensor]]()
        recorded: set[str] = set()
        with image_batches(rest, model.preprocess, batch_size=batch_size, device=model.device) as batches:
            for indices, values in _extract_batches(model, batches, spec):
                pending.append(
                    (torch.from_numpy(numbers)[indices], F.normalize(values, dim=1) if normalize else values)
                )
                step = min(batch_size, len(rest) - seen)
                seen += step
                if seen in ends:
                    index, found = (torch.cat(parts) for parts in zip(*pending, strict=True))
                    unreadable = {key: why for key, why in batches.bad.items() if key not in recorded}
                    # The loader reads ahead, so keep only the unreadable images of this part.
                    own = {source.key(i) for i in pieces[ends[seen]][1]} if unreadable else set()
                    unreadable = {key: why for key, why in unreadable.items() if key in own}
                    recorded |= unreadable.keys()
                    file.write_part(ends[seen], feature_table(source, split, index, found, dtype), unreadable)
                    pending = []
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
    """Everything that determines the content of the file."""
    first = next(iter(sources.values()))
    settings = {
        "model": model.info.title,
        "weights": model.fingerprint if isinstance(model, EngineModel) else weights_checksum(model.net),
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
    return dict(json.loads(json.dumps(settings)))  # as it will be read back


def _keys_checksum(source: Source) -> str:
    """CRC-32 of the images' keys in order, as eight hexadecimal digits."""
    checksum = 0
    for i in range(len(source)):
        checksum = zlib.crc32(source.key(i).encode(errors="surrogateescape") + b"\n", checksum)
    return f"{checksum:08x}"
