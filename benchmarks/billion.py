"""Simulates a bulk run on many workers that fail, are slow and are replaced: what parts cost, and how to divide them.

    python benchmarks/billion.py [--images 1e9] [--rate 12254] [--workers 64] [--mtbf-hours 24]

Each worker computes parts at --rate images per second, times a constant factor of its own (log-normal) and one of each
part. It fails after an exponential time, loses the part in flight, and is back after --restart seconds. With a `queue`
(--on ray) an idle worker takes the next part; with `shards` (--shard I/N) each has its own. `efficiency` is the time
that the images need without any of this, divided by the simulated time.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

PART_SIZES = (1_024, 16_384, 65_536, 1_048_576)


def simulate(
    durations: Sequence[float], speeds: Sequence[float], queue: bool, mtbf: float, restart: float, seed: int
) -> float:
    """Seconds until all parts are done; `durations` on a worker of speed 1."""
    rng = np.random.default_rng(seed)
    workers, parts = len(speeds), len(durations)
    shards = [list(range((w + 1) * parts // workers - 1, w * parts // workers - 1, -1)) for w in range(workers)]
    common = list(range(parts - 1, -1, -1))
    failures = rng.exponential(mtbf, workers).tolist()
    free = [(0.0, worker) for worker in range(workers)]
    heapq.heapify(free)
    end = 0.0
    while free:
        now, worker = heapq.heappop(free)
        left = common if queue else shards[worker]
        if not left:
            end = max(end, now)
            continue
        part = left.pop()
        done = now + durations[part] / speeds[worker]
        if failures[worker] < done:  # the part in flight is lost
            left.append(part)
            done = max(failures[worker], now) + restart
            failures[worker] = done + float(rng.exponential(mtbf))
        heapq.heappush(free, (done, worker))
    return end


def efficiency(options: argparse.Namespace, part_size: int, queue: bool) -> float:
    """Median over seeds."""
    results = []
    for seed in range(options.seeds):
        rng = np.random.default_rng(1000 + seed)
        parts = max(int(options.images // part_size), 1)
        durations = part_size / options.rate * rng.lognormal(0, options.part_spread, parts)
        speeds = rng.lognormal(0, options.worker_spread, options.workers)
        ideal = options.images / options.rate / speeds.sum()
        seconds = simulate(durations.tolist(), speeds.tolist(), queue, options.mtbf_hours * 3600, options.restart, seed)
        results.append(ideal / seconds)
    return float(np.median(results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=float, default=1e9)
    parser.add_argument("--rate", type=float, default=12_254, help="images per second of a worker")
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--worker-spread", type=float, default=0.1, help="of the workers' speeds, log-normal")
    parser.add_argument("--part-spread", type=float, default=0.1, help="of the parts' durations, log-normal")
    parser.add_argument("--mtbf-hours", type=float, default=24, help="of a worker")
    parser.add_argument("--restart", type=float, default=300, help="seconds")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    table = Table("images per part", "parts", "s per part", "queue", "shards", box=None)
    for size in PART_SIZES:
        shares = (f"{100 * efficiency(options, size, queue):.1f} %" for queue in (True, False))
        parts = int(options.images // size)
        table.add_row(f"{size:,}", f"{parts:,}", f"{size / options.rate:.1f}", *shares)
    Console().print(f"efficiency of {options.workers} workers, {options.images:.3g} images, failing every "
                    f"{options.mtbf_hours:g} h, {options.rate:,.0f} images/s each")  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
