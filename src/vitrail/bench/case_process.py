"""The process of one case: `python -m vitrail.bench.case_process`.

The first line of standard input is the case. The process sets it up and replies with what it found, or with the reason
why it cannot be measured. Each further line asks for a turn: the seconds that it should take. Replies are lines of JSON
on standard output; whatever the libraries print goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import resource
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitrail.bench.cases import Case
    from vitrail.bench.workload import Workload

WARM_UP_STEPS = 3
"""Untimed steps at the start of the first turn: CUDA graphs are recorded by the second and third call."""
MAX_STEPS = 100_000
"""Of one turn."""

Reply = dict[str, Any]


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # anything that prints to standard output would be taken for a reply
    from vitrail.bench.cases import Case

    case = Case.from_json(sys.stdin.readline())
    if case.kernels != "auto":
        os.environ["VITRAIL_KERNELS"] = case.kernels
    base_bytes = _import_libraries(case)
    load, reply = _set_up(case)
    print(json.dumps(reply), file=replies, flush=True)
    if load is None:
        return
    timer = TurnTimer(case, load, base_bytes)
    for line in sys.stdin:
        try:
            reply = timer.turn(float(line))
        except Exception as error:
            reply = _failure(error)
        print(json.dumps(reply), file=replies, flush=True)


def _import_libraries(case: Case) -> int:
    """Import what the case needs; returns the memory that this takes, which is not the network's."""
    from vitrail.bench.libraries import LIBRARIES, import_library

    importlib.import_module("vitrail.bench.workload")
    if case.library in LIBRARIES:
        with suppress(Exception):  # `_set_up` reports it
            import_library(case.library)
    return _resident("VmRSS") if case.device == "cpu" else 0


def _set_up(case: Case) -> tuple[Workload | None, Reply]:
    try:
        from vitrail.bench.workload import make_workload

        start = time.perf_counter()
        load = make_workload(case)
    except Exception as error:
        return None, _failure(error)
    _free_gpu_memory(case)
    reply = {"flops": load.flops, "compile_s": load.compile_s, "error": load.error, "version": load.version}
    return load, reply | {"top1": load.top1, "chosen": load.chosen, "setup_s": time.perf_counter() - start}


def _free_gpu_memory(case: Case) -> None:
    """Give back the memory of activations: it is for the next process."""
    if case.device != "cpu":
        import torch

        torch.cuda.empty_cache()


def _failure(error: Exception) -> Reply:
    """Why a case cannot be measured, in one line."""
    from vitrail.bench.libraries import MissingLibrary
    from vitrail.errors import VitrailError

    kind, reason = "failed", f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if isinstance(error, MissingLibrary):
        kind, reason = "missing", str(error)
    elif isinstance(error, VitrailError):
        reason = str(error)
    elif type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError):
        kind, reason = "memory", "out of memory"
    if kind == "failed":
        traceback.print_exc()
    return {"kind": kind, "reason": reason[:300]}


class TurnTimer:
    """Measures a workload in turns. `base_bytes` of memory do not count: those of a process that has imported torch."""

    def __init__(self, case: Case, load: Workload, base_bytes: int = 0) -> None:
        self.case, self.load, self.is_first, self.peak_bytes, self.base_bytes = case, load, True, 0, base_bytes
        self.step_s = 0.0

    def turn(self, seconds: float) -> Reply:
        """Steps for about this long: seconds per step, and CPU seconds of all threads per step."""
        self._warm_up()
        if self.case.synchronize:
            return self._latency(seconds)
        steps = min(max(math.ceil(seconds / self.step_s), 1), MAX_STEPS)
        cpu, start = _cpu_seconds(), time.perf_counter()
        for _ in range(steps):
            self.load.step()
        self._wait()
        took, cpu = time.perf_counter() - start, _cpu_seconds() - cpu
        self.step_s = took / steps
        return self._reply(took / steps, cpu / steps)

    def _warm_up(self) -> None:
        """Untimed steps: they record CUDA graphs, get the memory that the last turn gave back, and raise the clocks."""
        for i in range(WARM_UP_STEPS if self.is_first else 1):
            if i == 1 and self.is_first:
                self._reset_peak()
            start = time.perf_counter()
            self.load.step()
            self._wait()
            self.step_s = max(time.perf_counter() - start, 1e-6)
        self.is_first = False

    def _latency(self, seconds: float) -> Reply:
        """The median over single steps, each with a wait for its result."""
        times: list[float] = []
        cpu, start = _cpu_seconds(), time.perf_counter()
        while not times or (time.perf_counter() - start < seconds and len(times) < MAX_STEPS):
            before = time.perf_counter()
            self.load.step()
            self._wait()
            times.append(time.perf_counter() - before)
        cpu = (_cpu_seconds() - cpu) / len(times)
        return self._reply(sorted(times)[len(times) // 2], cpu)

    def _reply(self, step_s: float, cpu_s: float) -> Reply:
        self.peak_bytes = max(self.peak_bytes, self._peak())
        _free_gpu_memory(self.case)
        return {"step_s": step_s, "cpu_s": cpu_s, "peak_bytes": self.peak_bytes}

    def _wait(self) -> None:
        if self.case.device != "cpu":
            import torch

            torch.cuda.synchronize()

    def _reset_peak(self) -> None:
        if self.case.device != "cpu":
            import torch

            torch.cuda.reset_peak_memory_stats()
        else:
            with suppress(OSError):  # Linux only
                Path("/proc/self/clear_refs").write_text("5")

    def _peak(self) -> int:
        """Peak bytes that torch has allocated on the GPU; on a CPU, peak resident memory beyond that of the imports."""
        if self.case.device != "cpu":
            import torch

            return torch.cuda.max_memory_allocated()
        return max(_resident("VmHWM") - self.base_bytes, 0)


def _resident(name: str) -> int:
    """Resident memory of this process in bytes: VmRSS, now; VmHWM, the peak, also where there is no /proc."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith(name)))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
