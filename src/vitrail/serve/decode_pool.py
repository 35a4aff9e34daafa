"""Decodes the images of many requests: small images in threads, large ones in low-priority processes.

Each has a fair queue. The headers of all images of a request are inspected before the first one is decoded, so that a
request whose images are too expensive together is rejected as a whole.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy.typing as npt

from vitrail.serve.decode_process import DecodeProcess
from vitrail.serve.fair_queue import ContentionTracker, FairQueue
from vitrail.serve.http_errors import RequestError
from vitrail.serve.image_decoder import ImageDecoder, InspectedImage
from vitrail.serve.limits import Limits
from vitrail.serve.prometheus_metrics import ModelMetrics
from vitrail.serve.quota import Lease, Quota
from vitrail.serve.request_record import RequestRecord
from vitrail.serve.weighted_semaphore import WeightedSemaphore

Pixels = npt.NDArray[Any]
PIXELS_PER_EXTRA_PROCESS = 12_500_000
"""Pixels decoded at a time, per process beyond the first; a pixel needs up to 20 bytes."""
MIN_PIXELS_PER_S = 50e6
"""Lower bound of the speed of a process, for Retry-After."""


class DecodeRequest(Protocol):
    """A request as the pool sees it. `payloads` holds the bytes of each image, then its `InspectedImage`."""

    client: str
    count: int
    payloads: list[Any]
    large_image_lease: Lease | None
    """What the request holds of the quota for large images; released when the request ends."""
    record: RequestRecord

    def expired(self) -> bool: ...

    def take(self, index: int) -> Any: ...


DeliverCallback = Callable[[Any, int, Pixels | None, Exception | None], None]
"""Called once per image, in any thread, as (request, index, pixels, error); both None if the image was dropped."""


class LargeImageLimits:
    """Limits on large images, shared by the pools of all models."""

    def __init__(self, limits: Limits, count: int) -> None:
        """count: maximum number of processes of each pool."""
        self.pixel_semaphore = WeightedSemaphore(limits.max_pixels + (count - 1) * PIXELS_PER_EXTRA_PROCESS)
        self.large_pixel_quota = Quota(
            "pixels of large images are waiting", 8 * limits.max_total_pixels, 2 * limits.max_total_pixels
        )


class DecodePool:
    """Decodes the images of submitted requests and calls `deliver` for each."""

    def __init__(
        self,
        decoder: ImageDecoder,
        count: int,
        metrics: ModelMetrics,
        deliver: DeliverCallback,
        large_images: LargeImageLimits | None = None,
    ) -> None:
        """count: number of threads, and maximum number of processes, which are started on demand."""
        self.decoder, self.metrics, self.deliver = decoder, metrics, deliver
        self._lock = threading.Lock()
        self.small_pending = 0
        """Images queued for or being decoded by threads, which will be ready soon."""
        shared = large_images or LargeImageLimits(decoder.limits, count)
        self.pixel_semaphore, self.large_pixel_quota = shared.pixel_semaphore, shared.large_pixel_quota
        self._small_jobs, self._large_jobs = _JobQueue(count), _JobQueue(count)
        self._stopping = False
        self._threads = [
            threading.Thread(target=work, name=f"{name}-{index}", daemon=True)
            for name, work in (("decode", self._small_image_loop), ("decode-large", self._large_image_loop))
            for index in range(count)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop threads and processes; queued images are dropped."""
        self._stopping = True
        for jobs in (self._small_jobs, self._large_jobs):
            jobs.close()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def release(self) -> None:
        """Drop what refers to the owner of the pool, after `stop`."""
        self._threads.clear()
        del self.deliver

    def submit(self, request: DecodeRequest) -> None:
        self._add_small_pending(request.count)
        self._large_jobs.record_client(request.client)
        self._small_jobs.put(request, None)

    def _add_small_pending(self, change: int) -> None:
        with self._lock:
            self.small_pending += change

    def _small_image_loop(self) -> None:
        set_torch_threads(1)
        while (job := self._small_jobs.get()) is not None:
            request, index = job
            if index is None:
                self._inspect(request)
            else:
                self._decode_in_thread(request, index)
            self._small_jobs.done(request)

    def _large_image_loop(self) -> None:
        process = DecodeProcess(self.decoder.preprocess.config, self.decoder.limits)
        while (job := self._large_jobs.get()) is not None:
            request, index = job
            assert index is not None
            result = self._try_decode(request, index, partial(self._decode_in_process, process, request))
            self._large_jobs.done(request)
            self.deliver(request, index, *result)
        process.close()

    def _decode_in_process(
        self, process: DecodeProcess, request: DecodeRequest, inspected: InspectedImage
    ) -> Pixels | None:
        with self.pixel_semaphore.acquired(inspected.pixels):
            return process.decode(inspected.data, lambda: not (self._stopping or request.expired()))

    def _inspect(self, request: DecodeRequest) -> None:
        """Inspect all images of a request, then decode a single small one directly or queue them."""
        try:
            inspected = self._inspect_images(request)
        except Exception as error:
            self._drop(request, error)
            return
        if inspected is None:
            self._drop(request, None)
            return
        request.payloads[:] = inspected
        if request.expired():  # may have been abandoned meanwhile: keep nothing
            request.payloads[:] = [None] * request.count
        if request.count == 1 and not inspected[0].large:
            self._decode_in_thread(request, 0)
            return
        self._add_small_pending(-sum(image.large for image in inspected))
        for index, image in enumerate(inspected):
            (self._large_jobs if image.large else self._small_jobs).put(request, index)

    def _inspect_images(self, request: DecodeRequest) -> list[InspectedImage] | None:
        """The inspected images; None if the request has expired. Raises RequestError if they are too expensive."""
        inspected = []
        for index in range(request.count):
            data = request.take(index)
            if data is None or request.expired():
                return None
            try:
                inspected.append(self.decoder.inspect(data))
            except RequestError as error:
                raise error.for_image(index, request.count) from None
        total, limit = sum(image.cost for image in inspected), self.decoder.limits.max_total_pixels
        if total > limit:
            message = (
                f"the images have {total:,} pixels together (2 per pixel with transparency, 4 with 16 bits or more, "
                f"1 for every 10 scans of a JPEG); at most {limit:,} are allowed in one request."
            )
            raise RequestError(413, "too_many_pixels", message)
        large = sum(image.cost for image in inspected if image.large)
        if large:
            lease = Lease(self.large_pixel_quota, request.client)
            lease.acquire(large, lambda taken: taken / MIN_PIXELS_PER_S)
            request.large_image_lease = lease
            if request.expired():  # may have been abandoned meanwhile
                lease.release()
        return inspected

    def _drop(self, request: DecodeRequest, error: Exception | None) -> None:
        self._add_small_pending(-request.count)
        for index in range(request.count):
            self.deliver(request, index, None, error)

    def _decode_in_thread(self, request: DecodeRequest, index: int) -> None:
        result = self._try_decode(request, index, self.decoder.decode)
        self._add_small_pending(-1)  # before delivery: a batch waits only while this is above 0
        self.deliver(request, index, *result)

    def _try_decode(
        self, request: DecodeRequest, index: int, decode: Callable[[InspectedImage], Pixels | None]
    ) -> tuple[Pixels | None, Exception | None]:
        inspected = request.take(index)
        try:
            if inspected is None or request.expired():
                return None, None
            start = time.perf_counter()
            with self.metrics.decode_seconds.time():
                pixels = decode(inspected)
            request.record.decoded(index, start)
            return pixels, None
        except Exception as error:
            return None, error.for_image(index, request.count) if isinstance(error, RequestError) else error


class _JobQueue:
    """Thread-safe fair queue of jobs: (request, None) to inspect a request, (request, index) to decode an image.

    Call `done` after each job. With `record_client`, no client occupies all threads while several are active.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._queue: FairQueue[tuple[DecodeRequest, int | None]] = FairQueue()
        self._contention = ContentionTracker()
        self._busy: Counter[str] = Counter()  # busy threads per client
        self._ready = threading.Condition()
        self._closed = False

    def record_client(self, client: str) -> None:
        with self._ready:
            self._contention.record(client)

    def put(self, request: DecodeRequest, index: int | None) -> None:
        with self._ready:
            self._queue.put(request.client, index or 0, (request, index))
            self._ready.notify_all()

    def get(self) -> tuple[DecodeRequest, int | None] | None:
        """Wait for the next job; None if the queue is closed."""
        with self._ready:
            while not self._closed:
                job = self._queue.get(blocked=self._contention.blocked_clients(self._busy, self.threads))
                if job is not None:
                    self._busy[job[0].client] += 1
                    return job
                self._ready.wait(0.1 if self._queue else None)
        return None

    def done(self, request: DecodeRequest) -> None:
        with self._ready:
            self._busy -= Counter((request.client,))
            self._ready.notify_all()

    def close(self) -> None:
        with self._ready:
            self._closed = True
            self._ready.notify_all()


def set_torch_threads(count: int) -> None:
    """Set the number of torch intra-op threads for the calling thread."""
    import torch

    torch.set_num_threads(count)
