"""Processes that fill batches with images while the model computes.

A *work* fills rows of an array: `work(indices, keys, out)`. A *pool* does it for whole batches, some
batches ahead, in memory that its processes share, so that pixels are written once and never sent:

    ask     begin a batch, while there is `room`
    take    the batch that was asked for first, when it is done

Whoever does the work, and how many, changes nothing about what is done.

Where it can be (Linux) a pool forks: its processes start within milliseconds, with everything
imported, and end with the process that made them, however that ends. Elsewhere a new process would
import everything anew, and threads do the work: decoding and resizing let others run meanwhile.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import multiprocessing
import os
import select
import signal
import struct
import sys
import threading
import traceback
import warnings
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from vitrail.chance import Keys
from vitrail.data.order import Indices
from vitrail.errors import TrainError
from vitrail.runtime.heap import keep_heap

# n rows of a batch

Problems = list[tuple[int, str]]
"""Rows that could not be filled, and why."""
Progress = Callable[[int], None]
"""Told how many rows are done."""

SPARE = 2
"""Batches that there is room for beside those ahead: the one in use, and the one before. Room that is not
needed costs nothing: the system finds memory for it when it is first written to."""
MOST = 16
"""Rows that are worked on in one go."""


class Work(Protocol):
    """What a pool does: the same for the same arguments, whoever does it."""

    def __call__(self, indices: Indices, keys: Keys, out: npt.NDArray[Any]) -> Problems:
        """Fill the rows of `out`, n H W C; rows that could not be are zero."""


class Taken(NamedTuple):
    """A finished batch."""

    images: npt.NDArray[Any]
    """n H W C. The memory is used again once nothing refers to this array."""
    indices: Indices
    problems: Problems


class Ring:
    """Room for some batches, in memory that forked processes share."""

    def __init__(self, count: int, rows: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self.shape, self.dtype = (rows, *shape), np.dtype(dtype)
        page = mmap.PAGESIZE
        self.stride = -(-int(np.prod(self.shape)) * self.dtype.itemsize // page) * page
        self.memory = mmap.mmap(-1, max(count * self.stride, page))
        numbers = mmap.mmap(-1, max(count * rows * 16, page))
        self.indices: Indices = np.ndarray((count, rows), np.int64, numbers)
        self.keys: Keys = np.ndarray((count, rows), np.uint64, numbers, count * rows * 8)
        self.lengths = [0] * count
        self.free = deque(range(count))

    def images(self, slot: int) -> npt.NDArray[Any]:
        return np.ndarray(self.shape, self.dtype, self.memory, slot * self.stride)

    def borrow(self, indices: Indices, keys: Keys) -> int:
        slot, n = self.free.popleft(), len(indices)
        self.lengths[slot], self.indices[slot, :n], self.keys[slot, :n] = n, indices, keys
        return slot

    def lend(self, slot: int) -> npt.NDArray[Any]:
        """A batch's pixels; the slot is free again when the array is gone."""
        whole = (self.lengths[slot], *self.shape[1:])
        lent: npt.NDArray[Any] = np.ndarray(whole, self.dtype, self.memory, slot * self.stride)
        weakref.finalize(lent, self.free.append, slot).atexit = False
        return lent


class Pool(ABC):
    """Batches of at most `rows` rows of one shape, at most `depth` of them ahead."""

    def __init__(
        self,
        work: Work,
        *,
        rows: int,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        depth: int,
        part: int,
    ) -> None:
        self.work, self.depth, self.part = work, depth, part
        self.ring = Ring(depth + SPARE, rows, shape, dtype)
        self.asked: deque[int] = deque()

    @property
    def room(self) -> bool:
        return len(self.asked) < self.depth and bool(self.ring.free)

    def ask(self, indices: Indices, keys: Keys) -> None:
        """Begin a batch."""
        slot = self.ring.borrow(indices, keys)
        self.asked.append(slot)
        n = len(indices)
        self._begin(slot, [(first, min(self.part, n - first)) for first in range(0, n, self.part)])

    def take(self, progress: Progress | None = None) -> Taken:
        """Wait for the oldest batch."""
        slot = self.asked[0]
        problems = self._end(slot, progress)
        self.asked.popleft()
        indices = self.ring.indices[slot, : self.ring.lengths[slot]].copy()
        images = self.ring.lend(slot)
        if not self.ring.free and len(self.asked) < self.depth:  # somebody keeps batches: theirs are copies
            images = images.copy()
        return Taken(images, indices, sorted(problems))

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether the oldest batch can be taken without waiting."""

    @abstractmethod
    def _begin(self, slot: int, parts: list[tuple[int, int]]) -> None: ...

    @abstractmethod
    def _end(self, slot: int, progress: Progress | None) -> Problems: ...

    @abstractmethod
    def close(self) -> None:
        """End the workers; what was asked for and not taken is lost."""

    def _do(self, slot: int, first: int, count: int) -> Problems:
        rows = slice(first, first + count)
        ring = self.ring
        problems = self.work(ring.indices[slot, rows], ring.keys[slot, rows], ring.images(slot)[rows])
        return [(first + row, reason) for row, reason in problems]


def make_pool(
    work: Work,
    *,
    rows: int,
    shape: tuple[int, ...],
    dtype: npt.DTypeLike,
    workers: int,
    depth: int,
    threads: bool = False,
) -> Pool:
    """Processes where they can be forked, else threads (or on request: for work that changes while it is done).

    With no workers, whoever takes a batch makes it.
    """
    options: dict[str, Any] = {"rows": rows, "shape": shape, "dtype": dtype, "depth": depth}
    options["part"] = max(1, min(MOST, rows // (4 * max(workers, 1))))
    if workers == 0:
        return Nobody(work, **options)
    forks = sys.platform == "linux" and not multiprocessing.current_process().daemon
    return Processes(work, workers, **options) if forks and not threads else Threads(work, workers, **options)


class Nobody(Pool):
    """No workers."""

    ready = False

    def _begin(self, slot: int, parts: list[tuple[int, int]]) -> None:
        pass

    def _end(self, slot: int, progress: Progress | None) -> Problems:
        problems = []
        for first in range(0, self.ring.lengths[slot], self.part):
            problems += self._do(slot, first, min(self.part, self.ring.lengths[slot] - first))
            if progress:
                progress(first + self.part)
        return problems

    def close(self) -> None:
        pass


class Threads(Pool):
    """Workers in this process."""

    def __init__(self, work: Work, workers: int, **options: Any) -> None:
        super().__init__(work, **options)
        self.executor = ThreadPoolExecutor(workers, thread_name_prefix="images")
        self.futures: dict[int, list[Future[Problems]]] = {}

    def _begin(self, slot: int, parts: list[tuple[int, int]]) -> None:
        self.futures[slot] = [self.executor.submit(self._do, slot, *part) for part in parts]

    @property
    def ready(self) -> bool:
        return bool(self.asked) and all(future.done() for future in self.futures[self.asked[0]])

    def _end(self, slot: int, progress: Progress | None) -> Problems:
        problems = []
        for done, future in enumerate(self.futures.pop(slot), start=1):
            problems += future.result()
            if progress:
                progress(done * self.part)
        return problems

    def close(self) -> None:
        self.executor.shutdown(wait=True, cancel_futures=True)


# Between processes: fixed records through two pipes. What is at most PIPE_BUF (4096) bytes long is
# written and read whole, so that any number of processes share a pipe without a lock that one of
# them could die with.
TASK = struct.Struct("<qqq")  # slot, first row, rows
REPLY = struct.Struct("<qqqq")  # slot, first row, rows done (0: a problem), bytes of text that follow
CRASH = -1  # in place of a slot: the text is a traceback
LONGEST = 3500
LOOK_UP = 1000
"""Milliseconds between looks at whether the maker is still there: another process may hold its pipe open."""
UNDERWAY = 1000
"""So many tasks are sent before some are done: far fewer than fill a pipe."""


class Processes(Pool):
    """Forked workers."""

    def __init__(self, work: Work, workers: int, **options: Any) -> None:
        super().__init__(work, **options)
        self.unsent: deque[tuple[int, int, int]] = deque()
        self.underway = 0
        self.missing: dict[int, int] = {}
        self.problems: dict[int, Problems] = {}
        self.unread = b""
        take, self._give = os.pipe()
        self._hear, tell = os.pipe()
        watched, self._alive = os.pipe()  # nothing is ever written: it closes when the maker ends, however it ends
        os.set_blocking(take, False)
        os.set_blocking(self._hear, False)
        maker = os.getpid()
        self.processes = _forked(workers, lambda: self._serve(take, tell, watched, maker))
        for end in (take, tell, watched):
            os.close(end)
        self._poll = select.poll()
        self._poll.register(self._hear, select.POLLIN)
        for process in self.processes:
            self._poll.register(process.sentinel, select.POLLIN)
        # Of multiprocessing's own kind, since it must come before multiprocessing waits for its children.
        self._finish = Finalize(
            self, _end_all, (self.processes, (self._give, self._hear, self._alive)), exitpriority=10
        )

    def _serve(self, take: int, tell: int, watched: int, maker: int) -> None:
        """A worker's life. It ends with its maker, even in the middle of a task that takes long."""
        for end in (self._give, self._hear, self._alive):
            os.close(end)
        threading.Thread(target=_end_with, args=(watched, maker), daemon=True, name="maker").start()
        poll = select.poll()
        poll.register(take, select.POLLIN)
        while True:
            try:
                task = os.read(take, TASK.size)
            except BlockingIOError:  # nothing there, or another worker was quicker
                poll.poll()
                continue
            if not task:
                return
            slot, first, count = TASK.unpack(task)
            try:
                problems = self._do(slot, first, count)
            except Exception:
                text = traceback.format_exc().encode()[-LONGEST:]
                os.write(tell, REPLY.pack(CRASH, 0, 0, len(text)) + text)
                return
            for row, reason in problems:
                text = reason.encode(errors="replace")[:LONGEST]
                os.write(tell, REPLY.pack(slot, row, 0, len(text)) + text)
            os.write(tell, REPLY.pack(slot, first, count, 0))

    def _begin(self, slot: int, parts: list[tuple[int, int]]) -> None:
        self.missing[slot], self.problems[slot] = len(parts), []
        self.unsent.extend((slot, *part) for part in parts)
        self._send()

    @property
    def ready(self) -> bool:
        if self.asked and self.missing[self.asked[0]]:
            self._listen(0)
        return bool(self.asked) and not self.missing[self.asked[0]]

    def _end(self, slot: int, progress: Progress | None) -> Problems:
        parts = self.missing[slot]
        while self.missing[slot]:
            self._listen(None)
            if progress:
                progress((parts - self.missing[slot]) * self.part)
        del self.missing[slot]
        return self.problems.pop(slot)

    def _send(self) -> None:
        while self.unsent and self.underway < UNDERWAY:
            os.write(self._give, TASK.pack(*self.unsent.popleft()))
            self.underway += 1

    def _listen(self, timeout: float | None) -> None:
        """Take in what the workers have said, waiting for something if need be."""
        heard = [fd for fd, _ in self._poll.poll(timeout)]
        if self._hear in heard:
            self.unread += os.read(self._hear, 2**16)
            self._take_in()
            self._send()
        elif heard:
            words = _last_words(next(p for p in self.processes if p.sentinel in heard))
            self.close()
            raise TrainError(words)

    def _take_in(self) -> None:
        at = 0
        while len(self.unread) >= at + REPLY.size:
            slot, row, done, length = REPLY.unpack_from(self.unread, at)
            end = at + REPLY.size + length
            if len(self.unread) < end:
                break
            text = self.unread[end - length : end].decode(errors="replace")
            at = end
            if slot == CRASH:
                self.close()
                error = TrainError(f"reading images failed: {text.strip().splitlines()[-1]}")
                error.add_note(text)
                raise error
            if done:
                self.missing[slot] -= 1
                self.underway -= 1
            else:
                self.problems[slot].append((row, text))
        self.unread = self.unread[at:]

    def close(self) -> None:
        self._finish()


DEAF = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1} if sys.platform != "win32" else set()


def _forked(count: int, serve: Callable[[], None]) -> list[BaseProcess]:
    """Processes that run `serve`, deaf to what their maker hears as well: it may still need them."""
    context = multiprocessing.get_context("fork")
    processes: list[BaseProcess] = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, DEAF)
    try:
        with warnings.catch_warnings():
            # Python warns of forking where threads run. These processes touch nothing a thread may
            # have been at: they decode, and compute with one thread of their own.
            warnings.simplefilter("ignore", DeprecationWarning)
            for number in range(count):
                process = context.Process(target=_life, args=(serve,), daemon=True, name=f"images-{number}")
                process.start()
                processes.append(process)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return processes


def _life(serve: Callable[[], None]) -> None:
    for number in DEAF:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, DEAF)
    gc.freeze()  # what was there before is never collected here: looking at it would copy it
    torch.set_num_threads(1)
    keep_heap()
    with contextlib.suppress(BrokenPipeError):  # nobody is left to hear of what was done
        serve()


def _end_with(watched: int, maker: int) -> None:
    """End this process when its maker has ended, which may have been killed before this is even called."""
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    while os.getppid() == maker and not poll.poll(LOOK_UP):
        pass
    os._exit(1)  # nobody is left to hear of what was done


def _end_all(processes: list[BaseProcess], pipes: tuple[int, ...]) -> None:
    for process in processes:
        process.kill()  # they hold nothing that would have to be left in order
    for process in processes:
        process.join()
        process.close()
    for pipe in pipes:
        os.close(pipe)


def _last_words(process: BaseProcess) -> str:
    """How it ended."""
    process.join(1)
    code = process.exitcode
    how = f"killed by {signal.Signals(-code).name}" if code and code < 0 else f"exit status {code}"
    hint = "; memory may have run out: try data.workers=1 or a smaller batch" if code == -signal.SIGKILL else ""
    return f"a process that reads images ended on its own ({how}){hint}."
