"""Batches of labeled images, for training and for measuring.

    training_batches      step after step, from any step on; the same images whoever reads them
    evaluation_batches    every image once, over all processes together

Images that live on the device are picked by number (resident.py); others are read and cut out by
workers, a few batches ahead (workers.py, transform.py); a plain stream is read on (streamed.py). A random
part is resized in float32 on the device, and in bytes by workers: the same part, to other rounding.

An image that cannot be read keeps its place, black and with weight 0. Training names it and goes
on, up to a share of such images; measuring refuses, with the list, unless told to leave them out.
One of several processes refuses nothing by itself, which would leave the others waiting: they tell
each other what they have found, and `Loader.merge_bad` refuses in all of them.
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

from vitrail import chance
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
"""Batches that workers may be ahead, where those are neither tiny nor huge."""
PREFETCH_IMAGES = 256
PREFETCH_MAX_BYTES = 1 << 30
MAX_WORKERS = 24
PLANNED_POSITIONS = 8192
"""So many places in the order are worked out at once."""
MAX_EVAL_CACHE_BYTES = 512 << 20
"""Bytes of images for measuring that are kept from one time to the next."""


class Loader(ABC, Iterator[Batch]):
    """An iterator over batches that may own workers: use it in a `with` block, or close it."""

    def __init__(
        self, *, bad: BadImages, device: torch.device, steps: range, slots: Tensor, cropped: bool = False
    ) -> None:
        self._bad, self.device, self.slots = bad, device, slots
        self.step, self.stop_step = steps.start, steps.stop
        self.cropped = cropped
        """Whether random parts of the images have been taken already."""

    @property
    def bad(self) -> dict[str, str]:
        """Unreadable images so far: name -> reason."""
        return dict(self._bad.reasons)

    @property
    def num_unshared_bad(self) -> int:
        """How many of them the other processes have not been told of."""
        return len(self._bad.reasons) - self._bad.num_shared

    def too_many_bad(self, num_new: int) -> bool:
        """Whether so many more, in all processes together, may be more than are allowed."""
        return self._bad.too_many(self._bad.num_shared + num_new)

    def merge_bad(self, found_by_rank: Iterable[Mapping[str, str]]) -> None:
        """Take over what every process has found, or an earlier sitting; refuse where that is too much."""
        self._bad.merge(found_by_rank)
        self._bad.raise_if_too_many()

    def __len__(self) -> int:
        """Batches that are left."""
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
        """What a resumed run must be given to go on from here; None: the step's number is enough."""
        return None

    def close(self) -> None:
        """End the workers, if there are any; no batches come after that. May be called twice."""
        self.stop_step = self.step

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ResidentLoader(Loader):
    """Images that live on the device, picked by their rows there; row -1 fills up."""

    def __init__(
        self,
        held: resident.ResidentImages,
        numbers: Indices,  # of the images in those rows
        rows_for: Callable[[int], Indices],
        labels: TargetTable,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.rows_for, self.numbers = rows_for, numbers
        self.shape, self.images = held.images.shape[1:], held.images.flatten(1)  # rows are picked faster than blocks
        self.targets = labels.targets_for(numbers).to(self.device)
        weights = labels.usable(numbers) & ~np.isin(numbers, list(held.bad))
        self.weights = torch.from_numpy(weights.astype(np.float32)).to(self.device)

    def _load_batch(self, step: int) -> Batch:
        rows = self.rows_for(step)
        there = rows >= 0
        at = torch.from_numpy(np.maximum(rows, 0)).to(self.device, non_blocking=self.device.type == "cuda")
        images, targets, weights = (t.index_select(0, at) for t in (self.images, self.targets, self.weights))
        indices = np.where(there, self.numbers[rows], -1)
        if not there.all():
            missing = torch.from_numpy(~there).to(self.device)
            images[missing], targets[missing], weights[missing] = 0, 0, 0
        images = images.unflatten(1, self.shape)
        return Batch(step, images, targets, weights, self.slots, torch.from_numpy(indices))


class WorkerLoader(Loader):
    """Images that workers read, some batches ahead; number -1 fills up."""

    def __init__(
        self,
        pool: Pool,
        source: Source,
        rows_for: Callable[[int], tuple[Indices, chance.Keys]],
        labels: TargetTable,
        on_errors: Callable[[WorkerLoader], None],
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.pool, self.source, self.rows_for, self.labels = pool, source, rows_for, labels
        self.on_errors = on_errors
        """Called where images could not be read: raises if that will not do."""
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
        taken = self.pool.get()
        self._record_errors(taken.indices, taken.errors)
        return self.transfer.send(taken, self.labels.targets_for(taken.indices), self.labels.usable(taken.indices))

    def _record_errors(self, indices: Indices, errors: list[tuple[int, str]]) -> None:
        for row, reason in errors:
            self._bad.add(self.source.key(int(indices[row])), reason)
        if errors:
            self.on_errors(self)

    def read_remaining(self) -> None:
        """Read all that is left, only to see what cannot be read."""
        self.on_errors = lambda _: None
        while self.pool.pending or self.next_submitted < self.stop_step:
            self._submit()
            taken = self.pool.get()
            self._record_errors(taken.indices, taken.errors)
            del taken

    def close(self) -> None:
        super().close()
        self.staged.clear()
        self.transfer.close()
        self.pool.close()


class BatchSampler:
    """Which images a process has in which step of training."""

    def __init__(
        self, source: Source, labels: TargetTable, config: DataConfig, batch_size: int, seed: int, part: range
    ) -> None:
        self.numbers = usable_indices(source, labels)
        blocks = source.blocks
        if (left := len(source) - len(self.numbers)) > 0:
            if part.start == 0:  # one process says it for all
                warn_once([f"{left:,} of {len(source):,} images have no label and are left out"], about=source.name)
            if blocks is not None:
                blocks = tuple(np.diff(np.searchsorted(self.numbers, np.cumsum(blocks)), prepend=0).tolist())
        kinds: Any = labels.targets[self.numbers] if config.order == "balanced" else len(self.numbers)
        self.sampler = Sampler(kinds, seed=seed, mode=config.order, repeats=config.repeats, blocks=blocks)
        self.batch, self.seed, self.slot_range = batch_size, seed, part
        self.slots = np.arange(part.start, part.stop)
        self._planned_steps, self._planned = range(0), np.empty((0, batch_size), np.int64)

    def indices(self, step: int) -> Indices:
        """b: the images in this process's slots."""
        if step not in self._planned_steps:  # several steps at once: much of the work is the same for one
            self._planned_steps = range(step, step + max(PLANNED_POSITIONS // self.batch, 1))
            places = self.sampler.indices(step * self.batch, len(self._planned_steps) * self.batch)
            self._planned = self.numbers[places].reshape(-1, self.batch)
        return self._planned[step - self._planned_steps.start, self.slot_range.start : self.slot_range.stop]

    def rows(self, step: int) -> tuple[Indices, chance.Keys]:
        return self.indices(step), chance.keys_of(self.seed, step, self.slots)


def usable_indices(source: Source, labels: TargetTable) -> Indices:
    """The numbers of the images that an epoch shows once each."""
    numbers = np.arange(len(source))
    found = numbers[labels.usable(numbers)]
    if len(found) == 0:
        raise DataError(f"none of the {len(source):,} images of {source.name} has a label.")
    return found


def training_batches(
    source: Any,  # a Source, or a Stream
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
    """Batches of steps start_step, start_step + 1, ..., steps - 1; `batch` counts all processes' images.

    labeled: leave images without a label out. state: what `Loader.state` gave, for a stream.
    """
    if batch_size % world_size:
        raise ConfigError(
            f"batch_size={batch_size} is not divisible by {world_size} processes; "
            f"try {batch_size // world_size * world_size or world_size}."
        )
    device, mine = torch.device(device), batch_size // world_size
    if device.type == "cpu":
        tune_malloc()
    part, workers = range(rank * mine, (rank + 1) * mine), num_workers(config, world_size)
    options: dict[str, Any] = {"device": device, "steps": range(start_step, steps)}
    options["slots"] = torch.arange(part.start, part.stop)
    transform: Transform = (
        RandomResizedCrop(preprocess, augment) if augment.crop == "resized" else EvalTransform(preprocess)
    )
    if hasattr(source, "samples"):
        from vitrail.data.stream_loader import StreamLoader

        options |= {"seed": seed, "rank": rank, "world_size": world_size, "state": state, "labeled": labeled}
        return StreamLoader(source, transform, config, workers=workers, **options)
    labels = TargetTable(source.targets, source.multi_label, labeled)
    plan, bad = (
        BatchSampler(source, labels, config, batch_size, seed, part),
        BadImages(source.name, len(source), config.max_bad_fraction),
    )
    options["bad"] = bad
    kept = resident.choose_transform(
        source,
        config=config,
        augment=augment,
        preprocess=preprocess,
        device=device,
        num_sharing=_memory_sharers(device, world_size),
    )
    numbers = np.arange(len(source))
    held = None if kept is None else resident.load(source, kept, device, workers, numbers)
    if kept is not None and held is not None:
        for number, reason in held.bad.items():
            bad.add(source.key(number), reason)
        bad.raise_if_too_many()  # every process has read them all
        if rank == 0:
            warn_once([_describe_resident(held, kept, augment)], about=source.name)
        return ResidentLoader(held, numbers, plan.indices, labels, **options)

    def on_errors(loader: WorkerLoader) -> None:
        if world_size == 1:
            bad.raise_if_too_many()

    pool = pool_for_transform(SampleReader(source, transform), transform, mine, workers)
    return WorkerLoader(
        pool, source, plan.rows, labels, on_errors, cropped=isinstance(transform, RandomResizedCrop), **options
    )


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
    """Each image once over all processes, as evaluation sees it; `batch` counts this process's alone.

    All processes have equally many batches, all of them full: what fills up has number -1 and weight
    0, as have images without a label, where it takes one (`labeled`).
    """
    device, config = torch.device(device), config or DataConfig()
    share = -(-len(source) // world_size)
    numbers = np.arange(rank * share, min((rank + 1) * share, len(source)))
    count = max(-(-share // batch_size), 1)
    padded = np.append(np.arange(len(numbers)), np.full(max(count * batch_size - len(numbers), 0), -1)).reshape(
        count, batch_size
    )
    labels = TargetTable(source.targets, source.multi_label, labeled)
    bad = BadImages(source.name, len(source), 1.0 if config.skip_bad else None)
    if labeled and not labels.usable(np.arange(len(source))).any():
        raise DataError(f"none of the {len(source):,} images of {source.name} has a label to measure on.")
    options: dict[str, Any] = {"device": device, "steps": range(count), "bad": bad}
    options["slots"] = torch.arange(rank * batch_size, (rank + 1) * batch_size)
    transform, workers = EvalTransform(preprocess), min(num_workers(config, world_size), -(-len(numbers) // 8))
    held = _load_resident(source, transform, preprocess, config, device, workers, numbers)
    if held is not None:
        for number, reason in held.bad.items():
            bad.add(source.key(number), reason)
        if world_size == 1:
            bad.raise_if_too_many()
        return ResidentLoader(held, numbers, padded.__getitem__, labels, **options)

    def on_errors(loader: WorkerLoader) -> None:
        if world_size == 1 and not config.skip_bad:
            loader.read_remaining()
            loader.close()
            bad.raise_if_too_many()

    keys = np.zeros(batch_size, np.uint64)
    pool = pool_for_transform(SampleReader(source, transform), transform, batch_size, workers)
    return WorkerLoader(
        pool,
        source,
        lambda s: (np.where(padded[s] < 0, -1, padded[s] + rank * share), keys),
        labels,
        on_errors,
        **options,
    )


def _load_resident(
    source: Source,
    transform: EvalTransform,
    preprocess: PreprocessConfig,
    config: DataConfig,
    device: torch.device,
    workers: int,
    numbers: Indices,
) -> resident.ResidentImages | None:
    """Few images are decoded the first time they are measured on, and kept for the next."""
    if len(numbers) == 0:
        return None
    size, key = resident.num_bytes(transform, len(numbers)), (preprocess, device, *numbers[[0, -1]].tolist())
    if (found := resident.get_cached(source, key)) is not None:
        return found
    if config.resident is False or size > min(
        MAX_EVAL_CACHE_BYTES, resident.free_memory(device) // resident.MEMORY_DIVISOR
    ):
        return None
    found = resident.load(source, transform, device, workers, numbers)
    if found is not None:
        resident.add_cached(source, key, found)
    return found


def _describe_resident(held: resident.ResidentImages, transform: Transform, augment: AugmentConfig) -> str:
    n, _, height, width = held.images.shape
    size = resident.format_bytes(held.images.numel() * held.images.element_size())
    note = f"{n:,} images of {height} x {width} stay on {held.images.device} ({size})"
    if augment.crop == "resized" and not isinstance(transform, OriginalPixels):
        note += ", as evaluation sees them: random parts are taken of that"
    return note


def pool_for_transform(work: FillRows, transform: Transform, rows: int, workers: int) -> Pool:
    """Workers, as far ahead as is useful and fits."""
    jpeg.verified_simplejpeg()  # found out here, once, not in each process
    depth = prefetch_depth(transform, rows)
    return make_pool(work, rows=rows, shape=transform.shape, dtype=transform.dtype, workers=workers, depth=depth)


def prefetch_depth(transform: Transform, rows: int) -> int:
    """Batches to be ahead."""
    return max(
        1,
        min(
            max(PREFETCH_BATCHES, -(-PREFETCH_IMAGES // rows)),
            PREFETCH_MAX_BYTES // resident.num_bytes(transform, rows),
        ),
    )


def num_workers(config: DataConfig, world_size: int) -> int:
    """As asked for, else this process's share of the cores."""
    if config.workers is not None:
        return config.workers
    return max(1, min(usable_cores() // _local_world_size(world_size), MAX_WORKERS))


def _local_world_size(world_size: int) -> int:
    """Processes on this machine; torchrun tells."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def _memory_sharers(device: torch.device, world_size: int) -> int:
    return _local_world_size(world_size) if device.type == "cpu" else 1
