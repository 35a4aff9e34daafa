"""Batches of labeled images for training and evaluation.

    training_batches      batches of consecutive steps, from any step on, independent of the workers
    evaluation_batches    every image once, over all processes together

Datasets that fit on the device are kept there and indexed (resident.py). Otherwise workers read, crop and
prefetch (worker_pool.py, transforms.py); sequential streams have a loader of their own (stream_loader.py).
Random crops have the same box everywhere, but are resized in float32 on the device and in uint8 by workers.

An unreadable image keeps its slot, black and with weight 0. Training logs it and continues, up to
data.max_bad_fraction; evaluation raises an error with the list unless data.skip_bad is set. With several
processes none raises alone, which would leave the others waiting: they exchange what they found, and
`Loader.merge_bad` raises in all of them.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from vitrail import rng
from vitrail.config import DataConfig, PreprocessConfig
from vitrail.config.data import AugmentConfig
from vitrail.data import jpeg, resident
from vitrail.data.bad_images import BadImages
from vitrail.data.batch import Batch
from vitrail.data.sampler import Indices, Sampler
from vitrail.data.sources.base import Source
from vitrail.data.transfer import StagedBatch, TargetTable, make_transfer
from vitrail.data.transforms import EvalTransform, OriginalPixels, RandomResizedCrop, SampleReader, Transform
from vitrail.data.worker_pool import FillRows, Pool, make_pool
from vitrail.errors import ConfigError, DataError
from vitrail.runtime import warn_once
from vitrail.runtime.cores import usable_cores
from vitrail.runtime.malloc import tune_malloc

# N images in the source, B in a global batch, b of them this process's

PREFETCH_BATCHES = 4
"""Batches that workers prefetch: more if they hold fewer than PREFETCH_IMAGES, fewer above PREFETCH_MAX_BYTES."""
PREFETCH_IMAGES = 256
PREFETCH_MAX_BYTES = 1 << 30
MAX_WORKERS = 24
PLANNED_POSITIONS = 8192
"""Positions of the sampler that are computed at once."""
MAX_EVAL_CACHE_BYTES = 512 << 20
"""Decoded evaluation images up to this size are cached between evaluations."""


class Loader(ABC, Iterator[Batch]):
    """An iterator over batches that may own workers: use it in a `with` block or call `close`."""

    def __init__(
        self, *, bad: BadImages, device: torch.device, steps: range, slots: Tensor, cropped: bool = False
    ) -> None:
        self._bad, self.device, self.slots = bad, device, slots
        self.step, self.stop_step = steps.start, steps.stop
        self.cropped = cropped
        """Whether the images are random crops already."""

    @property
    def bad(self) -> dict[str, str]:
        """Unreadable images so far: key -> reason."""
        return dict(self._bad.reasons)

    @property
    def num_unshared_bad(self) -> int:
        """Number of unreadable images found since the last `merge_bad`."""
        return len(self._bad.reasons) - self._bad.num_shared

    def too_many_bad(self, num_new: int) -> bool:
        """Whether `num_new` more, in all processes together, may exceed the limit."""
        return self._bad.too_many(self._bad.num_shared + num_new)

    def merge_bad(self, found_by_rank: Iterable[Mapping[str, str]]) -> None:
        """Take over the unreadable images of all processes (or of the run before a resume); raise if too many."""
        self._bad.merge(found_by_rank)
        self._bad.raise_if_too_many()

    def __len__(self) -> int:
        """Number of remaining batches."""
        return max(self.stop_step - self.step, 0)

    def __next__(self) -> Batch:
        if self.step >= self.stop_step:
            self.close()
            raise StopIteration
        batch = self._load_batch(self.step)
        self.step += 1
        return batch

    @abstractmethod
    def _load_batch(self, step: int) -> Batch: ...

    def state(self) -> dict[str, Any] | None:
        """State that a resumed run needs to continue from here; None: the step number is enough."""
        return None

    def close(self) -> None:
        """Stop the workers, if there are any, and the iteration. May be called twice."""
        self.stop_step = self.step

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ResidentLoader(Loader):
    """Batches of images that are all on the device, by their row there; row -1 is padding."""

    def __init__(
        self,
        resident_images: resident.ResidentImages,
        source_indices: Indices,  # of the images in the rows
        rows_for: Callable[[int], Indices],
        target_table: TargetTable,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.rows_for, self.source_indices = rows_for, source_indices
        self.shape, self.images = (
            resident_images.images.shape[1:],
            resident_images.images.flatten(1),
        )  # 2-D is indexed faster
        self.targets = target_table.targets_for(source_indices).to(self.device)
        weights = target_table.usable(source_indices) & ~np.isin(source_indices, list(resident_images.bad))
        self.weights = torch.from_numpy(weights.astype(np.float32)).to(self.device)

    def _load_batch(self, step: int) -> Batch:
        rows = self.rows_for(step)
        present = rows >= 0
        at = torch.from_numpy(np.maximum(rows, 0)).to(self.device, non_blocking=self.device.type == "cuda")
        images, targets, weights = (t.index_select(0, at) for t in (self.images, self.targets, self.weights))
        indices = np.where(present, self.source_indices[rows], -1)
        if not present.all():
            missing = torch.from_numpy(~present).to(self.device)
            images[missing], targets[missing], weights[missing] = 0, 0, 0
        images = images.unflatten(1, self.shape)
        return Batch(step, images, targets, weights, self.slots, torch.from_numpy(indices))


class WorkerLoader(Loader):
    """Batches that workers read and prefetch; index -1 is padding."""

    def __init__(
        self,
        pool: Pool,
        source: Source,
        rows_for: Callable[[int], tuple[Indices, rng.Seeds]],
        target_table: TargetTable,
        on_errors: Callable[[WorkerLoader], None],
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.pool, self.source, self.rows_for, self.target_table = pool, source, rows_for, target_table
        self.on_errors = on_errors
        """Called when a batch has unreadable images; may raise."""
        self.next_submitted = self.step
        self.staged: deque[StagedBatch] = deque()
        self.transfer = make_transfer(self.device, pool)
        self._submit()

    def _submit(self) -> None:
        while self.pool.has_room and self.next_submitted < self.stop_step:
            self.pool.submit(*self.rows_for(self.next_submitted))
            self.next_submitted += 1

    def _load_batch(self, step: int) -> Batch:
        if not self.staged:
            self._submit()
            self.staged.append(self._stage())
        staged = self.staged.popleft()
        if self.transfer.asynchronous and self.pool.ready:
            self.staged.append(self._stage())
        self._submit()
        return staged.to_batch(step, self.slots)

    def _stage(self) -> StagedBatch:
        finished = self.pool.get()
        self._record_errors(finished.indices, finished.errors)
        return self.transfer.send(
            finished, self.target_table.targets_for(finished.indices), self.target_table.usable(finished.indices)
        )

    def _record_errors(self, indices: Indices, errors: list[tuple[int, str]]) -> None:
        for row, reason in errors:
            self._bad.add(self.source.key(int(indices[row])), reason)
        if errors:
            self.on_errors(self)

    def read_remaining(self) -> None:
        """Read all remaining batches to find all unreadable images."""
        self.on_errors = lambda _: None
        while self.pool.pending or self.next_submitted < self.stop_step:
            self._submit()
            finished = self.pool.get()
            self._record_errors(finished.indices, finished.errors)
            del finished

    def close(self) -> None:
        super().close()
        self.staged.clear()
        self.transfer.close()
        self.pool.close()


class BatchSampler:
    """The image indices of this process's slots of each training step."""

    def __init__(
        self, source: Source, target_table: TargetTable, config: DataConfig, batch_size: int, seed: int, slots: range
    ) -> None:
        self.usable = usable_indices(source, target_table)
        blocks = source.blocks
        if (num_unlabeled := len(source) - len(self.usable)) > 0:
            if slots.start == 0:  # one process logs it for all
                warn_once(
                    [f"{num_unlabeled:,} of {len(source):,} images have no label and are skipped"], about=source.name
                )
            if blocks is not None:
                blocks = tuple(np.diff(np.searchsorted(self.usable, np.cumsum(blocks)), prepend=0).tolist())
        images: Any = target_table.targets[self.usable] if config.order == "balanced" else len(self.usable)
        self.sampler = Sampler(images, seed=seed, mode=config.order, repeats=config.repeats, blocks=blocks)
        self.batch_size, self.seed, self.slot_range = batch_size, seed, slots
        self.slots = np.arange(slots.start, slots.stop)
        self._planned_steps, self._planned = range(0), np.empty((0, batch_size), np.int64)

    def indices(self, step: int) -> Indices:
        """b: indices of the images in this process's slots."""
        if step not in self._planned_steps:  # several steps at once, since most of the cost is per call
            self._planned_steps = range(step, step + max(PLANNED_POSITIONS // self.batch_size, 1))
            positions = self.sampler.indices(step * self.batch_size, len(self._planned_steps) * self.batch_size)
            self._planned = self.usable[positions].reshape(-1, self.batch_size)
        return self._planned[step - self._planned_steps.start, self.slot_range.start : self.slot_range.stop]

    def rows(self, step: int) -> tuple[Indices, rng.Seeds]:
        return self.indices(step), rng.sample_seeds(self.seed, step, self.slots)


def usable_indices(source: Source, target_table: TargetTable) -> Indices:
    """Indices of the images that are in an epoch."""
    indices = np.arange(len(source))
    usable = indices[target_table.usable(indices)]
    if len(usable) == 0:
        raise DataError(f"none of the {len(source):,} images of {source.name} has a label.")
    return usable


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
        from vitrail.data.stream_loader import StreamLoader

        options |= {"seed": seed, "rank": rank, "world_size": world_size, "state": state, "labeled": labeled}
        return StreamLoader(source, transform, config, workers=workers, **options)
    target_table = TargetTable(source.targets, source.multi_label, labeled)
    batch_sampler = BatchSampler(source, target_table, config, batch_size, seed, slot_range)
    bad = BadImages(source.name, len(source), config.max_bad_fraction)
    options["bad"] = bad
    sharing = _memory_sharers(device, world_size)
    resident_transform = resident.choose_transform(
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
    note = f"{n:,} images of {height} x {width} are kept on {loaded.images.device} ({size})"
    if augment.crop == "resized" and not isinstance(transform, OriginalPixels):
        note += ", with evaluation's preprocessing: random crops are taken from that"
    return note


def pool_for_transform(fill_rows: FillRows, transform: Transform, rows: int, workers: int) -> Pool:
    """A pool for batches of `rows` rows of the transform's shape."""
    jpeg.verified_simplejpeg()  # checked once here, not in each worker
    depth = prefetch_depth(transform, rows)
    return make_pool(fill_rows, rows=rows, shape=transform.shape, dtype=transform.dtype, workers=workers, depth=depth)


def prefetch_depth(transform: Transform, rows: int) -> int:
    """Number of batches to prefetch."""
    expected = max(PREFETCH_BATCHES, -(-PREFETCH_IMAGES // rows))
    return max(1, min(expected, PREFETCH_MAX_BYTES // resident.num_bytes(transform, rows)))


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
