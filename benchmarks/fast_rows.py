"""Measures candidates one after the other and keeps each result as a line of JSON: for the other fast_*.py here.

A candidate that raises an error is a row with the error. One that ends its process is a row too: the line that says it
has begun has no result after it. After an error of the GPU nothing else would run in the process, so it exits with the
status RESTART, and the next process goes on behind the row.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], Any]
RESTART = 75
"""Exit status of a process whose GPU context is lost."""
GPU_ERRORS = ("CUDA error", "device-side assert", "illegal", "misaligned", "launch failure", "AcceleratorError")
TIME_S = 0.1
"""The repetitions of a measurement take about this long, and are at least ROUNDS and at most MOST."""
ROUNDS, MOST = 10, 200


@dataclass
class Candidate:
    """`make` sets up and returns the call to measure, and a function that gives its relative error."""

    name: str
    make: Callable[[], tuple[Call, Callable[[], float]]]
    flops: float = 0.0
    predicted: float | None = None
    """Milliseconds."""
    limit: float | None = None
    """Largest error that is not a failure."""


@dataclass
class Row:
    name: str
    predicted: float | None = None
    ms: float | None = None
    spread: float | None = None
    tflops: float | None = None
    error: float | None = None
    peak_gb: float | None = None
    setup_s: float | None = None
    note: str = ""
    """Why there is no result, or that the error is too large."""

    @property
    def failed(self) -> bool:
        return bool(self.note)


def relative(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference / norm of the expected values; infinite where numbers are missing."""
    if found.shape != expected.shape:
        raise ValueError(f"got the shape {tuple(found.shape)}, expected {tuple(expected.shape)}")
    found, expected = found.detach().double(), expected.detach().double()
    error = float((found - expected).norm() / expected.norm().clamp_min(1e-30))
    return error if error == error else float("inf")


def measure_ms(call: Call) -> tuple[float, float]:
    """Median milliseconds of single calls by events, and (highest - lowest) / median of the middle half."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        call()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    rounds = int(min(max(1000 * TIME_S / max(start.elapsed_time(end), 1e-3), ROUNDS), MOST))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) for start, end in events)
    median = statistics.median(times)
    return median, (times[3 * rounds // 4] - times[rounds // 4]) / median


class Results:
    """A file of rows by table and name; those that it has are not measured again."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.rows: dict[tuple[str, str], Row] = {}
        for entry in map(json.loads, file.read_text().splitlines() if file is not None and file.exists() else ()):
            row = Row(**entry["row"]) if "row" in entry else Row(entry["name"], note="it ended its process")
            self.rows[entry["title"], entry["name"]] = row

    def write(self, title: str, name: str, **entry: Any) -> None:
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a") as file:
                file.write(json.dumps({"title": title, "name": name, **entry}) + "\n")

    def tables(self) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = {}
        for (title, _), row in self.rows.items():
            found.setdefault(title, []).append(row)
        return found


class Session:
    """Measures candidates until the time is over, and prints each table."""

    def __init__(self, file: str | None, seconds: float, only: str | None = None) -> None:
        self.end, self.only = time.monotonic() + seconds, only
        self.results = Results(Path(file) if file else None)

    def table(self, title: str, candidates: Iterable[Candidate], timed: bool = True) -> list[Row]:
        rows = []
        for candidate in self.each(title, candidates):
            if self.only and self.only not in candidate.name:
                continue
            row = self.results.rows.get((title, candidate.name))
            if row is None and time.monotonic() > self.end:
                row = Row(candidate.name, note="not measured: the time is over")
            elif row is None:
                self.results.write(title, candidate.name)
                row = measure(candidate, timed)
                self.results.write(title, candidate.name, row=asdict(row))
            rows.append(row)
            print(f"    {row.name}: {row.note or (f'{row.ms:.3f} ms' if row.ms else f'{row.error:.1e}')}", flush=True)
            if any(word in row.note for word in GPU_ERRORS) and (title, candidate.name) not in self.results.rows:
                sys.exit(RESTART)
        show(title, rows)
        return rows

    def each(self, title: str, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
        """The candidates; an error of their common setup is one that fails with it."""
        try:
            yield from candidates
        except Exception as error:
            message = f"{type(error).__name__}: {error}"

            def fail() -> Any:
                raise RuntimeError(message)

            yield Candidate(f"setup of {title}", fail)


def measure(candidate: Candidate, timed: bool) -> Row:
    """Set up, check and time one candidate; an error is a row."""
    row = Row(candidate.name, candidate.predicted)
    try:
        start = time.monotonic()
        call, error = candidate.make()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        row.setup_s, row.error = time.monotonic() - start, error()
        if candidate.limit is not None and not row.error <= candidate.limit:
            row.note = f"WRONG: error {row.error:.1e}, at most {candidate.limit:.0e} was expected"
        if timed:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            row.ms, row.spread = measure_ms(call)
            row.tflops = candidate.flops / row.ms / 1e9
            row.peak_gb = torch.cuda.max_memory_allocated() / 1e9
    except Exception as exception:
        lines = [line for line in str(exception).splitlines() if line.strip()]
        row.note = f"{type(exception).__name__}: {(lines or [''])[0]} {lines[-1] if len(lines) > 1 else ''}"[:240]
    return row


def show(title: str, rows: list[Row]) -> None:
    print(f"\n{title}")
    print(f"  {'':52s} predicted       ms  spread  TFLOP/s    error  ratio  peak GB  setup s")
    first = next((row.ms for row in rows if row.ms), None)
    for row in rows:
        if row.ms is None:
            shown = "" if row.error is None else f"{row.error:8.1e}"
            print(f"  {row.name:52s} {shown} {row.note}")
            continue
        predicted = f"{row.predicted:9.3f}" if row.predicted else " " * 9
        ratio = (first or row.ms) / row.ms
        print(
            f"  {row.name:52s} {predicted} {row.ms:8.3f} {100 * (row.spread or 0):6.1f}% {row.tflops or 0:8.0f} "
            f"{row.error:8.1e} {ratio:6.2f} {row.peak_gb:8.2f} {row.setup_s:8.1f} {row.note}",
            flush=True,
        )
