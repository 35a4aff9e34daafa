"""Images of many requests -> pixels: small ones in threads, large ones in processes of low priority.

Both have a queue in which clients take turns. The headers of a request's images are judged
before the first of them is decoded, so that what it costs is known, and refused, as a whole.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy.typing as npt

from vitrail.serve.budget import Budget
from vitrail.serve.decode_process import DecodeProcess
from vitrail.serve.fair_queue import Crowd, FairQueue
from vitrail.serve.images import Images, Opened
from vitrail.serve.metrics import Metrics
from vitrail.serve.problems import Problem
from vitrail.serve.quota import Lease, Quota

Pixels = npt.NDArray[Any]
AT_A_TIME = 12_500_000
"""Pixels that are decoded at a time for each process beside the one that has the largest image: up to 20 bytes each."""
SPEED = 50e6
"""Pixels a second that a process decodes, at least: for Retry-After."""


class Request(Protocol):
    """Images of one client, and what is held of each: its bytes, then what `Images.open` made of them."""

    client: str
    count: int
    held: list[Any]
    large: Lease | None
    """What it has of the quota for large images; whoever ends the request releases it."""

    def late(self) -> bool: ...

    def take(self, number: int) -> Any: ...


Deliver = Callable[[Any, int, Pixels | None, Exception | None], None]
"""Is called once for each image of a request, in any thread: with pixels, an error, or neither if it was dropped."""


class Decoders:
    """`submit` a request; `deliver` is called for each of its images."""

    def __init__(self, images: Images, count: int, metrics: Metrics, deliver: Deliver) -> None:
        """count: threads, and processes too; a process is started when there is an image for it."""
        limits = images.limits
        self.images, self.metrics, self.deliver = images, metrics, deliver
        self._lock = threading.Lock()
        self.soon = 0
        """Images that wait for a thread or are decoded by one, and so will be ready in a moment."""
        self.budget = Budget(limits.pixels + (count - 1) * AT_A_TIME)
        self.quota = Quota("pixels of large images are waiting", 8 * limits.total_pixels, 2 * limits.total_pixels)
        self._small, self._large = _Jobs(count), _Jobs(count)
        self._stopping = False
        self._threads = [
            threading.Thread(target=work, name=f"{name}-{number}", daemon=True)
            for name, work in (("decode", self._decode_small), ("decode-large", self._decode_large))
            for number in range(count)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End threads and processes; what still waits is dropped."""
        self._stopping = True
        for jobs in (self._small, self._large):
            jobs.close()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def submit(self, request: Request) -> None:
        self._count(request.count)
        self._large.note(request.client)
        self._small.put(request, None)

    def _count(self, change: int) -> None:
        with self._lock:
            self.soon += change

    def _decode_small(self) -> None:
        use_cores(1)
        while (job := self._small.get()) is not None:
            request, number = job
            if number is None:
                self._judge(request)
            else:
                self._decode_here(request, number)
            self._small.done(request)

    def _decode_large(self) -> None:
        process = DecodeProcess(self.images.preprocess.config, self.images.limits)
        while (job := self._large.get()) is not None:
            request, number = job
            assert number is not None
            found = self._decoded(request, number, partial(self._elsewhere, process, request))
            self._large.done(request)
            self.deliver(request, number, *found)
        process.close()

    def _elsewhere(self, process: DecodeProcess, request: Request, opened: Opened) -> Pixels | None:
        with self.budget.taken(opened.pixels):
            return process.pixels(opened.data, lambda: not (self._stopping or request.late()))

    def _judge(self, request: Request) -> None:
        """Open all images of a request, then decode the only one or put them into the queues."""
        try:
            opened = self._opened(request)
        except Exception as error:
            self._drop(request, error)
            return
        if opened is None:
            self._drop(request, None)
            return
        request.held[:] = opened
        if request.late():  # it may have been given up just before: nothing of it is kept
            request.held[:] = [None] * request.count
        if request.count == 1 and not opened[0].large:
            self._decode_here(request, 0)
            return
        self._count(-sum(one.large for one in opened))
        for number, one in enumerate(opened):
            (self._large if one.large else self._small).put(request, number)

    def _opened(self, request: Request) -> list[Opened] | None:
        """None where nobody waits any more; Problem where they cost more than one request or client may."""
        opened = []
        for number in range(request.count):
            data = request.take(number)
            if data is None or request.late():
                return None
            try:
                opened.append(self.images.open(data))
            except Problem as problem:
                raise problem.about(number, request.count) from None
        total, most = sum(one.cost for one in opened), self.images.limits.total_pixels
        if total > most:
            message = (
                f"the images have {total:,} pixels together, where one with transparency counts 2, one of 16 bits or "
                f"more counts 4 and a JPEG 1 for every 10 scans: at most {most:,} are taken in one request."
            )
            raise Problem(413, "too_many_pixels", message)
        large = sum(one.cost for one in opened if one.large)
        if large:
            lease = Lease(self.quota, request.client)
            lease.take(large, lambda taken: taken / SPEED)
            request.large = lease
            if request.late():  # it may have been given up just before
                lease.release()
        return opened

    def _drop(self, request: Request, error: Exception | None) -> None:
        self._count(-request.count)
        for number in range(request.count):
            self.deliver(request, number, None, error)

    def _decode_here(self, request: Request, number: int) -> None:
        found = self._decoded(request, number, self.images.unpack)
        self._count(-1)  # before it is delivered: the engine waits for none but those still to come
        self.deliver(request, number, *found)

    def _decoded(
        self, request: Request, number: int, decode: Callable[[Opened], Pixels | None]
    ) -> tuple[Pixels | None, Exception | None]:
        opened = request.take(number)
        try:
            if opened is None or request.late():
                return None, None
            with self.metrics.decode.time():
                return decode(opened), None
        except Exception as error:
            return None, error.about(number, request.count) if isinstance(error, Problem) else error


class _Jobs:
    """A fair queue for threads: all images of a request (None), or one of them.

    `get` a job and, after it, call `done`. Where requests are noted, no client has all threads while there are others.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._queue: FairQueue[tuple[Request, int | None]] = FairQueue()
        self._crowd = Crowd()
        self._busy: Counter[str] = Counter()  # threads that have a job of each client
        self._ready = threading.Condition()
        self._closed = False

    def note(self, client: str) -> None:
        with self._ready:
            self._crowd.note(client)

    def put(self, request: Request, number: int | None) -> None:
        with self._ready:
            self._queue.put(request.client, number or 0, (request, number))
            self._ready.notify_all()

    def get(self) -> tuple[Request, int | None] | None:
        """Wait for the next one; None: the queue is closed."""
        with self._ready:
            while not self._closed:
                found = self._queue.get(blocked=self._crowd.blocked(self._busy, self.threads))
                if found is not None:
                    self._busy[found[0].client] += 1
                    return found
                self._ready.wait(0.1 if self._queue else None)
        return None

    def done(self, request: Request) -> None:
        with self._ready:
            self._busy -= Counter((request.client,))
            self._ready.notify_all()

    def close(self) -> None:
        with self._ready:
            self._closed = True
            self._ready.notify_all()


def use_cores(count: int) -> None:
    """So many for what torch computes in this thread."""
    import torch

    torch.set_num_threads(count)
