"""Worker pools that fill batches with images while the model computes.

A pool calls `fill_rows(indices, seeds, out)` for parts of a batch and prefetches several batches. Workers
write the pixels into shared memory, so that no pixels are copied between processes:

    submit     start a batch, if `has_room`
    get        wait for the batch that was submitted first

The result does not depend on the kind or the number of workers.

torch's DataLoader as the transport, with the same decoding, the same loop and identical pixels, is slower: on two cores
this pool reads 1.11 to 1.19 times as many images per second, on 16 cores beside an H200 1.18 times as many with batches
of 64 and 1.31 with 256, and 1.07 to 1.18 times beside a training step (`python benchmarks/dataloader.py`): its tasks
are parts of a batch, and workers write into memory that is pinned once.

On Linux the workers are forked processes: they start within milliseconds, with everything imported, and
exit with their parent, also when it is killed. On other systems a new process would have to import
everything again, so the workers are threads; decoding and resizing release the GIL.
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

from vitrail.data.sampler import Indices
from vitrail.errors import TrainError
from vitrail.rng import Seeds
from vitrail.runtime.malloc import tune_malloc

# n rows of a batch

RowErrorList = list[tuple[int, str]]
"""(row, reason) of each row that could not be filled."""
Progress = Callable[[int], None]
"""Called with the number of rows that are done."""

SPARE_BATCHES = 2
"""Batches that fit in the buffer besides the prefetched ones: the one in use and the one before it. Unused
space costs nothing, because the system allocates memory on the first write."""
MAX_TASK_ROWS = 16
"""Largest number of rows in one task."""


class FillRows(Protocol):
    """The function that workers run; its result must depend on the arguments alone."""

    def __call__(self, indices: Indices, seeds: Seeds, out: npt.NDArray[Any]) -> RowErrorList:
        """Fill the rows of `out`, n H W C; rows that cannot be filled are zero and are returned with the reason."""


class FinishedBatch(NamedTuple):
    """A batch that all workers have finished."""

    images: npt.NDArray[Any]
    """n H W C. Its memory is reused once nothing refers to this array."""
    indices: Indices
    errors: RowErrorList


class SharedBuffer:
    """Space for `count` batches in memory that forked processes share."""

    def __init__(self, count: int, rows: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self.shape, self.dtype = (rows, *shape), np.dtype(dtype)
        page = mmap.PAGESIZE
        self.stride = -(-int(np.prod(self.shape)) * self.dtype.itemsize // page) * page
        self.memory = mmap.mmap(-1, max(count * self.stride, page))
        numbers = mmap.mmap(-1, max(count * rows * 16, page))
        self.indices: Indices = np.ndarray((count, rows), np.int64, numbers)
        self.seeds: Seeds = np.ndarray((count, rows), np.uint64, numbers, count * rows * 8)
        self.lengths = [0] * count
        self.free = deque(range(count))

    def images(self, slot: int) -> npt.NDArray[Any]:
        return np.ndarray(self.shape, self.dtype, self.memory, slot * self.stride)

    def acquire(self, indices: Indices, seeds: Seeds) -> int:
        slot, n = self.free.popleft(), len(indices)
        self.lengths[slot], self.indices[slot, :n], self.seeds[slot, :n] = n, indices, seeds
        return slot

    def owning_array(self, slot: int) -> npt.NDArray[Any]:
        """A slot's pixels as an array that owns the slot: it is free again when the array is deleted."""
        shape = (self.lengths[slot], *self.shape[1:])
        array: npt.NDArray[Any] = np.ndarray(shape, self.dtype, self.memory, slot * self.stride)
        weakref.finalize(array, self.free.append, slot).atexit = False
        return array


class Pool(ABC):
    """Fills batches of up to `rows` rows of one shape and prefetches up to `depth` of them."""

    def __init__(
        self,
        fill_rows: FillRows,
        *,
        rows: int,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        depth: int,
        task_rows: int,
    ) -> None:
        self.fill_rows, self.depth, self.task_rows = fill_rows, depth, task_rows
        self.buffer = SharedBuffer(depth + SPARE_BATCHES, rows, shape, dtype)
        self.pending: deque[int] = deque()

    @property
    def has_room(self) -> bool:
        return len(self.pending) < self.depth and bool(self.buffer.free)

    def submit(self, indices: Indices, seeds: Seeds) -> None:
        """Start to fill a batch."""
        slot = self.buffer.acquire(indices, seeds)
        self.pending.append(slot)
        n = len(indices)
        self._start(slot, [(first, min(self.task_rows, n - first)) for first in range(0, n, self.task_rows)])

    def get(self, progress: Progress | None = None) -> FinishedBatch:
        """Wait for the oldest batch and return it."""
        slot = self.pending[0]
        errors = self._wait(slot, progress)
        self.pending.popleft()
        indices = self.buffer.indices[slot, : self.buffer.lengths[slot]].copy()
        images = self.buffer.owning_array(slot)
        if not self.buffer.free and len(self.pending) < self.depth:  # the caller keeps batches: give copies
            images = images.copy()
        return FinishedBatch(images, indices, sorted(errors))

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether `get` would return without waiting."""

    @abstractmethod
    def _start(self, slot: int, tasks: list[tuple[int, int]]) -> None: ...

    @abstractmethod
    def _wait(self, slot: int, progress: Progress | None) -> RowErrorList: ...

    @abstractmethod
    def close(self) -> None:
        """Stop the workers; pending batches are dropped."""

    def _run_task(self, slot: int, first: int, count: int) -> RowErrorList:
        rows = slice(first, first + count)
        buffer = self.buffer
        errors = self.fill_rows(buffer.indices[slot, rows], buffer.seeds[slot, rows], buffer.images(slot)[rows])
        return [(first + row, reason) for row, reason in errors]


def make_pool(
    fill_rows: FillRows,
    *,
    rows: int,
    shape: tuple[int, ...],
    dtype: npt.DTypeLike,
    workers: int,
    depth: int,
    threads: bool = False,
) -> Pool:
    """A pool of forked processes where the system can fork, else of threads.

    With 0 workers, `get` fills the batch itself. `threads` forces threads, for functions whose state changes.
    """
    options: dict[str, Any] = {"rows": rows, "shape": shape, "dtype": dtype, "depth": depth}
    options["task_rows"] = max(1, min(MAX_TASK_ROWS, rows // (4 * max(workers, 1))))
    if workers == 0:
        return InlinePool(fill_rows, **options)
    can_fork = sys.platform == "linux" and not multiprocessing.current_process().daemon
    pool_type = ProcessPool if can_fork and not threads else ThreadPool
    return pool_type(fill_rows, workers, **options)


class InlinePool(Pool):
    """No workers: `get` fills the batch in the calling thread."""

    ready = False

    def _start(self, slot: int, tasks: list[tuple[int, int]]) -> None:
        pass

    def _wait(self, slot: int, progress: Progress | None) -> RowErrorList:
        errors = []
        for first in range(0, self.buffer.lengths[slot], self.task_rows):
            errors += self._run_task(slot, first, min(self.task_rows, self.buffer.lengths[slot] - first))
            if progress:
                progress(first + self.task_rows)
        return errors

    def close(self) -> None:
        pass


class ThreadPool(Pool):
    """Worker threads in this process."""

    def __init__(self, fill_rows: FillRows, workers: int, **options: Any) -> None:
        super().__init__(fill_rows, **options)
        self.executor = ThreadPoolExecutor(workers, thread_name_prefix="images")
        self.futures: dict[int, list[Future[RowErrorList]]] = {}

    def _start(self, slot: int, tasks: list[tuple[int, int]]) -> None:
        self.futures[slot] = [self.executor.submit(self._run_task, slot, *task) for task in tasks]

    @property
    def ready(self) -> bool:
        return bool(self.pending) and all(future.done() for future in self.futures[self.pending[0]])

    def _wait(self, slot: int, progress: Progress | None) -> RowErrorList:
        errors = []
        for done, future in enumerate(self.futures.pop(slot), start=1):
            errors += future.result()
            if progress:
                progress(done * self.task_rows)
        return errors

    def close(self) -> None:
        self.executor.shutdown(wait=True, cancel_futures=True)


# Processes exchange fixed-size records through two pipes. Reads and writes of at most PIPE_BUF (4096)
# bytes are atomic, so that all processes share a pipe without a lock, which a worker could die holding.
TASK = struct.Struct("<qqq")  # slot, first row, rows
REPLY = struct.Struct("<qqqq")  # slot, first row, rows done (0: an error), bytes of text that follow
CRASH = -1  # in place of a slot: the text is a traceback
MAX_TEXT_BYTES = 3500
PARENT_CHECK_MS = 1000
"""Interval of checks for the parent: another process may hold the parent's end of the pipe open."""
MAX_TASKS_IN_FLIGHT = 1000
"""Tasks sent and not done; far fewer than fill a pipe."""


class ProcessPool(Pool):
    """Forked worker processes."""

    def __init__(self, fill_rows: FillRows, workers: int, **options: Any) -> None:
        super().__init__(fill_rows, **options)
        self.unsent: deque[tuple[int, int, int]] = deque()
        self.num_in_flight = 0
        self.remaining: dict[int, int] = {}
        self.errors: dict[int, RowErrorList] = {}
        self.unread = b""
        task_reader, self._task_writer = os.pipe()
        self._reply_reader, reply_writer = os.pipe()
        parent_reader, self._parent_writer = os.pipe()  # never written to: it closes when the parent exits
        os.set_blocking(task_reader, False)
        os.set_blocking(self._reply_reader, False)
        parent_pid = os.getpid()
        self.processes = _fork_workers(
            workers, lambda: self._serve(task_reader, reply_writer, parent_reader, parent_pid)
        )
        for end in (task_reader, reply_writer, parent_reader):
            os.close(end)
        self._poll = select.poll()
        self._poll.register(self._reply_reader, select.POLLIN)
        for process in self.processes:
            self._poll.register(process.sentinel, select.POLLIN)
        # multiprocessing's own finalizer: it must run before multiprocessing joins its children.
        self._finish = Finalize(
            self,
            _kill_workers,
            (self.processes, (self._task_writer, self._reply_reader, self._parent_writer)),
            exitpriority=10,
        )

    def _serve(self, task_reader: int, reply_writer: int, parent_reader: int, parent_pid: int) -> None:
        """A worker's main loop. The worker exits with its parent, even in the middle of a long task."""
        for end in (self._task_writer, self._reply_reader, self._parent_writer):
            os.close(end)
        threading.Thread(
            target=_exit_with_parent, args=(parent_reader, parent_pid), daemon=True, name="watch-parent"
        ).start()
        poll = select.poll()
        poll.register(task_reader, select.POLLIN)
        while True:
            try:
                task = os.read(task_reader, TASK.size)
            except BlockingIOError:  # no task, or another worker took it
                poll.poll()
                continue
            if not task:
                return
            slot, first, count = TASK.unpack(task)
            try:
                errors = self._run_task(slot, first, count)
            except Exception:
                text = traceback.format_exc().encode()[-MAX_TEXT_BYTES:]
                os.write(reply_writer, REPLY.pack(CRASH, 0, 0, len(text)) + text)
                return
            for row, reason in errors:
                text = reason.encode(errors="replace")[:MAX_TEXT_BYTES]
                os.write(reply_writer, REPLY.pack(slot, row, 0, len(text)) + text)
            os.write(reply_writer, REPLY.pack(slot, first, count, 0))

    def _start(self, slot: int, tasks: list[tuple[int, int]]) -> None:
        self.remaining[slot], self.errors[slot] = len(tasks), []
        self.unsent.extend((slot, *task) for task in tasks)
        self._send()

    @property
    def ready(self) -> bool:
        if self.pending and self.remaining[self.pending[0]]:
            self._receive(0)
        return bool(self.pending) and not self.remaining[self.pending[0]]

    def _wait(self, slot: int, progress: Progress | None) -> RowErrorList:
        tasks = self.remaining[slot]
        while self.remaining[slot]:
            self._receive(None)
            if progress:
                progress((tasks - self.remaining[slot]) * self.task_rows)
        del self.remaining[slot]
        return self.errors.pop(slot)

    def _send(self) -> None:
        while self.unsent and self.num_in_flight < MAX_TASKS_IN_FLIGHT:
            os.write(self._task_writer, TASK.pack(*self.unsent.popleft()))
            self.num_in_flight += 1

    def _receive(self, timeout: float | None) -> None:
        """Read the workers' replies; wait up to `timeout` for one (None: forever)."""
        readable = [fd for fd, _ in self._poll.poll(timeout)]
        if self._reply_reader in readable:
            self.unread += os.read(self._reply_reader, 2**16)
            self._parse_replies()
            self._send()
        elif readable:
            message = _describe_exit(next(p for p in self.processes if p.sentinel in readable))
            self.close()
            raise TrainError(message)

    def _parse_replies(self) -> None:
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
                self.remaining[slot] -= 1
                self.num_in_flight -= 1
            else:
                self.errors[slot].append((row, text))
        self.unread = self.unread[at:]

    def close(self) -> None:
        self._finish()


IGNORED_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1} if sys.platform != "win32" else set()


def _fork_workers(count: int, serve: Callable[[], None]) -> list[BaseProcess]:
    """Start processes that run `serve` and ignore the signals that stop the parent, which may still need them."""
    context = multiprocessing.get_context("fork")
    processes: list[BaseProcess] = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        with warnings.catch_warnings():
            # Python warns about forking a process with threads. These workers use nothing that a thread
            # may have locked: they decode, and compute with one thread of their own.
            warnings.simplefilter("ignore", DeprecationWarning)
            for number in range(count):
                process = context.Process(target=_worker_main, args=(serve,), daemon=True, name=f"images-{number}")
                process.start()
                processes.append(process)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return processes


def _worker_main(serve: Callable[[], None]) -> None:
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    gc.freeze()  # the parent's objects are never collected here: scanning them would copy their pages
    torch.set_num_threads(1)
    tune_malloc()
    with contextlib.suppress(BrokenPipeError):  # the parent is gone
        serve()


def _exit_with_parent(parent_reader: int, parent_pid: int) -> None:
    """Exit this process when its parent has exited, also if that happened before this call."""
    poll = select.poll()
    poll.register(parent_reader, select.POLLIN)
    while os.getppid() == parent_pid and not poll.poll(PARENT_CHECK_MS):
        pass
    os._exit(1)


def _kill_workers(processes: list[BaseProcess], pipes: tuple[int, ...]) -> None:
    for process in processes:
        process.kill()  # workers have nothing to clean up
    for process in processes:
        process.join()
        process.close()
    for pipe in pipes:
        os.close(pipe)


def _describe_exit(process: BaseProcess) -> str:
    """An error message that says how a worker process ended."""
    process.join(1)
    code = process.exitcode
    how = f"killed by {signal.Signals(-code).name}" if code and code < 0 else f"exit status {code}"
    hint = "; memory may have run out: try data.workers=1 or a smaller batch" if code == -signal.SIGKILL else ""
    return f"a worker process that reads images ended unexpectedly ({how}){hint}."
