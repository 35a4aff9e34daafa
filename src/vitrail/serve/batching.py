"""Images of many requests -> batches for the engine -> each request's outputs.

A request's images are decoded (decoding.py) and put into a queue in which clients take turns; an engine's thread
that is free takes what stands there, up to a batch. It waits for more only while small images are being decoded,
and then only a few milliseconds, so that a lone request is answered at once. A request whose client has gone, or
whose deadline has passed, is skipped: before decoding, before the engine, and after.
What a request brought belongs to its ticket, which drops it when the request is answered or given up,
wherever it then stands.

Explanations (`look`) take turns with batches, one step at a time, and leave one of several engine threads free,
so that neither starves the other.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from vitrail.serve.decoding import Decoders, use_cores
from vitrail.serve.fair_queue import Crowd, FairQueue
from vitrail.serve.images import Images
from vitrail.serve.limits import Work
from vitrail.serve.metrics import Metrics
from vitrail.serve.problems import Gone, Problem
from vitrail.serve.quota import Lease, Quota
from vitrail.serve.served import Served

Pixels = npt.NDArray[Any]
Want = Literal["logits", "features"]
Steps = Generator[Any, None, Any]
"""Work in pieces: it may yield partial results, or None; what it returns is the answer."""
Progress = Callable[[Any], None]
"""Is called on the event loop with each partial result."""
SIZES = (1, 2, 4, 8, 16, 32)
"""Batches that are tried."""
ROUNDS = 4
"""Times each is tried."""
GAIN, LOSS = 0.02, 0.15
"""A larger batch must save so much of an image's time; one that has twice been so much slower is not tried again."""
SHORT = 0.05
"""Seconds for a batch while more than one client is served, unless one image takes longer: the next ones wait."""

log = logging.getLogger("vitrail.serve")


class Ticket:
    """One request on its way, and all that is held for it."""

    def __init__(
        self,
        future: asyncio.Future[Any],
        given: Sequence[bytes | str],
        client: str = "",
        deadline: float | None = None,
        want: Want = "logits",
        prepare: Callable[[Pixels], Pixels] | None = None,
        steps: Callable[[Pixels], Steps] | None = None,
    ) -> None:
        """prepare: what is done to the pixels of each image; steps: it is explained, in these."""
        self.client, self.deadline, self.want = client, deadline, want
        self.prepare, self.steps = prepare, steps
        self.count = len(given)
        self.future: asyncio.Future[Any] | None = future
        """Of the event loop; None when it has been waited for."""
        self.held: list[Any] = list(given)
        """Of each image its bytes, then the pixels or the explanation made of them; None while a thread has it."""
        self.outputs: list[Any] = [None] * self.count
        self.left = self.count
        self.progress: Progress | None = None
        self.large: Lease | None = None
        """What it has of the quota for large images."""
        self.spent = 0.0
        """Seconds of the engine's thread, where it is explained."""
        self.dead = False
        """No client waits for it any more."""

    def late(self) -> bool:
        return self.dead or (self.deadline is not None and time.monotonic() > self.deadline)

    def take(self, number: int) -> Any:
        """What is held of an image; it is the caller's from now on."""
        found, self.held[number] = self.held[number], None
        return found

    def drop(self) -> None:
        """Nothing is kept, whoever still has the ticket: an error in the future would hold the whole request."""
        self.dead = True
        self.held = [None] * self.count
        self.outputs = []
        self.future = self.progress = self.prepare = self.steps = None
        if self.large is not None:
            self.large.release()


Place = tuple[Ticket, int]
"""An image in line: whose it is, and which of them."""
Waiting = tuple[Ticket, int, Pixels]
"""An image whose turn it is."""


class Batcher:
    """The queue and those who work at it: `start`, `answer` and `look` from the event loop, `stop`."""

    def __init__(self, served: Served, images: Images, work: Work, metrics: Metrics) -> None:
        self.served, self.work, self.metrics = served, work, metrics
        self.batch = work.batch_size or 1
        self.short = self.batch
        """The same while more than one client is served."""
        self.warm = False
        """Whether the model has answered once."""
        self.speed = 10.0
        """Images a second, of late."""
        self.look_seconds = 1.0
        """An engine's thread has taken for one explanation, of late."""
        self.waiting = Quota("images are waiting already", work.queue)
        self.looking = Quota("explanations are being made already", work.looks)
        self.decoders = Decoders(images, work.decoders, metrics, self._decoded)
        self._line: FairQueue[Place] = FairQueue()
        self._looks: FairQueue[Ticket] = FairQueue()
        self._crowd = Crowd()
        self._coming = 0  # images that are being decoded
        self._running = 0  # batches
        self._lanes: Counter[str] = Counter()  # of each client: batches that have images of it
        self._stepping = 0  # explanations
        self._ready = threading.Condition()
        self._stopping = False
        self._threads: list[threading.Thread] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Threads begin; the first one tries the engine before it takes anything."""
        self._loop = asyncio.get_running_loop()
        self.decoders.start()
        for number in range(self.work.lanes):
            thread = threading.Thread(target=self._lane, args=(number,), name=f"engine-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    async def stop(self) -> None:
        """What is in the queue is finished first."""
        with self._ready:
            self._stopping = True
            self._ready.notify_all()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        await asyncio.to_thread(self.decoders.stop)

    async def answer(
        self,
        images: Sequence[bytes | str],
        client: str,
        want: Want,
        prepare: Callable[[Pixels], Pixels] | None = None,
        deadline: float | None = None,
        gone: asyncio.Future[Any] | None = None,
    ) -> list[npt.NDArray[np.float32]]:
        """One row for each image. `gone` is done when the client is."""
        assert self._loop is not None
        if len(images) > self.waiting.share:
            message = f"got {len(images)} images, more than may ever wait here: at most {self.waiting.share}."
            raise Problem(413, "too_many_images", message)
        ticket = Ticket(self._loop.create_future(), images, client, deadline, want, prepare)
        return list(await self._answered(ticket, gone))

    async def look(
        self,
        image: bytes | str,
        client: str,
        steps: Callable[[Pixels], Steps],
        prepare: Callable[[Pixels], Pixels] | None = None,
        deadline: float | None = None,
        gone: asyncio.Future[Any] | None = None,
        progress: Progress | None = None,
    ) -> Any:
        """What the steps return, run where the engine runs; `progress` gets what they yield before, in order."""
        assert self._loop is not None
        ticket = Ticket(self._loop.create_future(), [image], client, deadline, "logits", prepare, steps)
        ticket.progress = progress
        self.looking.take(client, 1, lambda count: count * self.look_seconds / self.work.lanes)
        try:
            return (await self._answered(ticket, gone))[0]
        finally:
            self.looking.release(client, 1)

    def check_room(self, client: str) -> None:
        """Raise Problem where this client cannot bring one image more: before its bytes are read."""
        self.waiting.check(client, 1, self._wait_for)

    # On the event loop

    async def _answered(self, ticket: Ticket, gone: asyncio.Future[Any] | None) -> Any:
        self.waiting.take(ticket.client, ticket.count, self._wait_for)
        self.metrics.queue.set(self.waiting.taken)
        try:
            self._submit(ticket)
            return await self._outcome(ticket, gone)
        finally:
            ticket.drop()
            self.waiting.release(ticket.client, ticket.count)
            self.metrics.queue.set(self.waiting.taken)

    def _wait_for(self, count: int) -> float:
        """Seconds until so many images are done."""
        return count / max(self.speed, 0.1)

    async def _outcome(self, ticket: Ticket, gone: asyncio.Future[Any] | None) -> Any:
        """The ticket's outputs, unless the client goes or its deadline passes before."""
        assert self._loop is not None
        assert ticket.future is not None
        alarm = None
        if ticket.deadline is not None:
            left = ticket.deadline - time.monotonic()
            alarm = self._loop.call_later(max(left, 0), _fail, ticket, late())
        if gone is not None:
            gone.add_done_callback(lambda _: _fail(ticket, Gone()))
        try:
            return await ticket.future
        finally:
            if alarm is not None:
                alarm.cancel()

    def _deliver(self, results: Sequence[tuple[Ticket, int, Any]]) -> None:
        for ticket, number, row in results:
            if ticket.future is None:
                continue
            ticket.outputs[number] = row
            ticket.left -= 1
            if not ticket.left and not ticket.future.done():
                ticket.future.set_result(ticket.outputs)

    def _submit(self, ticket: Ticket) -> None:
        with self._ready:
            self._coming += ticket.count
        try:
            self.decoders.submit(ticket)
        except BaseException:  # it never will
            with self._ready:
                self._coming -= ticket.count
            raise

    # In the decoders' threads

    def _decoded(self, ticket: Ticket, number: int, pixels: Pixels | None, error: Exception | None) -> None:
        """Put an image, or what will explain it, into its queue."""
        steps, prepare = ticket.steps, ticket.prepare
        found: Any = pixels
        try:
            if pixels is not None:
                found = pixels if prepare is None else prepare(pixels)
                found = found if steps is None else steps(found)
        except Exception as problem:
            error = problem
        with self._ready:  # whatever happened: who stops waits until none is coming
            self._coming -= 1
            if found is not None and error is None and not ticket.dead:
                ticket.held[number] = found
                self._crowd.note(ticket.client)
                if steps is None:
                    self._line.put(ticket.client, number, (ticket, number))
                else:
                    self._looks.put(ticket.client, 0, ticket)
            self._ready.notify_all()
        if error is not None:
            self._tell(_fail, ticket, error)

    # In the engine's threads

    def _lane(self, number: int) -> None:
        if self.work.threads is not None:
            use_cores(self.work.threads)
        if number == 0:
            self._try_out()
        looked = False
        while True:
            found = self._next(looked)
            if found is None:
                return
            looked = isinstance(found, Ticket)
            if isinstance(found, Ticket):
                self._step(found)
            elif found:
                self._run(found)

    def _next(self, looked: bool) -> Ticket | list[Waiting] | None:
        """A step of an explanation or a batch, in turn where both wait; None: it is time to stop."""
        with self._ready:
            while not (self._line.offers(self._blocked()) or self._may_step()):
                if self._stopping and not (self._coming or self._line or self._looks):
                    return None
                self._ready.wait(0.1 if self._stopping or self._line else None)
            if self._may_step() and not (looked and self._line.offers(self._blocked())):
                self._stepping += 1
                return self._looks.get()
            patience = time.monotonic() + self.work.wait
            while len(self._line) < self._most() and self.decoders.soon:
                left = patience - time.monotonic()
                if left <= 0 or not self._ready.wait(left):
                    break
            return self._gather()

    def _most(self) -> int:
        """Images in a batch that begins now."""
        return self.short if self._crowd else self.batch

    def _blocked(self) -> tuple[str, ...]:
        return self._crowd.blocked(self._lanes, self.work.lanes)

    def _may_step(self) -> bool:
        """Whether an explanation waits, and a thread would be left for batches."""
        return bool(self._looks) and self._stepping < max(self.work.lanes - 1, 1)

    def _gather(self) -> list[Waiting]:
        """Images of one kind in turn; those of requests that are late are left out."""
        group: list[Waiting] = []
        most, blocked = self._most(), self._blocked()
        while len(group) < most:
            found = self._line.get(None if not group else lambda one: one[0].want == group[0][0].want, blocked)
            if found is None:
                break
            ticket, number = found
            pixels = ticket.take(number)
            if pixels is not None and not ticket.late():
                group.append((ticket, number, pixels))
        self._lanes.update({ticket.client for ticket, _, _ in group})
        return group

    def _run(self, group: list[Waiting]) -> None:
        with self._ready:
            self._running += 1
        start = time.perf_counter()
        try:
            pixels = np.stack([found[2] for found in group])
            rows = self.served.outputs(pixels, group[0][0].want)
        except Exception as error:
            log.exception("the engine failed on a batch of %d", len(group))
            self._tell(_fail_all, [ticket for ticket, _, _ in group], error)
            return
        finally:
            took, beside = time.perf_counter() - start, self._running
            with self._ready:
                self._running -= 1
                self._lanes -= Counter({ticket.client for ticket, _, _ in group})
                self._ready.notify_all()
        self.metrics.engine.observe(took)
        self.metrics.batch.observe(len(group))
        self.speed += 0.1 * (beside * len(group) / max(took, 1e-6) - self.speed)  # a lone one may have had all cores
        self._tell(self._deliver, [(ticket, number, row) for (ticket, number, _), row in zip(group, rows, strict=True)])

    def _step(self, ticket: Ticket) -> None:
        """One step of an explanation; it goes back into its queue unless that was the last."""
        steps = ticket.take(0)
        more = steps is not None and not ticket.late() and self._stepped(ticket, steps)
        with self._ready:
            self._stepping -= 1
            if more and not ticket.dead:
                ticket.held[0] = steps
                self._looks.put(ticket.client, 0, ticket)
            self._ready.notify()

    def _stepped(self, ticket: Ticket, steps: Steps) -> bool:
        """Whether there are more."""
        start = time.perf_counter()
        try:
            partial = next(steps)
        except StopIteration as end:
            ticket.spent += time.perf_counter() - start
            self.look_seconds += 0.2 * (ticket.spent - self.look_seconds)
            self._tell(self._deliver, [(ticket, 0, end.value)])
            return False
        except Exception as error:
            self._tell(_fail, ticket, error)
            return False
        ticket.spent += time.perf_counter() - start
        if partial is not None:
            self._tell(_report, ticket, partial)
        return True

    def _try_out(self) -> None:
        """Find the batch that suits the engine; afterwards it is warm."""
        try:
            self.batch, self.short = best_batch(
                self.served, SIZES if self.work.batch_size is None else (self.work.batch_size,)
            )
            self.warm = True
        except Exception:
            log.exception("the engine does not answer")

    def _tell(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)


def best_batch(served: Served, sizes: tuple[int, ...], seconds: float = 3.0) -> tuple[int, int]:
    """The smallest batch that no larger one beats by much, and the largest up to it that is short."""
    # What else runs here does not count, where the thread that asks is the one that computes.
    clock = time.thread_time if served.alone and served.engine.name != "openvino" else time.perf_counter

    def tried(size: int) -> float:
        pixels = np.zeros((size, *served.shape), served.preprocess.dtype)
        start = clock()
        served.outputs(pixels, "logits")
        return (clock() - start) / size

    until = time.monotonic() + seconds
    tried(sizes[0])  # the first time takes longer
    times: dict[int, float] = {}
    for number, size in enumerate(sizes * ROUNDS):  # in turn, so that a bad moment falls on all of them
        if times and time.monotonic() > until:
            break
        if number < 2 * len(sizes) or times[size] <= (1 + LOSS) * min(times.values()):
            times[size] = min(tried(size), times.get(size, math.inf))
    best = next(size for size in sizes if size in times and times[size] * (1 - GAIN) <= min(times.values()))
    short = [size for size in sizes if size <= best and size * times[size] <= SHORT]
    return best, max(short, default=sizes[0])


def late() -> Problem:
    return Problem(504, "deadline_passed", "the deadline passed before there was an answer.")


def _report(ticket: Ticket, partial: Any) -> None:
    if ticket.progress is not None and not ticket.dead:
        ticket.progress(partial)


def _fail(ticket: Ticket, error: Exception) -> None:
    ticket.dead = True
    if ticket.future is not None and not ticket.future.done():
        ticket.future.set_exception(error)


def _fail_all(tickets: Sequence[Ticket], error: Exception) -> None:
    for ticket in tickets:
        _fail(ticket, error)
