"""Batches of labeled images, for training and for measuring.

    training_batches      step after step, from any step on; the same images whoever reads them
    evaluation_batches    every image once, over all processes together

Images that live on the device are picked by number (resident.py); others are read and cut out by
workers, a few batches ahead (workers.py, view.py); a plain stream is read on (streamed.py). A random
part is resized in float32 on the device, and in bytes by workers: the same part, to other rounding.

An image that cannot be read keeps its place, black and with weight 0. Training names it and goes
on, up to a share of such images; measuring refuses, with the list, unless told to leave them out.
One of several processes refuses nothing by itself, which would leave the others waiting: they tell
each other what they have found, and `Loader.agree` refuses in all of them.
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
from vitrail.data.bad import Bad
from vitrail.data.batch import Batch
from vitrail.data.order import Indices, Order
from vitrail.data.sources.base import Source
from vitrail.data.staging import Labels, Staged, road_to
from vitrail.data.view import Cropped, Evaluated, Native, Reading, View
from vitrail.data.workers import Pool, Work, make_pool
from vitrail.errors import ConfigError, DataError
from vitrail.runtime import say
from vitrail.runtime.cores import cores
from vitrail.runtime.heap import keep_heap

# N images in the source, B in a global batch, b of them this process's

AHEAD = 4
"""Batches that workers may be ahead, where those are neither tiny nor huge."""
AHEAD_IMAGES = 256
AHEAD_BYTES = 1 << 30
MOST_WORKERS = 24
POSITIONS = 8192
"""So many places in the order are worked out at once."""
EVALUATED = 512 << 20
"""Bytes of images for measuring that are kept from one time to the next."""


class Loader(ABC, Iterator[Batch]):
    """An iterator over batches that may own workers: use it in a `with` block, or close it."""

    def __init__(self, *, bad: Bad, device: torch.device, steps: range, slots: Tensor, cropped: bool = False) -> None:
        self._bad, self.device, self.slots = bad, device, slots
        self.step, self.last = steps.start, steps.stop
        self.cropped = cropped
        """Whether random parts of the images have been taken already."""

    @property
    def bad(self) -> dict[str, str]:
        """Unreadable images so far: name -> reason."""
        return dict(self._bad.found)

    @property
    def news(self) -> int:
        """How many of them the other processes have not been told of."""
        return len(self._bad.found) - self._bad.told

    def too_many(self, news: int) -> bool:
        """Whether so many more, in all processes together, may be more than are allowed."""
        return self._bad.too_many(self._bad.told + news)

    def agree(self, told: Iterable[Mapping[str, str]]) -> None:
        """Take over what every process has found, or an earlier sitting; refuse where that is too much."""
        self._bad.learn(told)
        self._bad.judge()

    def __len__(self) -> int:
        """Batches that are left."""
        return max(self.last - self.step, 0)

    def __next__(self) -> Batch:
        if self.step >= self.last:
            self.close()
            raise StopIteration
        batch = self._batch(self.step)
        self.step += 1
        return batch

    @abstractmethod
    def _batch(self, step: int) -> Batch: ...

    def state(self) -> dict[str, Any] | None:
        """What a resumed run must be given to go on from here; None: the step's number is enough."""
        return None

    def close(self) -> None:
        """End the workers, if there are any; no batches come after that. May be called twice."""
        self.last = self.step

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class OnDevice(Loader):
    """Images that live on the device, picked by their rows there; row -1 fills up."""

    def __init__(
        self,
        held: resident.Resident,
        numbers: Indices,  # of the images in those rows
        rows_of: Callable[[int], Indices],
        labels: Labels,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.rows_of, self.numbers = rows_of, numbers
        self.shape, self.images = held.images.shape[1:], held.images.flatten(1)  # rows are picked faster than blocks
        self.targets = labels.of(numbers).to(self.device)
        weights = labels.count(numbers) & ~np.isin(numbers, list(held.bad))
        self.weights = torch.from_numpy(weights.astype(np.float32)).to(self.device)

    def _batch(self, step: int) -> Batch:
        rows = self.rows_of(step)
        there = rows >= 0
        at = torch.from_numpy(np.maximum(rows, 0)).to(self.device, non_blocking=self.device.type == "cuda")
        images, targets, weights = (t.index_select(0, at) for t in (self.images, self.targets, self.weights))
        indices = np.where(there, self.numbers[rows], -1)
        if not there.all():
            missing = torch.from_numpy(~there).to(self.device)
            images[missing], targets[missing], weights[missing] = 0, 0, 0
        images = images.unflatten(1, self.shape)
        return Batch(step, images, targets, weights, self.slots, torch.from_numpy(indices))


class Flow(Loader):
    """Images that workers read, some batches ahead; number -1 fills up."""

    def __init__(
        self,
        pool: Pool,
        source: Source,
        rows_of: Callable[[int], tuple[Indices, chance.Keys]],
        labels: Labels,
        settle: Callable[[Flow], None],
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.pool, self.source, self.rows_of, self.labels = pool, source, rows_of, labels
        self.settle = settle
        """Called where images could not be read: raises if that will not do."""
        self.asked = self.step
        self.staged: deque[Staged] = deque()
        self.road = road_to(self.device, pool)
        self.ask()

    def ask(self) -> None:
        while self.pool.room and self.asked < self.last:
            self.pool.ask(*self.rows_of(self.asked))
            self.asked += 1

    def _batch(self, step: int) -> Batch:
        if not self.staged:
            self.ask()
            self.staged.append(self._stage())
        staged = self.staged.popleft()
        if self.road.ahead and self.pool.ready:
            self.staged.append(self._stage())
        self.ask()
        return staged.arrive(step, self.slots)

    def _stage(self) -> Staged:
        taken = self.pool.take()
        self.note(taken.indices, taken.problems)
        return self.road.send(taken, self.labels.of(taken.indices), self.labels.count(taken.indices))

    def note(self, indices: Indices, problems: list[tuple[int, str]]) -> None:
        for row, reason in problems:
            self._bad.add(self.source.key(int(indices[row])), reason)
        if problems:
            self.settle(self)

    def rest(self) -> None:
        """Read all that is left, only to see what cannot be read."""
        self.settle = lambda _: None
        while self.pool.asked or self.asked < self.last:
            self.ask()
            taken = self.pool.take()
            self.note(taken.indices, taken.problems)
            del taken

    def close(self) -> None:
        super().close()
        self.staged.clear()
        self.road.close()
        self.pool.close()


class Plan:
    """Which images a process has in which step of training."""

    def __init__(
        self, source: Source, labels: Labels, config: DataConfig, batch_size: int, seed: int, part: range
    ) -> None:
        self.numbers = learnable(source, labels)
        blocks = source.blocks
        if (left := len(source) - len(self.numbers)) > 0:
            if part.start == 0:  # one process says it for all
                say([f"{left:,} of {len(source):,} images have no label and are left out"], about=source.name)
            if blocks is not None:
                blocks = tuple(np.diff(np.searchsorted(self.numbers, np.cumsum(blocks)), prepend=0).tolist())
        kinds: Any = labels.targets[self.numbers] if config.order == "balanced" else len(self.numbers)
        self.order = Order(kinds, seed=seed, mode=config.order, repeats=config.repeats, blocks=blocks)
        self.batch, self.seed, self.part = batch_size, seed, part
        self.slots = np.arange(part.start, part.stop)
        self._steps, self._worked_out = range(0), np.empty((0, batch_size), np.int64)

    def indices(self, step: int) -> Indices:
        """b: the images in this process's slots."""
        if step not in self._steps:  # several steps at once: much of the work is the same for one
            self._steps = range(step, step + max(POSITIONS // self.batch, 1))
            places = self.order.indices(step * self.batch, len(self._steps) * self.batch)
            self._worked_out = self.numbers[places].reshape(-1, self.batch)
        return self._worked_out[step - self._steps.start, self.part.start : self.part.stop]

    def rows(self, step: int) -> tuple[Indices, chance.Keys]:
        return self.indices(step), chance.keys_of(self.seed, step, self.slots)


def learnable(source: Source, labels: Labels) -> Indices:
    """The numbers of the images that an epoch shows once each."""
    numbers = np.arange(len(source))
    found = numbers[labels.count(numbers)]
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
    world: int = 1,
    start_step: int = 0,
    steps: int,
    labeled: bool = True,
    state: dict[str, Any] | None = None,
) -> Loader:
    """Batches of steps start_step, start_step + 1, ..., steps - 1; `batch` counts all processes' images.

    labeled: leave images without a label out. state: what `Loader.state` gave, for a stream.
    """
    if batch_size % world:
        raise ConfigError(
            f"batch_size={batch_size} is not divisible by {world} processes; "
            f"try {batch_size // world * world or world}."
        )
    device, mine = torch.device(device), batch_size // world
    if device.type == "cpu":
        keep_heap()
    part, workers = range(rank * mine, (rank + 1) * mine), count_workers(config, world)
    options: dict[str, Any] = {"device": device, "steps": range(start_step, steps)}
    options["slots"] = torch.arange(part.start, part.stop)
    view: View = Cropped(preprocess, augment) if augment.crop == "resized" else Evaluated(preprocess)
    if hasattr(source, "samples"):
        from vitrail.data.streamed import Streamed

        options |= {"seed": seed, "rank": rank, "world": world, "state": state, "labeled": labeled}
        return Streamed(source, view, config, workers=workers, **options)
    labels = Labels(source.targets, source.multi_label, labeled)
    plan, bad = (
        Plan(source, labels, config, batch_size, seed, part),
        Bad(source.name, len(source), config.max_bad_fraction),
    )
    options["bad"] = bad
    kept = resident.choose(
        source, config=config, augment=augment, preprocess=preprocess, device=device, sharers=_sharers(device, world)
    )
    numbers = np.arange(len(source))
    held = None if kept is None else resident.load(source, kept, device, workers, numbers)
    if kept is not None and held is not None:
        for number, reason in held.bad.items():
            bad.add(source.key(number), reason)
        bad.judge()  # every process has read them all
        if rank == 0:
            say([_chosen(held, kept, augment)], about=source.name)
        return OnDevice(held, numbers, plan.indices, labels, **options)

    def settle(flow: Flow) -> None:
        if world == 1:
            bad.judge()

    pool = pool_for(Reading(source, view), view, mine, workers)
    return Flow(pool, source, plan.rows, labels, settle, cropped=isinstance(view, Cropped), **options)


def evaluation_batches(
    source: Source,
    *,
    preprocess: PreprocessConfig,
    batch_size: int,
    device: torch.device | str,
    rank: int = 0,
    world: int = 1,
    config: DataConfig | None = None,
    labeled: bool = True,
) -> Loader:
    """Each image once over all processes, as evaluation sees it; `batch` counts this process's alone.

    All processes have equally many batches, all of them full: what fills up has number -1 and weight
    0, as have images without a label, where it takes one (`labeled`).
    """
    device, config = torch.device(device), config or DataConfig()
    share = -(-len(source) // world)
    numbers = np.arange(rank * share, min((rank + 1) * share, len(source)))
    count = max(-(-share // batch_size), 1)
    padded = np.append(np.arange(len(numbers)), np.full(max(count * batch_size - len(numbers), 0), -1)).reshape(
        count, batch_size
    )
    labels = Labels(source.targets, source.multi_label, labeled)
    bad = Bad(source.name, len(source), 1.0 if config.skip_bad else None)
    if labeled and not labels.count(np.arange(len(source))).any():
        raise DataError(f"none of the {len(source):,} images of {source.name} has a label to measure on.")
    options: dict[str, Any] = {"device": device, "steps": range(count), "bad": bad}
    options["slots"] = torch.arange(rank * batch_size, (rank + 1) * batch_size)
    view, workers = Evaluated(preprocess), min(count_workers(config, world), -(-len(numbers) // 8))
    held = _held(source, view, preprocess, config, device, workers, numbers)
    if held is not None:
        for number, reason in held.bad.items():
            bad.add(source.key(number), reason)
        if world == 1:
            bad.judge()
        return OnDevice(held, numbers, padded.__getitem__, labels, **options)

    def settle(flow: Flow) -> None:
        if world == 1 and not config.skip_bad:
            flow.rest()
            flow.close()
            bad.judge()

    keys = np.zeros(batch_size, np.uint64)
    pool = pool_for(Reading(source, view), view, batch_size, workers)
    return Flow(
        pool, source, lambda s: (np.where(padded[s] < 0, -1, padded[s] + rank * share), keys), labels, settle, **options
    )


def _held(
    source: Source,
    view: Evaluated,
    preprocess: PreprocessConfig,
    config: DataConfig,
    device: torch.device,
    workers: int,
    numbers: Indices,
) -> resident.Resident | None:
    """Few images are decoded the first time they are measured on, and kept for the next."""
    if len(numbers) == 0:
        return None
    size, key = resident.size_of(view, len(numbers)), (preprocess, device, *numbers[[0, -1]].tolist())
    if (found := resident.kept(source, key)) is not None:
        return found
    if config.resident is False or size > min(EVALUATED, resident.free_memory(device) // resident.SHARE):
        return None
    found = resident.load(source, view, device, workers, numbers)
    if found is not None:
        resident.keep(source, key, found)
    return found


def _chosen(held: resident.Resident, view: View, augment: AugmentConfig) -> str:
    n, _, height, width = held.images.shape
    size = resident.gib(held.images.numel() * held.images.element_size())
    note = f"{n:,} images of {height} x {width} stay on {held.images.device} ({size})"
    if augment.crop == "resized" and not isinstance(view, Native):
        note += ", as evaluation sees them: random parts are taken of that"
    return note


def pool_for(work: Work, view: View, rows: int, workers: int) -> Pool:
    """Workers, as far ahead as is useful and fits."""
    jpeg.trusted()  # found out here, once, not in each process
    depth = depth_for(view, rows)
    return make_pool(work, rows=rows, shape=view.shape, dtype=view.dtype, workers=workers, depth=depth)


def depth_for(view: View, rows: int) -> int:
    """Batches to be ahead."""
    return max(1, min(max(AHEAD, -(-AHEAD_IMAGES // rows)), AHEAD_BYTES // resident.size_of(view, rows)))


def count_workers(config: DataConfig, world: int) -> int:
    """As asked for, else this process's share of the cores."""
    if config.workers is not None:
        return config.workers
    return max(1, min(cores() // _local(world), MOST_WORKERS))


def _local(world: int) -> int:
    """Processes on this machine; torchrun tells."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))


def _sharers(device: torch.device, world: int) -> int:
    return _local(world) if device.type == "cpu" else 1
