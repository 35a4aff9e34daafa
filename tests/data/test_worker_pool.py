"""Worker pools: the same batches from every kind of pool, memory reuse, and workers that never outlive their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vitrail.data.worker_pool import InlinePool, Pool, ProcessPool, RowErrorList, ThreadPool, make_pool
from vitrail.errors import TrainError

ROOT = Path(__file__).resolve().parents[2]
forks = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
Made = Callable[..., Pool]


class Fill:
    """Writes each row's number and key into it."""

    def __call__(self, indices: np.ndarray, seeds: np.ndarray, out: np.ndarray) -> RowErrorList:
        out[:, 0] = indices % 251
        out[:, 1] = seeds % 251
        return [(row, f"{index} is unlucky") for row, index in enumerate(indices.tolist()) if index % 13 == 0]


class Crash(Fill):
    def __call__(self, indices: np.ndarray, seeds: np.ndarray, out: np.ndarray) -> RowErrorList:
        if 40 in indices:
            raise ZeroDivisionError("a mistake in the program")
        return super().__call__(indices, seeds, out)


class Die(Fill):
    def __call__(self, indices: np.ndarray, seeds: np.ndarray, out: np.ndarray) -> RowErrorList:
        if 40 in indices:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(indices, seeds, out)


class Slow(Fill):
    def __call__(self, indices: np.ndarray, seeds: np.ndarray, out: np.ndarray) -> RowErrorList:
        time.sleep(30)
        return super().__call__(indices, seeds, out)


KINDS = ["inline", "threads", pytest.param("processes", marks=forks)]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make() -> Iterator[Made]:
    pools: list[Pool] = []

    def made(kind: str, work: Any = None, workers: int = 2, rows: int = 24, depth: int = 3, task_rows: int = 5) -> Pool:
        work = work or Fill()
        options: dict[str, Any] = {
            "rows": rows,
            "shape": (2,),
            "dtype": np.uint8,
            "depth": depth,
            "task_rows": task_rows,
        }
        pool: Pool
        if kind == "inline":
            pool = InlinePool(work, **options)
        else:
            pool = (ThreadPool if kind == "threads" else ProcessPool)(work, workers, **options)
        pools.append(pool)
        return pool

    yield made
    for pool in pools:
        pool.close()


def batch_args(batch: int, rows: int = 24) -> tuple[np.ndarray, np.ndarray]:
    indices = np.arange(rows) + batch * rows
    return indices, (indices * 7).astype(np.uint64)


def check(finished: Any, batch: int, rows: int = 24) -> None:
    indices, seeds = batch_args(batch, rows)
    assert np.array_equal(finished.indices, indices)
    assert np.array_equal(finished.images, np.stack([indices % 251, seeds % 251], axis=1))
    assert finished.errors == [(r, f"{i} is unlucky") for r, i in enumerate(indices.tolist()) if i % 13 == 0]


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_batches_come_in_order_and_whole(kind: str, make: Made, workers: int) -> None:
    pool = make(kind, workers=workers)
    submitted = 0
    for batch in range(20):
        while pool.has_room and submitted < 20:
            pool.submit(*batch_args(submitted))
            submitted += 1
        assert submitted - batch <= 3
        check(pool.get(), batch)


def test_batches_in_use_are_not_overwritten(kind: str, make: Made) -> None:
    pool, in_use = make(kind), []
    for batch in range(12):
        pool.submit(*batch_args(batch))
        in_use.append(pool.get())
    for batch, finished in enumerate(in_use):
        check(finished, batch)


def test_released_memory_is_reused(kind: str, make: Made) -> None:
    pool, addresses = make(kind), set()
    for batch in range(30):
        pool.submit(*batch_args(batch))
        finished = pool.get()
        addresses.add(finished.images.ctypes.data)
        del finished
    assert len(addresses) <= len(pool.buffer.lengths)


def test_a_short_batch_has_the_submitted_length(kind: str, make: Made) -> None:
    pool = make(kind)
    pool.submit(*batch_args(2, rows=7))
    check(pool.get(), 2, rows=7)


def test_very_many_rows_in_one_batch(kind: str, make: Made) -> None:
    pool, seen = make(kind, rows=30_000, depth=1, task_rows=3), []
    pool.submit(*batch_args(0, rows=30_000))
    check(pool.get(seen.append), 0, rows=30_000)
    assert seen == sorted(seen)
    assert seen[-1] >= 30_000


def test_a_batch_is_ready_when_it_is(make: Made) -> None:
    for kind in ["threads", "processes"] if sys.platform == "linux" else ["threads"]:
        pool = make(kind)
        assert not pool.ready
        pool.submit(*batch_args(0))
        end = time.monotonic() + 10
        while not pool.ready and time.monotonic() < end:
            time.sleep(0.01)
        assert pool.ready
        check(pool.get(), 0)


def test_the_right_kind_is_chosen() -> None:
    options: dict[str, Any] = {"rows": 8, "shape": (2,), "dtype": np.uint8, "depth": 1}
    for workers, threads, kind in [
        (0, False, InlinePool),
        (1, True, ThreadPool),
        (2, False, ProcessPool if sys.platform == "linux" else ThreadPool),
    ]:
        pool = make_pool(Fill(), workers=workers, threads=threads, **options)
        assert type(pool) is kind
        pool.close()
        pool.close()


# When something goes wrong


@pytest.mark.parametrize("kind", ["inline", "threads"])
def test_a_programming_error_is_raised_unchanged(kind: str, make: Made) -> None:
    pool = make(kind, Crash())
    pool.submit(*batch_args(1))
    with pytest.raises(ZeroDivisionError, match="a mistake in the program"):
        pool.get()


@forks
def test_a_programming_error_in_a_worker_has_its_traceback(make: Made) -> None:
    pool = make("processes", Crash())
    pool.submit(*batch_args(1))
    with pytest.raises(TrainError, match=r"reading images failed: ZeroDivisionError: a mistake") as caught:
        pool.get()
    assert "in __call__" in "".join(caught.value.__notes__)


@forks
def test_a_process_that_is_killed_is_reported(make: Made) -> None:
    pool = make("processes", Die())
    pids = [p.pid for p in pool.processes]  # type: ignore[attr-defined]
    pool.submit(*batch_args(1))
    with pytest.raises(TrainError, match=r"ended unexpectedly \(killed by SIGKILL\); memory may have run out: try"):
        pool.get()
    assert not any(alive(pid) for pid in pids)


@forks
def test_closing_does_not_wait_for_work(make: Made) -> None:
    pool = make("processes", Slow())
    pool.submit(*batch_args(0))
    time.sleep(0.1)
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 2


@forks
def test_a_deleted_pool_ends_its_processes() -> None:
    pool = ProcessPool(Fill(), 2, rows=8, shape=(2,), dtype=np.uint8, depth=1, task_rows=4)
    pids = [p.pid for p in pool.processes]
    assert all(alive(pid) for pid in pids)
    del pool
    assert not any(alive(pid) for pid in pids)


@forks
def test_workers_ignore_the_signals_that_stop_their_parent(make: Made) -> None:
    pool = make("processes")
    for process in pool.processes:  # type: ignore[attr-defined]
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(process.pid, number)
    pool.submit(*batch_args(0))
    check(pool.get(), 0)


@forks
def test_processes_can_be_forked_while_a_thread_decodes(make: Made) -> None:
    from vitrail.data.decode import _strict_pillow

    entered, leave = threading.Event(), threading.Event()

    def inside() -> None:
        with _strict_pillow, _strict_pillow.lock:
            entered.set()
            leave.wait(20)

    class Quietly(Fill):
        def __call__(self, indices: np.ndarray, seeds: np.ndarray, out: np.ndarray) -> RowErrorList:
            with _strict_pillow:
                return super().__call__(indices, seeds, out)

    thread = threading.Thread(target=inside)
    thread.start()
    entered.wait()
    try:
        pool = make("processes", Quietly())
        pool.submit(*batch_args(0))
        check(pool.get(), 0)
    finally:
        leave.set()
        thread.join()


# No worker outlives its parent


def alive(pid: int | None) -> bool:
    """Whether the process runs and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


SCRIPT = """
    import os, signal, sys, time
    import numpy as np
    from vitrail.data.worker_pool import ProcessPool

    def work(indices, seeds, out):
        if {busy} and os.getpid() != parent:
            time.sleep({busy})
        return []

    parent = os.getpid()
    first = ProcessPool(work, 2, rows=64, shape=(2,), dtype=np.uint8, depth=2, task_rows=1)
    second = ProcessPool(work, 2, rows=64, shape=(2,), dtype=np.uint8, depth=2, task_rows=1)
    for pool in (first, second):
        pool.submit(np.arange(64), np.arange(64, dtype=np.uint64))
    print(*[p.pid for pool in (first, second) for p in pool.processes], flush=True)
    {then}
"""


def run(then: str, busy: float = 0.2) -> tuple[subprocess.Popen[str], list[int]]:
    code = textwrap.dedent(SCRIPT).format(then=then, busy=busy)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    return process, [int(pid) for pid in line.split()]


def gone(pids: list[int], within: float = 8) -> bool:
    end = time.monotonic() + within
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(alive(pid) for pid in pids)


@forks
@pytest.mark.parametrize("busy", [60, 0.2, 0])
def test_workers_die_with_a_parent_that_is_killed(busy: float) -> None:
    """Also in the middle of a task that takes a minute, such as a download."""
    process, pids = run("time.sleep(60)", busy)
    assert len(pids) == 4
    process.kill()
    _, stderr = process.communicate(timeout=20)
    assert gone(pids)
    assert stderr == ""


@forks
def test_workers_of_an_interrupted_parent_print_nothing() -> None:
    process, pids = run("first.get()")
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole process group gets it
    _, stderr = process.communicate(timeout=20)
    assert gone(pids)
    assert stderr.count("Traceback") == 1
    assert stderr.strip().endswith("KeyboardInterrupt")


@forks
@pytest.mark.parametrize("then", ["pass", "sys.exit(3)", "first.close(); second.get(); second.close()"])
def test_workers_of_a_parent_that_exits_end_quietly(then: str) -> None:
    process, pids = run(then, busy=0)
    _, stderr = process.communicate(timeout=20)
    assert gone(pids, within=1)
    assert stderr == ""
