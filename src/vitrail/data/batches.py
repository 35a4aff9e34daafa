"""The batches of a training run and of an evaluation.

    training_batches      batches of consecutive steps, from any step on, independent of the workers
    evaluation_batches    every image once, over all processes together

Datasets that fit on the device are kept there and indexed (resident.py). Otherwise workers read, crop and
prefetch (worker_pool.py, transforms.py); sequential streams have a loader of their own (stream_loader.py).
Random crops have the same box everywhere, but are resized in float32 on the device and in uint8 by workers.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from vitrail.config import DataConfig, PreprocessConfig
from vitrail.config.data import AugmentConfig
from vitrail.data import resident
from vitrail.data.bad_images import BadImages
from vitrail.data.loader import BatchSampler, Loader, ResidentLoader, WorkerLoader, pool_for_transform
from vitrail.data.sampler import Indices
from vitrail.data.sources.base import Source
from vitrail.data.stream_loader import StreamLoader
from vitrail.data.transfer import TargetTable
from vitrail.data.transforms import EvalTransform, OriginalPixels, RandomResizedCrop, SampleReader, Transform
from vitrail.errors import ConfigError, DataError
from vitrail.runtime import warn_once
from vitrail.runtime.cores import usable_cores
from vitrail.runtime.malloc import tune_malloc

# N images in the source, B in a global batch, b of them this process's

MAX_WORKERS = 24
MAX_EVAL_CACHE_BYTES = 512 << 20
"""Decoded evaluation images up to this size are cached between evaluations."""


def training_batches(
    source: Any,  # a Source or a ShardStream
    *,
    config: DataConfig,
    augment: AugmentConfig,
    preprocess: PreprocessConfig,
    batch_size: int,
    seed: int,
    device: torch.device | str,
    rank: int = 0,
    world_size: int = 1,
    start_step: int = 0,
    steps: int,
    labeled: bool = True,
    state: dict[str, Any] | None = None,
) -> Loader:
    """Batches of steps start_step, start_step + 1, ..., steps - 1; `batch_size` is that of all processes together.

    labeled: skip images without a label. state: a stream's `Loader.state`, to resume.
    """
    if batch_size % world_size:
        raise ConfigError(
            f"batch_size={batch_size} is not divisible by {world_size} processes; "
            f"try {batch_size // world_size * world_size or world_size}."
        )
    device, local_batch_size = torch.device(device), batch_size // world_size
    if device.type == "cpu":
        tune_malloc()
    slot_range, workers = range(rank * local_batch_size, (rank + 1) * local_batch_size), num_workers(config, world_size)
    options: dict[str, Any] = {"device": device, "steps": range(start_step, steps)}
    options["slots"] = torch.arange(slot_range.start, slot_range.stop)
    crops = augment.crop == "resized"
    transform: Transform = RandomResizedCrop(preprocess, augment) if crops else EvalTransform(preprocess)
    if hasattr(source, "samples"):
        options |= {"seed": seed, "rank": rank, "world_size": world_size, "state": state, "labeled": labeled}
        return StreamLoader(source, transform, config, workers=workers, **options)
    target_table = TargetTable(source.targets, source.multi_label, labeled)
    batch_sampler = BatchSampler(source, target_table, config, batch_size, seed, slot_range)
    bad = BadImages(source.name, len(source), config.max_bad_fraction)
    options["bad"] = bad
    sharing = _memory_sharers(device, world_size)
    resident_transform = resident.choose_resident_transform(
        source, config=config, augment=augment, preprocess=preprocess, device=device, num_sharing=sharing
    )
    indices = np.arange(len(source))
    loaded = None if resident_transform is None else resident.load(source, resident_transform, device, workers, indices)
    if resident_transform is not None and loaded is not None:
        for index, reason in loaded.bad.items():
            bad.add(source.key(index), reason)
        bad.raise_if_too_many()  # every process has read them all
        if rank == 0:
            warn_once([_describe_resident(loaded, resident_transform, augment)], about=source.name)
        return ResidentLoader(loaded, indices, batch_sampler.indices, target_table, **options)

    def on_errors(loader: WorkerLoader) -> None:
        if world_size == 1:
            bad.raise_if_too_many()

    pool = pool_for_transform(SampleReader(source, transform), transform, local_batch_size, workers)
    return WorkerLoader(pool, source, batch_sampler.rows, target_table, on_errors, cropped=crops, **options)


def evaluation_batches(
    source: Source,
    *,
    preprocess: PreprocessConfig,
    batch_size: int,
    device: torch.device | str,
    rank: int = 0,
    world_size: int = 1,
    config: DataConfig | None = None,
    labeled: bool = True,
) -> Loader:
    """Each image once over all processes, with evaluation's preprocessing; `batch_size` is per process.

    All processes have the same number of full batches: padding has index -1 and weight 0. If `labeled`,
    images without a label have weight 0 too.
    """
    device, config = torch.device(device), config or DataConfig()
    per_rank = -(-len(source) // world_size)
    indices = np.arange(rank * per_rank, min((rank + 1) * per_rank, len(source)))
    num_batches = max(-(-per_rank // batch_size), 1)
    padded = np.append(np.arange(len(indices)), np.full(max(num_batches * batch_size - len(indices), 0), -1)).reshape(
        num_batches, batch_size
    )
    target_table = TargetTable(source.targets, source.multi_label, labeled)
    bad = BadImages(source.name, len(source), 1.0 if config.skip_bad else None)
    if labeled and not target_table.usable(np.arange(len(source))).any():
        raise DataError(f"none of the {len(source):,} images of {source.name} has a label; evaluation needs labels.")
    options: dict[str, Any] = {"device": device, "steps": range(num_batches), "bad": bad}
    options["slots"] = torch.arange(rank * batch_size, (rank + 1) * batch_size)
    transform, workers = EvalTransform(preprocess), min(num_workers(config, world_size), -(-len(indices) // 8))
    loaded = _load_resident(source, transform, preprocess, config, device, workers, indices)
    if loaded is not None:
        for index, reason in loaded.bad.items():
            bad.add(source.key(index), reason)
        if world_size == 1:
            bad.raise_if_too_many()
        return ResidentLoader(loaded, indices, padded.__getitem__, target_table, **options)

    def on_errors(loader: WorkerLoader) -> None:
        if world_size == 1 and not config.skip_bad:
            loader.read_remaining()
            loader.close()
            bad.raise_if_too_many()

    seeds = np.zeros(batch_size, np.uint64)
    pool = pool_for_transform(SampleReader(source, transform), transform, batch_size, workers)
    rows = lambda s: (np.where(padded[s] < 0, -1, padded[s] + rank * per_rank), seeds)  # noqa: E731
    return WorkerLoader(pool, source, rows, target_table, on_errors, **options)


def _load_resident(
    source: Source,
    transform: EvalTransform,
    preprocess: PreprocessConfig,
    config: DataConfig,
    device: torch.device,
    workers: int,
    indices: Indices,
) -> resident.ResidentImages | None:
    """All images of this process on the device, cached between evaluations; None if they are too large."""
    if len(indices) == 0:
        return None
    size, key = resident.num_bytes(transform, len(indices)), (preprocess, device, *indices[[0, -1]].tolist())
    if (cached := resident.get_cached(source, key)) is not None:
        return cached
    if config.resident is False or size > min(
        MAX_EVAL_CACHE_BYTES, resident.free_memory(device) // resident.MEMORY_DIVISOR
    ):
        return None
    loaded = resident.load(source, transform, device, workers, indices)
    if loaded is not None:
        resident.add_cached(source, key, loaded)
    return loaded


def _describe_resident(loaded: resident.ResidentImages, transform: Transform, augment: AugmentConfig) -> str:
    n, _, height, width = loaded.images.shape
    size = resident.format_bytes(loaded.images.numel() * loaded.images.element_size())
    note = f"{n:,} images of {height} x {width} pixels are kept on {loaded.images.device} ({size})"
    if augment.crop == "resized" and not isinstance(transform, OriginalPixels):
        note += ", preprocessed as in evaluation; random crops are taken from the result"
    return note


def num_workers(config: DataConfig, world_size: int) -> int:
    """`data.workers`, else this process's share of the cores."""
    if config.workers is not None:
        return config.workers
    return max(1, min(usable_cores() // _local_world_size(world_size), MAX_WORKERS))


def _local_world_size(world_size: int) -> int:
    """Number of processes on this machine, from torchrun's variable."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def _memory_sharers(device: torch.device, world_size: int) -> int:
    return _local_world_size(world_size) if device.type == "cpu" else 1
