"""Training on a plain stream: samples come one after the other, and their order is all that is known.

One thread reads on, others decode; how many changes nothing. What a resumed run needs is the stream's
own state, as it was after the last batch that was given out.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from vitrail import chance
from vitrail.config import DataConfig
from vitrail.data.bad import Bad
from vitrail.data.batch import Batch
from vitrail.data.loader import AHEAD, Loader, depth_for
from vitrail.data.sources.base import Sample, Targets
from vitrail.data.sources.stream import ShardStream
from vitrail.data.staging import Labels, road_to
from vitrail.data.view import Cropped, Reading, View
from vitrail.data.workers import make_pool

FIRST = 1000
"""Before so many images have been seen, the share of bad ones is taken of this number."""


class Read(NamedTuple):
    """A batch's samples, and where the stream was after them."""

    samples: list[Sample]
    state: dict[str, Any]


class Streamed(Loader):
    """Batches of a stream. A sample's number is its place in what this process has read."""

    def __init__(
        self,
        stream: ShardStream,
        view: View,
        config: DataConfig,
        *,
        seed: int,
        rank: int,
        world: int,
        state: dict[str, Any] | None,
        workers: int,
        labeled: bool,
        **options: Any,
    ) -> None:
        bad = Bad(stream.name, FIRST, config.max_bad_fraction)
        super().__init__(bad=bad, cropped=isinstance(view, Cropped), **options)
        self.stream, self.world, self.seed, self.labeled = stream, world, seed, labeled
        self.rows = len(self.slots)
        self._seen(self.step)
        reader = stream.samples(state, rank, world, seed=seed)
        self._state = reader.state if state is None else state
        self.ahead = Ahead(reader, self.rows, self.last - self.step)
        self.held: dict[int, Sample] = {}
        self.under_way: deque[Read] = deque()
        depth = depth_for(view, self.rows)
        self.pool = make_pool(
            Reading(self.held, view), rows=self.rows, shape=view.shape, dtype=view.dtype, workers=workers, depth=depth,
            threads=True,
        )  # fmt: skip
        self.road = road_to(self.device, self.pool)
        self.asked = self.step
        self.places = self.slots.numpy()

    def _ask(self) -> None:
        while self.pool.room and self.asked < self.last:
            read = self.ahead.next(wait=not self.pool.asked)
            if read is None:
                return
            numbers = np.arange(self.rows) + self.asked * self.rows
            self.held.update(zip(numbers.tolist(), read.samples, strict=True))
            self.pool.ask(numbers, chance.keys_of(self.seed, self.asked, self.places))
            self.under_way.append(read)
            self.asked += 1

    def _batch(self, step: int) -> Batch:
        self._ask()
        taken, read = self.pool.take(), self.under_way.popleft()
        for number in taken.indices.tolist():
            del self.held[number]
        for row, reason in taken.problems:
            self._bad.add(read.samples[row].key, reason)
        self._seen(step + 1)
        if taken.problems and self.world == 1:
            self._bad.judge()
        labels = Labels(self._targets(read.samples), self.stream.multi_label, self.labeled)
        rows = np.arange(self.rows)
        batch = self.road.send(taken, labels.of(rows), labels.count(rows)).arrive(step, self.slots)
        self._state = read.state
        self._ask()
        return batch

    def _seen(self, steps: int) -> None:
        """So many steps' images in all processes."""
        self._bad.total = max(self._bad.total, steps * self.rows * self.world)

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
        self.ahead.close()
        self.road.close()
        self.pool.close()


class Ahead:
    """A thread that reads some batches' samples before they are asked for."""

    def __init__(self, reader: Any, rows: int, batches: int) -> None:
        self.done: queue.Queue[Read | BaseException] = queue.Queue(AHEAD)
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._read, args=(reader, rows, batches), daemon=True)
        self.thread.start()

    def _read(self, reader: Any, rows: int, batches: int) -> None:
        try:
            for _ in range(batches):
                self._put(Read([next(reader) for _ in range(rows)], reader.state))
                if self.stop.is_set():
                    return
        except BaseException as error:
            self._put(error)

    def _put(self, what: Read | BaseException) -> None:
        while not self.stop.is_set():
            with contextlib.suppress(queue.Full):
                return self.done.put(what, timeout=0.1)

    def next(self, wait: bool) -> Read | None:
        try:
            found = self.done.get(wait)
        except queue.Empty:
            return None
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self) -> None:
        self.stop.set()
        self.thread.join(timeout=5)
