"""Loaders: iterators over batches of images, kept on the device or read by workers.

An unreadable image keeps its slot, black and with weight 0. Training logs it and continues, up to
data.max_bad_fraction; evaluation raises an error with the list unless data.skip_bad is set. With several
processes none raises alone, which would leave the others waiting: they exchange what they found, and
`Loader.merge_bad` raises in all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from vitrail import rng
from vitrail.config import DataConfig
from vitrail.data import jpeg, resident
from vitrail.data.bad_images import BadImages
from vitrail.data.batch import Batch
from vitrail.data.sampler import Indices, Sampler
from vitrail.data.sources.base import Source
from vitrail.data.transfer import StagedBatch, TargetTable, make_transfer
from vitrail.data.transforms import Transform
from vitrail.data.worker_pool import FillRows, Pool, make_pool
from vitrail.errors import DataError
from vitrail.runtime import warn_once

# N images in the source, B in a global batch, b of them this process's

PREFETCH_BATCHES = 4
"""Batches that workers prefetch: more if they hold fewer than PREFETCH_IMAGES, fewer above PREFETCH_MAX_BYTES."""
PREFETCH_IMAGES = 256
PREFETCH_MAX_BYTES = 1 << 30
PLANNED_POSITIONS = 8192
"""Positions of the sampler that are computed at once."""


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
        rows_of_step: Callable[[int], Indices],
        target_table: TargetTable,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.rows_of_step, self.source_indices = rows_of_step, source_indices
        self.shape, self.images = (
            resident_images.images.shape[1:],
            resident_images.images.flatten(1),
        )  # 2-D is indexed faster
        self.targets = target_table.targets_for(source_indices).to(self.device)
        weights = target_table.usable(source_indices) & ~np.isin(source_indices, list(resident_images.bad))
        self.weights = torch.from_numpy(weights.astype(np.float32)).to(self.device)

    def _load_batch(self, step: int) -> Batch:
        rows = self.rows_of_step(step)
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
        rows_of_step: Callable[[int], tuple[Indices, rng.Seeds]],
        target_table: TargetTable,
        on_errors: Callable[[WorkerLoader], None],
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.pool, self.source, self.rows_of_step, self.target_table = pool, source, rows_of_step, target_table
        self.on_errors = on_errors
        """Called when a batch has unreadable images; may raise."""
        self.next_submitted = self.step
        self.staged: deque[StagedBatch] = deque()
        self.transfer = make_transfer(self.device, pool)
        self._submit()

    def _submit(self) -> None:
        while self.pool.has_room and self.next_submitted < self.stop_step:
            self.pool.submit(*self.rows_of_step(self.next_submitted))
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


def pool_for_transform(fill_rows: FillRows, transform: Transform, rows: int, workers: int) -> Pool:
    """A pool for batches of `rows` rows of the transform's shape."""
    jpeg.verified_simplejpeg()  # checked once here, not in each worker
    depth = prefetch_depth(transform, rows)
    return make_pool(fill_rows, rows=rows, shape=transform.shape, dtype=transform.dtype, workers=workers, depth=depth)


def prefetch_depth(transform: Transform, rows: int) -> int:
    """Number of batches to prefetch."""
    expected = max(PREFETCH_BATCHES, -(-PREFETCH_IMAGES // rows))
    return max(1, min(expected, PREFETCH_MAX_BYTES // resident.num_bytes(transform, rows)))
