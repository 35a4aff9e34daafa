"""Computes parts in one process: reads, decodes and runs batch after batch, on a CPU several at a time.

A matrix product may be summed in another order with another number of threads. So on a CPU each batch is computed with
a fixed number of threads, one by default, and cores are used by computing that many batches at once (`lanes`). The
bits of a row then depend neither on the number of cores nor on which process computes the part. Batches are always
full: a part's last one is padded with black images, as in evaluation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from vitrail.bulk.outputs import Columns, Output
from vitrail.bulk.parts import Part
from vitrail.data.batch import Batch
from vitrail.data.loader import Loader
from vitrail.data.sources.base import Source
from vitrail.data.sources.subset import Subset
from vitrail.evaluation.features import image_batches
from vitrail.model import Model

# B images in a batch


@dataclass(frozen=True)
class ComputedPart:
    """The rows of a part."""

    part: Part
    table: pa.Table
    unreadable: Mapping[str, str]
    """Key of each unreadable image -> why it could not be read."""


@dataclass(frozen=True, kw_only=True)
class PartComputer:
    """Computes parts of a job, with everything opened once."""

    model: Model
    sources: Mapping[str, Source]
    """The splits, by name."""
    output: Output
    """Resolved for this model."""
    batch_size: int
    lanes: int = 0
    """Batches computed at once, each in a thread; 0: in the calling thread, for GPUs and engines."""
    threads: int | None = None
    """torch's threads for each batch; None: not changed."""
    readers: int | None = None
    """Processes that decode; 0: the calling thread; None: one for each core."""

    def compute(
        self, parts: Iterable[Part], advance: Callable[[int], None] = lambda count: None
    ) -> Iterator[ComputedPart]:
        """Compute parts split by split, in order; batches of consecutive parts follow each other without a pause.

        `advance(n)` is called after each n images.
        """
        wanted = sorted(parts, key=lambda part: part.number)
        for split, source in self.sources.items():
            if chosen := [part for part in wanted if part.split == split]:
                yield from self._compute_split(source, chosen, advance)

    def _compute_split(
        self, source: Source, parts: Sequence[Part], advance: Callable[[int], None]
    ) -> Iterator[ComputedPart]:
        numbers = np.concatenate([np.asarray(part.indices) for part in parts])
        ends = dict(zip(np.cumsum([len(part) for part in parts]).tolist(), parts, strict=True))
        rest, seen, pending = Subset(source, numbers), 0, list[tuple[Tensor, Columns]]()
        with (
            _batches(rest, self.model, self.batch_size, self.readers) as batches,
            self._lanes() as outputs,
        ):
            for readable, columns in outputs(batches):
                pending.append((torch.from_numpy(numbers)[readable], columns))
                step = min(self.batch_size, len(rest) - seen)
                seen += step
                if seen in ends:
                    yield self._finish(source, ends[seen], pending, batches.bad)
                    pending = []
                advance(step)

    def _finish(
        self, source: Source, part: Part, pending: Sequence[tuple[Tensor, Columns]], bad: Mapping[str, str]
    ) -> ComputedPart:
        """The rows of a part from its batches. `bad` may have images of later parts: the loader reads ahead."""
        found = torch.cat([readable for readable, _ in pending])
        columns = {name: torch.cat([batch[name] for _, batch in pending]) for name in pending[0][1]}
        missing = sorted(set(part.indices) - set(found.tolist()))
        reasons = {i: bad[source.key(i)] for i in missing}
        table = self.output.table(self.model, source, part.split, part.indices, found, columns, reasons)
        unreadable: dict[str, str] = {}
        for i, reason in reasons.items():
            key = source.key(i)  # a table may list a file twice
            unreadable[key if key not in unreadable else f"{key} (image {i})"] = reason
        return ComputedPart(part, table, unreadable)

    @contextmanager
    def _lanes(self) -> Iterator[Callable[[Iterable[Batch]], Iterator[tuple[Tensor, Columns]]]]:
        """A function that computes batches and yields their results in order."""
        if not self.lanes:
            yield lambda batches: map(self._run, batches)
            return
        with _torch_threads(self.threads), ThreadPoolExecutor(self.lanes, thread_name_prefix="lane") as pool:
            try:
                yield lambda batches: _map_ahead(pool, self._run_in_lane, batches, self.lanes + 1)
            finally:
                pool.shutdown(cancel_futures=True)

    def _run_in_lane(self, batch: Batch) -> tuple[Tensor, Columns]:
        if self.threads is not None and torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)  # each thread has its own number
        return self._run(batch)

    def _run(self, batch: Batch) -> tuple[Tensor, Columns]:
        """Indices of the readable images, and their columns."""
        columns = self.output.run(self.model, batch.images)
        readable = (batch.weights > 0).cpu()
        return batch.indices[readable], {name: column[readable] for name, column in columns.items()}


def _batches(source: Source, model: Model, batch_size: int, readers: int | None) -> Loader:
    return image_batches(source, model.preprocess, batch_size=batch_size, device=model.device, workers=readers)


def _map_ahead(
    pool: ThreadPoolExecutor,
    run: Callable[[Batch], tuple[Tensor, Columns]],
    batches: Iterable[Batch],
    depth: int,
) -> Iterator[tuple[Tensor, Columns]]:
    """The results of `run` in order; up to `depth` batches are computed or wait at a time."""
    pending = deque[Future[tuple[Tensor, Columns]]]()
    for batch in batches:
        pending.append(pool.submit(run, batch))
        if len(pending) == depth:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


@contextmanager
def _torch_threads(threads: int | None) -> Iterator[None]:
    """Set torch's number of threads, part of which is shared by all threads of the process, and restore it."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
