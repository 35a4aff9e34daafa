"""Dynamic batching: images of many requests -> batches for the engine -> the outputs of each request.

Decoded images (decode_pool.py) enter a fair queue. A free engine thread takes queued images, up to a batch. It waits
for more only while small images are being decoded, and only a few milliseconds, so that a single request is answered
without delay. Requests whose client has disconnected or whose deadline has passed are skipped before decoding, before
the engine, and after. A `PendingRequest` holds all data of a request and drops it when the request ends, at any stage.

Explanations alternate with batches, one step at a time, and leave one of several engine threads to batches, so that
neither starves the other.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from vitrail.serve.batch_size import BATCH_SIZES, choose_batch_size
from vitrail.serve.decode_pool import DecodePool, LargeImageLimits, set_torch_threads
from vitrail.serve.fair_queue import ContentionTracker, FairQueue
from vitrail.serve.http_errors import ClientDisconnected, RequestError
from vitrail.serve.image_decoder import ImageDecoder
from vitrail.serve.limits import BatchingConfig
from vitrail.serve.prometheus_metrics import ModelMetrics
from vitrail.serve.quota import Lease, Quota
from vitrail.serve.request_record import current_record, join_ids
from vitrail.serve.served_model import ServedModel

Pixels = npt.NDArray[Any]
OutputName = Literal["logits", "features"]
Steps = Generator[Any, None, Any]
"""A computation in steps: yields partial results or None, and returns the result."""
ProgressCallback = Callable[[Any], None]
"""Called on the event loop with each partial result."""
log = logging.getLogger("vitrail.serve")


class PendingRequest:
    """A request in progress, with all its data."""

    def __init__(
        self,
        future: asyncio.Future[Any],
        images: Sequence[bytes | str],
        client: str = "",
        deadline: float | None = None,
        output: OutputName = "logits",
        prepare: Callable[[Pixels], Pixels] | None = None,
        steps: Callable[[Pixels], Steps] | None = None,
    ) -> None:
        """prepare: applied to the pixels of each image; steps: creates the steps of an explanation, if it is one."""
        self.client, self.deadline, self.output = client, deadline, output
        self.prepare, self.steps, self.record = prepare, steps, current_record()
        self.count = len(images)
        self.future: asyncio.Future[Any] | None = future
        """Future of the event loop with the outputs; None after the request has ended."""
        self.payloads: list[Any] = list(images)
        """Per image: its bytes, then its pixels or explanation steps; None while a thread works on it."""
        self.outputs: list[Any] = [None] * self.count
        self.remaining = self.count
        self.progress: ProgressCallback | None = None
        self.large_image_lease: Lease | None = None
        """What the request holds of the quota for large images."""
        self.abandoned = False
        """Whether the client no longer waits for it."""

    def expired(self, within: float = 0.0) -> bool:
        """Whether nobody waits for the response any more, or not `within` seconds from now."""
        return self.abandoned or (self.deadline is not None and time.monotonic() + within > self.deadline)

    def take(self, index: int) -> Any:
        """Remove and return the payload of an image."""
        item, self.payloads[index] = self.payloads[index], None
        return item

    def discard(self) -> None:
        """Drop all data, even if other objects still refer to this request."""
        self.abandoned = True
        self.payloads = [None] * self.count
        self.outputs = []
        self.future = self.progress = self.prepare = self.steps = None
        if self.large_image_lease is not None:
            self.large_image_lease.release()


QueuedImage = tuple[PendingRequest, int]
"""An image in the queue: its request, and its index there."""
BatchItem = tuple[PendingRequest, int, Pixels]
"""An image of a batch: its request, its index there, and its pixels."""


class Batcher:
    """The queues and the engine threads. `start`, `infer`, `explain` and `stop` are called on the event loop."""

    def __init__(
        self,
        served: ServedModel,
        decoder: ImageDecoder,
        config: BatchingConfig,
        metrics: ModelMetrics,
        large_images: LargeImageLimits | None = None,
    ) -> None:
        self.served, self.config, self.metrics = served, config, metrics
        self.batch_size = config.batch_size or 1
        self.shared_batch_size = self.batch_size
        """Batch size while several clients are active."""
        self.ready = False
        """Whether the engine has been warmed up."""
        self.images_per_second = 10.0
        """Recent throughput."""
        self.batch_seconds = 0.0
        """Recent duration of a batch."""
        self.explain_seconds = 1.0
        """Recent engine time of one explanation."""
        self.image_quota = Quota("images are waiting already", config.max_queue)
        self.explain_quota = Quota("explanations are in progress already", config.max_explanations)
        self.decode_pool = DecodePool(decoder, config.decode_threads, metrics, self._on_decoded, large_images)
        self._image_queue: FairQueue[QueuedImage] = FairQueue()
        self._explain_queue: FairQueue[PendingRequest] = FairQueue()
        self._contention = ContentionTracker()
        self._decoding = 0  # images being decoded
        self._running_batches = 0  # batches in the engine
        self._batches_per_client: Counter[str] = Counter()  # per client: running batches with its images
        self._running_steps = 0  # explanation steps in the engine
        self._changed = threading.Condition()
        self._stopping = False
        self._threads: list[threading.Thread] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the threads; the first one warms up the engine before it takes work."""
        self._loop = asyncio.get_running_loop()
        self.decode_pool.start()
        for index in range(self.config.engine_threads):
            thread = threading.Thread(target=self._engine_loop, args=(index,), name=f"engine-{index}", daemon=True)
            self._threads.append(thread)
            thread.start()

    async def stop(self) -> None:
        """Finish the queued work, then stop the threads."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.is_alive():  # not if it could not be started
                await asyncio.to_thread(thread.join)
        await asyncio.to_thread(self.decode_pool.stop)

    async def infer(
        self,
        images: Sequence[bytes | str],
        client: str,
        output: OutputName,
        prepare: Callable[[Pixels], Pixels] | None = None,
        deadline: float | None = None,
        disconnected: asyncio.Future[Any] | None = None,
    ) -> list[npt.NDArray[np.float32]]:
        """Engine outputs, one row per image. `disconnected` completes when the client disconnects."""
        assert self._loop is not None
        if len(images) > self.image_quota.client_limit:
            message = f"got {len(images)} images; at most {self.image_quota.client_limit} can be queued."
            raise RequestError(413, "too_many_images", message)
        pending = PendingRequest(self._loop.create_future(), images, client, deadline, output, prepare)
        return list(await self._process(pending, disconnected))

    async def explain(
        self,
        image: bytes | str,
        client: str,
        steps: Callable[[Pixels], Steps],
        prepare: Callable[[Pixels], Pixels] | None = None,
        deadline: float | None = None,
        disconnected: asyncio.Future[Any] | None = None,
        progress: ProgressCallback | None = None,
    ) -> Any:
        """Run explanation steps in an engine thread and return their result. `progress` receives what they yield."""
        assert self._loop is not None
        pending = PendingRequest(self._loop.create_future(), [image], client, deadline, "logits", prepare, steps)
        pending.progress = progress
        self.explain_quota.acquire(client, 1, lambda count: count * self.explain_seconds / self.config.engine_threads)
        try:
            return (await self._process(pending, disconnected))[0]
        finally:
            self.explain_quota.release(client, 1)

    def check_quota(self, client: str) -> None:
        """Raise RequestError if this client cannot queue another image; called before the body is read."""
        self.image_quota.check(client, 1, self._seconds_for)

    # On the event loop

    async def _process(self, pending: PendingRequest, disconnected: asyncio.Future[Any] | None) -> Any:
        self.image_quota.acquire(pending.client, pending.count, self._seconds_for)
        pending.record.count_images(pending.count)
        self.metrics.queued_images.set(self.image_quota.used)
        try:
            self._submit(pending)
            return await self._wait(pending, disconnected)
        finally:
            pending.discard()
            self.image_quota.release(pending.client, pending.count)
            self.metrics.queued_images.set(self.image_quota.used)

    def _seconds_for(self, count: int) -> float:
        """Estimated seconds to process `count` images."""
        return count / max(self.images_per_second, 0.1)

    async def _wait(self, pending: PendingRequest, disconnected: asyncio.Future[Any] | None) -> Any:
        """Wait for the outputs; raises if the client disconnects or the deadline passes first."""
        assert self._loop is not None
        assert pending.future is not None
        alarm = None
        if pending.deadline is not None:
            remaining = pending.deadline - time.monotonic()
            alarm = self._loop.call_later(max(remaining, 0), _fail, pending, deadline_error())
        if disconnected is not None:
            disconnected.add_done_callback(lambda _: _fail(pending, ClientDisconnected()))
        try:
            return await pending.future
        finally:
            if alarm is not None:
                alarm.cancel()

    def _deliver(self, results: Sequence[tuple[PendingRequest, int, Any]]) -> None:
        for pending, index, row in results:
            if pending.future is None:
                continue
            pending.outputs[index] = row
            pending.remaining -= 1
            if not pending.remaining and not pending.future.done():
                pending.future.set_result(pending.outputs)

    def _submit(self, pending: PendingRequest) -> None:
        with self._changed:
            self._decoding += pending.count
        try:
            self.decode_pool.submit(pending)
        except BaseException:  # it will not be decoded
            with self._changed:
                self._decoding -= pending.count
            raise

    # In the decode threads

    def _on_decoded(self, pending: PendingRequest, index: int, pixels: Pixels | None, error: Exception | None) -> None:
        """Put a decoded image, or its explanation steps, into the queue."""
        steps, prepare = pending.steps, pending.prepare
        item: Any = pixels
        try:
            if pixels is not None:
                item = pixels if prepare is None else prepare(pixels)
                item = item if steps is None else steps(item)
        except Exception as exception:
            error = exception
        with self._changed:  # in any case: `stop` waits for this to reach 0
            self._decoding -= 1
            if item is not None and error is None and not pending.abandoned:
                pending.payloads[index] = item
                self._contention.record(pending.client)
                if steps is None:
                    self._image_queue.put(pending.client, index, (pending, index))
                else:
                    self._explain_queue.put(pending.client, 0, pending)
            self._changed.notify_all()
        if error is not None:
            self._call_on_loop(_fail, pending, error)

    # In the engine threads

    def _engine_loop(self, index: int) -> None:
        if self.config.intra_op_threads is not None:
            set_torch_threads(self.config.intra_op_threads)
        if index == 0 and not self.ready:
            self._try_warm_up()
        explained_last = False
        while True:
            item = self._next_work(explained_last)
            if item is None:
                return
            explained_last = isinstance(item, PendingRequest)
            if isinstance(item, PendingRequest):
                self._run_explain_step(item)
            elif item:
                self._run_batch(item)

    def _next_work(self, explained_last: bool) -> PendingRequest | list[BatchItem] | None:
        """An explanation to advance or a batch, alternating if both wait; None to stop."""
        with self._changed:
            while not (self._image_queue.has_item(self._blocked_clients()) or self._can_explain()):
                if self._stopping and not (self._decoding or self._image_queue or self._explain_queue):
                    return None
                self._changed.wait(0.1 if self._stopping or self._image_queue else None)
            if self._can_explain() and not (explained_last and self._image_queue.has_item(self._blocked_clients())):
                self._running_steps += 1
                return self._explain_queue.get()
            deadline = time.monotonic() + self.config.batch_delay
            while len(self._image_queue) < self._max_batch_size() and self.decode_pool.small_pending:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self._changed.wait(remaining):
                    break
            return self._take_batch()

    def _max_batch_size(self) -> int:
        """Maximum size of the next batch."""
        return self.shared_batch_size if self._contention else self.batch_size

    def _blocked_clients(self) -> tuple[str, ...]:
        return self._contention.blocked_clients(self._batches_per_client, self.config.engine_threads)

    def _can_explain(self) -> bool:
        """Whether an explanation is queued and another thread remains for batches."""
        return bool(self._explain_queue) and self._running_steps < max(self.config.engine_threads - 1, 1)

    def _take_batch(self) -> list[BatchItem]:
        """Take a batch of images that need the same output from the queue, skipping expired requests.

        While others wait, so are those that expire before a batch ends: with a long queue and deadlines, every image
        would otherwise reach the engine just before its deadline, and be computed for nothing.
        """
        batch: list[BatchItem] = []
        max_size, blocked = self._max_batch_size(), self._blocked_clients()
        while len(batch) < max_size:
            item = self._image_queue.get(
                None if not batch else lambda item: item[0].output == batch[0][0].output, blocked
            )
            if item is None:
                break
            pending, index = item
            pixels = pending.take(index)
            if pixels is not None and not pending.expired(self.batch_seconds if self._image_queue else 0.0):
                batch.append((pending, index, pixels))
        self._batches_per_client.update({pending.client for pending, _, _ in batch})
        return batch

    def _run_batch(self, batch: list[BatchItem]) -> None:
        with self._changed:
            self._running_batches += 1
        start = time.perf_counter()
        try:
            pixels = np.stack([item[2] for item in batch])
            rows = self.served.outputs(pixels, batch[0][0].output)
        except Exception as error:
            ids = join_ids(pending.record for pending, _, _ in batch)
            log.exception("the engine failed on a batch of %d images of requests %s", len(batch), ids)
            self._call_on_loop(_fail_all, [pending for pending, _, _ in batch], error)
            return
        finally:
            took, parallel = time.perf_counter() - start, self._running_batches
            with self._changed:
                self._running_batches -= 1
                self._batches_per_client -= Counter({pending.client for pending, _, _ in batch})
                self._changed.notify_all()
        self.metrics.engine_seconds.observe(took)
        self.metrics.batch_size.observe(len(batch))
        for pending, index, _ in batch:
            pending.record.ran_batch(index, start, start + took, len(batch))
        rate = parallel * len(batch) / max(took, 1e-6)  # not engine_threads: a single batch may use all cores
        self.images_per_second += 0.1 * (rate - self.images_per_second)
        self.batch_seconds += 0.1 * (took - self.batch_seconds)
        results = [(pending, index, row) for (pending, index, _), row in zip(batch, rows, strict=True)]
        self._call_on_loop(self._deliver, results)

    def _run_explain_step(self, pending: PendingRequest) -> None:
        """Run one step of an explanation and queue it again unless it is finished."""
        steps = pending.take(0)
        more = steps is not None and not pending.expired() and self._advance(pending, steps)
        with self._changed:
            self._running_steps -= 1
            if more and not pending.abandoned:
                pending.payloads[0] = steps
                self._explain_queue.put(pending.client, 0, pending)
            self._changed.notify()

    def _advance(self, pending: PendingRequest, steps: Steps) -> bool:
        """Run the next step; returns whether there are more."""
        start = time.perf_counter()
        try:
            partial = next(steps)
        except StopIteration as end:
            pending.record.ran_step(start)
            self.explain_seconds += 0.2 * (pending.record.engine_seconds - self.explain_seconds)
            self._call_on_loop(self._deliver, [(pending, 0, end.value)])
            return False
        except Exception as error:
            self._call_on_loop(_fail, pending, error)
            return False
        pending.record.ran_step(start)
        if partial is not None:
            self._call_on_loop(_report_progress, pending, partial)
        return True

    def _try_warm_up(self) -> None:
        try:
            self.warm_up()
        except Exception:
            log.exception("the engine failed during warm-up")

    def warm_up(self, like: Batcher | None = None) -> None:
        """Warm up the engine and choose the batch size, in any thread.

        like: the queues of another version; if it has the same architecture and engine, so are its batch sizes.
        """
        if self.config.intra_op_threads is not None:
            set_torch_threads(self.config.intra_op_threads)
        sizes = BATCH_SIZES if self.config.batch_size is None else (self.config.batch_size,)
        if like is not None and like.served.computes_like(self.served):
            sizes = (like.batch_size,)
        self.batch_size, self.shared_batch_size = choose_batch_size(self.served, sizes)
        if len(sizes) == 1 and like is not None:
            self.shared_batch_size = min(self.batch_size, like.shared_batch_size)
        self.ready = True

    def release(self) -> None:
        """Drop the model after `stop`, so that its memory is free even if something still refers to the queues."""
        self._threads.clear()
        self.decode_pool.release()
        del self.served

    def _call_on_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)


def deadline_error() -> RequestError:
    return RequestError(504, "deadline_exceeded", "the deadline passed before the response was ready.")


def _report_progress(pending: PendingRequest, partial: Any) -> None:
    if pending.progress is not None and not pending.abandoned:
        pending.progress(partial)


def _fail(pending: PendingRequest, error: Exception) -> None:
    pending.abandoned = True
    if pending.future is not None and not pending.future.done():
        pending.future.set_exception(error)


def _fail_all(requests: Sequence[PendingRequest], error: Exception) -> None:
    for pending in requests:
        _fail(pending, error)
