"""Pictures of many requests -> batches for the engine -> each request's outputs.

A request's pictures are decoded by a pool of threads and put into one line; an engine's thread that is
free takes what stands there, up to a batch. It waits for company only while pictures are being
decoded, and then only a few milliseconds, so that a lone request is answered at once. Whoever has
gone, or whose deadline has passed, is stepped over: before decoding, before the engine, and after.
What a request brought belongs to its ticket, which drops it when the request is answered or given up,
wherever it then stands.

Explanations (`look`) take turns with batches, one step at a time, so that neither starves the other.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from vitrail.serve.limits import Work
from vitrail.serve.metrics import Metrics
from vitrail.serve.problems import Gone, Problem
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
"""A larger batch must save so much of a picture's time; one that has twice been so much slower is not tried again."""

log = logging.getLogger("vitrail.serve")


class Ticket:
    """One request on its way, and all that is held for it."""

    __slots__ = ("count", "dead", "deadline", "future", "held", "left", "looks", "outputs", "progress", "spent", "want")

    def __init__(
        self, future: asyncio.Future[Any], given: Sequence[bytes | str], deadline: float | None, want: Want, looks: int
    ) -> None:
        self.deadline, self.want, self.looks = deadline, want, looks
        self.count = len(given)
        self.future: asyncio.Future[Any] | None = future
        """Of the event loop; None when it has been waited for."""
        self.held: list[Any] = list(given)
        """Of each picture its bytes, then the pixels or the explanation made of them; None while somebody has it."""
        self.outputs: list[Any] = [None] * self.count
        self.left = self.count
        self.progress: Progress | None = None
        self.spent = 0.0
        """Seconds of the engine's thread, where it is explained."""
        self.dead = False
        """Nobody waits for it any more."""

    def late(self) -> bool:
        return self.dead or (self.deadline is not None and time.monotonic() > self.deadline)

    def take(self, number: int) -> Any:
        """What is held of a picture; it is the caller's from now on."""
        found, self.held[number] = self.held[number], None
        return found

    def drop(self) -> None:
        """Nothing is kept, whoever still has the ticket: an error in the future would hold the whole request."""
        self.dead = True
        self.held = [None] * self.count
        self.outputs = []
        self.future = self.progress = None


Place = tuple[Ticket, int]
"""A picture in line: whose it is, and which of them."""
Waiting = tuple[Ticket, int, Pixels]
"""A picture whose turn it is."""


class Batcher:
    """The line and those who work at it: `start`, `answer` and `look` from the event loop, `stop`."""

    def __init__(self, served: Served, work: Work, metrics: Metrics) -> None:
        self.served, self.work, self.metrics = served, work, metrics
        self.batch = work.batch or 1
        self.warm = False
        """Whether the model has answered once."""
        self.waiting = 0
        self.speed = 10.0
        """Pictures a second, of late."""
        self.looking = 0
        """Explanations that wait or are worked on."""
        self.look_seconds = 1.0
        """An engine's thread has taken for one, of late."""
        self._line: deque[Place] = deque()
        self._looks: deque[Ticket] = deque()
        self._coming = 0  # pictures that are being decoded
        self._running = 0  # batches
        self._ready = threading.Condition()
        self._stopping = False
        self._threads: list[threading.Thread] = []
        self._pool = ThreadPoolExecutor(work.decoders, thread_name_prefix="decode", initializer=_alone)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Threads begin; the first one tries the engine before it takes anything."""
        self._loop = asyncio.get_running_loop()
        for number in range(self.work.lanes):
            thread = threading.Thread(target=self._lane, args=(number,), name=f"engine-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    async def stop(self) -> None:
        """What is in line is finished first."""
        with self._ready:
            self._stopping = True
            self._ready.notify_all()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def answer(
        self,
        pictures: Sequence[bytes | str],
        prepare: Callable[[bytes | str], Pixels],
        want: Want,
        deadline: float | None = None,
        gone: asyncio.Future[Any] | None = None,
    ) -> list[npt.NDArray[np.float32]]:
        """One row for each picture. `gone` is done when the client is."""
        ticket = self._admit(pictures, deadline, want)
        try:
            for number in range(ticket.count):
                self._submit(self._decode, ticket, number, prepare)
            return await self._outcome(ticket, gone)
        finally:
            self._leave(ticket)

    async def look(
        self,
        picture: bytes | str,
        prepare: Callable[[bytes | str], Pixels],
        steps: Callable[[Pixels], Steps],
        deadline: float | None = None,
        gone: asyncio.Future[Any] | None = None,
        progress: Progress | None = None,
    ) -> Any:
        """What the steps return, run where the engine runs; `progress` gets what they yield before, in order."""
        if self.looking >= self.work.looks:
            seconds = self.looking * self.look_seconds / self.work.lanes
            raise _full(f"{self.looking} explanations are being made already", seconds)
        ticket = self._admit([picture], deadline, "logits", looks=1)
        ticket.progress = progress
        try:
            self._submit(self._decode, ticket, 0, prepare, steps)
            return (await self._outcome(ticket, gone))[0]
        finally:
            self._leave(ticket)

    def check_room(self) -> None:
        """Raise Problem where one picture more has no place: before its bytes are read."""
        if self.waiting >= self.work.queue:
            raise self._full()

    # On the event loop

    def _admit(self, given: Sequence[bytes | str], deadline: float | None, want: Want, looks: int = 0) -> Ticket:
        assert self._loop is not None
        ticket = Ticket(self._loop.create_future(), given, deadline, want, looks)
        if ticket.count > self.work.queue:
            message = f"got {ticket.count} pictures, more than may ever wait here: at most {self.work.queue}."
            raise Problem(413, "too_many_images", message)
        if self.waiting + ticket.count > self.work.queue:
            raise self._full()
        self._count(ticket, 1)
        return ticket

    def _leave(self, ticket: Ticket) -> None:
        self._count(ticket, -1)
        ticket.drop()

    def _count(self, ticket: Ticket, sign: int) -> None:
        self.waiting += sign * ticket.count
        self.looking += sign * ticket.looks
        self.metrics.queue.set(self.waiting)

    def _full(self) -> Problem:
        return _full(f"{self.waiting} pictures are waiting already", self.waiting / max(self.speed, 0.1))

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

    # In the decoders' threads

    def _submit(self, *call: Any) -> None:
        with self._ready:
            self._coming += 1
        try:
            self._pool.submit(*call)
        except BaseException:  # it never will
            with self._ready:
                self._coming -= 1
            raise

    def _decode(
        self,
        ticket: Ticket,
        number: int,
        prepare: Callable[[bytes | str], Pixels],
        steps: Callable[[Pixels], Steps] | None = None,
    ) -> None:
        found: Pixels | Steps | None = None
        error: Exception | None = None
        picture = ticket.take(number)
        try:
            if picture is not None and not ticket.late():
                with self.metrics.decode.time():
                    pixels = prepare(picture)
                    found = pixels if steps is None else steps(pixels)
        except Exception as problem:
            error = problem.about(number, ticket.count) if isinstance(problem, Problem) else problem
        finally:  # whatever happens: who stops waits until none is coming
            with self._ready:
                self._coming -= 1
                if found is not None and error is None and not ticket.dead:
                    ticket.held[number] = found
                    if steps is None:
                        self._line.append((ticket, number))
                    else:
                        self._looks.append(ticket)
                self._ready.notify()
        if error is not None:
            self._tell(_fail, ticket, error)

    # In the engine's threads

    def _lane(self, number: int) -> None:
        if self.work.threads is not None:
            _use_cores(self.work.threads)
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
            while not (self._line or self._looks):
                if self._stopping and not self._coming:
                    return None
                self._ready.wait(0.1 if self._stopping else None)
            if self._looks and not (looked and self._line):
                return self._looks.popleft()
            patience = time.monotonic() + self.work.wait
            while len(self._line) < self.batch and self._coming:
                left = patience - time.monotonic()
                if left <= 0 or not self._ready.wait(left):
                    break
            return self._gather()

    def _gather(self) -> list[Waiting]:
        """From the front of the line, of one kind; whoever is late is left out."""
        group: list[Waiting] = []
        while self._line and len(group) < self.batch:
            ticket = self._line[0][0]
            if group and ticket.want != group[0][0].want:
                break
            _, number = self._line.popleft()
            pixels = ticket.take(number)
            if pixels is not None and not ticket.late():
                group.append((ticket, number, pixels))
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
        self.metrics.engine.observe(took)
        self.metrics.batch.observe(len(group))
        self.speed += 0.1 * (beside * len(group) / max(took, 1e-6) - self.speed)  # a lone one may have had all cores
        self._tell(self._deliver, [(ticket, number, row) for (ticket, number, _), row in zip(group, rows, strict=True)])

    def _step(self, ticket: Ticket) -> None:
        """One step of an explanation; it goes back into line unless that was the last."""
        steps = ticket.take(0)
        if steps is None or ticket.late():
            return
        start = time.perf_counter()
        try:
            partial = next(steps)
        except StopIteration as end:
            ticket.spent += time.perf_counter() - start
            self.look_seconds += 0.2 * (ticket.spent - self.look_seconds)
            self._tell(self._deliver, [(ticket, 0, end.value)])
        except Exception as error:
            self._tell(_fail, ticket, error)
        else:
            ticket.spent += time.perf_counter() - start
            if partial is not None:
                self._tell(_report, ticket, partial)
            with self._ready:
                if not ticket.dead:
                    ticket.held[0] = steps
                    self._looks.append(ticket)

    def _try_out(self) -> None:
        """Find the batch that suits the engine; afterwards it is warm."""
        try:
            found = best_batch(self.served, SIZES if self.work.batch is None else (self.work.batch,))
            self.batch = self.work.batch or found
            self.warm = True
        except Exception:
            log.exception("the engine does not answer")

    def _tell(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)


def best_batch(served: Served, sizes: tuple[int, ...], seconds: float = 3.0) -> int:
    """The smallest batch that no larger one beats by much; trying ends after so many seconds."""
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
    return next(size for size in sizes if size in times and times[size] * (1 - GAIN) <= min(times.values()))


def late() -> Problem:
    return Problem(504, "deadline_passed", "the deadline passed before there was an answer.")


def _full(what: str, seconds: float) -> Problem:
    """Not now: and when it is worth another try."""
    after = min(max(math.ceil(seconds), 1), 60)
    return Problem(503, "queue_full", f"{what}; try again in {after} s.", {"Retry-After": str(after)})


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


def _alone() -> None:
    """A decoder computes on its own core."""
    _use_cores(1)


def _use_cores(count: int) -> None:
    import torch

    torch.set_num_threads(count)
