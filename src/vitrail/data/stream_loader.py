"""Training on a sequential stream of samples, which cannot be indexed.

One thread reads samples and others decode them; their number does not change the batches. A resumed run
needs the stream's state after the last batch that was returned.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from vitrail import rng
from vitrail.config import DataConfig
from vitrail.data.bad_images import BadImages
from vitrail.data.batch import Batch
from vitrail.data.loader import PREFETCH_BATCHES, Loader, prefetch_depth
from vitrail.data.sources.base import Sample, Targets
from vitrail.data.sources.stream import ShardStream
from vitrail.data.transfer import TargetTable, make_transfer
from vitrail.data.transforms import RandomResizedCrop, SampleReader, Transform
from vitrail.data.worker_pool import make_pool

MIN_TOTAL = 1000
"""The fraction of bad images is relative to at least this many images."""


class StreamedSamples(NamedTuple):
    """A batch's samples and the stream's state after them."""

    samples: list[Sample]
    state: dict[str, Any]


class StreamLoader(Loader):
    """Batches of a stream. A sample's index is its position in what this process has read."""

    def __init__(
        self,
        stream: ShardStream,
        transform: Transform,
        config: DataConfig,
        *,
        seed: int,
        rank: int,
        world_size: int,
        state: dict[str, Any] | None,
        workers: int,
        labeled: bool,
        **options: Any,
    ) -> None:
        bad = BadImages(stream.name, MIN_TOTAL, config.max_bad_fraction)
        super().__init__(bad=bad, cropped=isinstance(transform, RandomResizedCrop), **options)
        self.stream, self.world_size, self.seed, self.labeled = stream, world_size, seed, labeled
        self.rows = len(self.slots)
        self._update_total(self.step)
        reader = stream.samples(state, rank, world_size, seed=seed)
        self._state = reader.state if state is None else state
        self.reader_thread = ReaderThread(reader, self.rows, self.stop_step - self.step)
        self.samples: dict[int, Sample] = {}
        self.in_flight: deque[StreamedSamples] = deque()
        depth = prefetch_depth(transform, self.rows)
        self.pool = make_pool(
            SampleReader(self.samples, transform),
            rows=self.rows,
            shape=transform.shape,
            dtype=transform.dtype,
            workers=workers,
            depth=depth,
            threads=True,
        )
        self.transfer = make_transfer(self.device, self.pool)
        self.next_submitted = self.step
        self.slot_numbers = self.slots.numpy()

    def _submit(self) -> None:
        while self.pool.has_room and self.next_submitted < self.stop_step:
            read = self.reader_thread.next(wait=not self.pool.pending)
            if read is None:
                return
            indices = np.arange(self.rows) + self.next_submitted * self.rows
            self.samples.update(zip(indices.tolist(), read.samples, strict=True))
            self.pool.submit(indices, rng.sample_seeds(self.seed, self.next_submitted, self.slot_numbers))
            self.in_flight.append(read)
            self.next_submitted += 1

    def _load_batch(self, step: int) -> Batch:
        self._submit()
        finished, read = self.pool.get(), self.in_flight.popleft()
        for index in finished.indices.tolist():
            del self.samples[index]
        for row, reason in finished.errors:
            self._bad.add(read.samples[row].key, reason)
        self._update_total(step + 1)
        if finished.errors and self.world_size == 1:
            self._bad.raise_if_too_many()
        target_table = TargetTable(self._targets(read.samples), self.stream.multi_label, self.labeled)
        rows = np.arange(self.rows)
        batch = self.transfer.send(finished, target_table.targets_for(rows), target_table.usable(rows)).to_batch(
            step, self.slots
        )
        self._state = read.state
        self._submit()
        return batch

    def _update_total(self, steps: int) -> None:
        """Set the number of images that all processes have seen after `steps` steps."""
        self._bad.total = max(self._bad.total, steps * self.rows * self.world_size)

    def _targets(self, samples: list[Sample]) -> Targets:
        if not self.stream.multi_label:
            return np.array([sample.target for sample in samples], np.int64)
        targets = np.zeros((len(samples), len(self.stream.labels)), np.bool_)
        for row, sample in enumerate(samples):
            targets[row, np.atleast_1d(np.array(sample.target, np.int64))] = True
        return targets

    def state(self) -> dict[str, Any]:
        return self._state

    def close(self) -> None:
        super().close()
        self.reader_thread.close()
        self.transfer.close()
        self.pool.close()


class ReaderThread:
    """A thread that prefetches the samples of a few batches."""

    def __init__(self, reader: Any, rows: int, batches: int) -> None:
        self.queue: queue.Queue[StreamedSamples | BaseException] = queue.Queue(PREFETCH_BATCHES)
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._read, args=(reader, rows, batches), daemon=True)
        self.thread.start()

    def _read(self, reader: Any, rows: int, batches: int) -> None:
        try:
            for _ in range(batches):
                self._put(StreamedSamples([next(reader) for _ in range(rows)], reader.state))
                if self.stop.is_set():
                    return
        except BaseException as error:
            self._put(error)

    def _put(self, item: StreamedSamples | BaseException) -> None:
        while not self.stop.is_set():
            with contextlib.suppress(queue.Full):
                return self.queue.put(item, timeout=0.1)

    def next(self, wait: bool) -> StreamedSamples | None:
        try:
            item = self.queue.get(wait)
        except queue.Empty:
            return None
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        self.stop.set()
        self.thread.join(timeout=5)
