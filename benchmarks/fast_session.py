"""Measures candidates one after the other, within a time, and prints a table: for the other scripts here."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], Any]


@dataclass
class Candidate:
    """`make` sets up and returns the call to measure, and a function that gives its relative error."""

    name: str
    make: Callable[[], tuple[Call, Callable[[], float]]]
    flops: float
    predicted: float | None = None
    """Milliseconds."""


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


def relative(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


def measure_ms(call: Call, rounds: int = 20) -> tuple[float, float]:
    """Median milliseconds of single calls by events, and (highest - lowest) / median of the middle half."""
    for _ in range(5):
        call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) for start, end in events)
    median = statistics.median(times)
    return median, (times[3 * rounds // 4] - times[rounds // 4]) / median


class Session:
    """Measures candidates until the time is over, and prints the table."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.end, self.only = time.monotonic() + options.seconds, options.only
        self.file = Path(options.json) if options.json else None
        lines = self.file.read_text().splitlines() if self.file is not None and self.file.exists() else []
        self.known = {(entry["title"], entry["name"]): Row(**entry["row"]) for entry in map(json.loads, lines)}

    def table(self, title: str, candidates: list[Candidate], rounds: int = 20) -> None:
        rows = []
        for candidate in candidates:
            if self.only and self.only not in candidate.name:
                continue
            row = self.known.get((title, candidate.name)) or self.measure(title, candidate, rounds)
            rows.append(row)
            print(f"    {row.name}: {row.note or f'{row.ms:.3f} ms'}", flush=True)
        show(title, rows)

    def measure(self, title: str, candidate: Candidate, rounds: int) -> Row:
        row = Row(candidate.name, candidate.predicted)
        if time.monotonic() > self.end:
            row.note = "left out: the time is over"
            return row
        try:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            start = time.monotonic()
            call, error = candidate.make()
            call()
            torch.cuda.synchronize()
            row.setup_s, row.error = time.monotonic() - start, error()
            torch.cuda.reset_peak_memory_stats()
            row.ms, row.spread = measure_ms(call, rounds)
            row.tflops = candidate.flops / row.ms / 1e9
            row.peak_gb = torch.cuda.max_memory_allocated() / 1e9
        except Exception as exception:
            first = str(exception).strip().partition("\n")[0]
            row.note = f"{type(exception).__name__}: {first}"[:160]
        if self.file is not None:
            with self.file.open("a") as file:
                file.write(json.dumps({"title": title, "name": candidate.name, "row": asdict(row)}) + "\n")
        return row


def show(title: str, rows: list[Row]) -> None:
    print(f"\n{title}")
    print(f"  {'':52s} predicted       ms  spread  TFLOP/s    error  ratio  peak GB  setup s")
    first = next((row.ms for row in rows if row.ms), None)
    for row in rows:
        if row.ms is None:
            print(f"  {row.name:52s} {row.note}")
            continue
        predicted = f"{row.predicted:9.3f}" if row.predicted else " " * 9
        ratio = (first or row.ms) / row.ms
        print(
            f"  {row.name:52s} {predicted} {row.ms:8.3f} {100 * (row.spread or 0):6.1f}% {row.tflops:8.0f} "
            f"{row.error:8.1e} {ratio:6.2f} {row.peak_gb:8.2f} {row.setup_s:8.1f}",
            flush=True,
        )
