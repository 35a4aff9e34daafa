"""Simulates `vitrail serve` behind a load balancer: latency, refused and lost requests by number of replicas.

    python benchmarks/fleet.py [--replica cpu] [--replicas 95,100,120,140] [--rate 10000] [--burst 0]
    python benchmarks/fleet.py --replicas 120 --balance random,round-robin,least,two-choices --crash 1 [--retries 1]
    python benchmarks/fleet.py --replicas 120 --roll 12 --seconds 60                 # restarts all, 12 at a time
    python benchmarks/fleet.py --rate 500 --step 2 --replicas 6 --autoscale 4 --seconds 300 --timeline 30
    python benchmarks/fleet.py --replicas 1 --speed-sigma 0 --one-client --closed-loop 32   # like `vitrail bench serve`

Requests with one image each arrive at random (Poisson); with --burst the rate alternates, with --step it is multiplied
after a third of the time. A balancer gives each request to a replica, which is one process with the queue limit and
the batching of the package: a request waits for the interpreter, a decode thread and an engine thread, and what runs
at the same time shares the cores equally. A batch of n images takes a + b n seconds. Networks take no time, and
refused clients do not try again. What a replica is (ReplicaConfig) can be changed, as by --image-time 0.02.

`queue`: mean of vitrail_queue_images, the images queued or in progress in a replica. Latencies are those of answered
requests. refused: 503, or 429 with --one-client; late: 504; lost: the connection failed. `cores used` and `batch` are
of the whole run, the rest without its first tenth.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from fleet_simulation import ANSWERED, AUTOSCALE_S, BALANCING, LATE, LOST, REFUSED, SCRAPE_S, Fleet, ReplicaConfig
from rich.console import Console
from rich.table import Table

PRESETS = {
    # ViT-Ti/16 with --engine auto on two cores: 118 images/s for one client. decode, a: one thread of another EPYC.
    "cpu": ReplicaConfig(),
    # ViT-B/16, one of four processes on 16 cores and an H200: 491 images/s alone, 1,538 together. a is an assumption.
    "gpu": ReplicaConfig(
        cores=4, interpreter=1 / 491, decode=16 / 1538 - 1 / 491, batch_overhead=0.005, image_time=1 / 11302,
        engine_threads=1, gpu=True,
    ),
}  # fmt: skip


def poisson(rate: float, seconds: float, seed: int = 0, burst: float = 0.0, step: float = 1.0) -> npt.NDArray[Any]:
    """Arrival times. burst: the rate alternates between 1 + burst and 1 - burst times `rate`, each for about a second.

    step: factor of the rate after a third of the time.
    """
    rng = np.random.default_rng(seed)
    highest = rate * (1 + burst) * max(step, 1.0)
    times = np.sort(rng.uniform(0, seconds, rng.poisson(highest * seconds)))
    switches = np.cumsum(rng.exponential(1.0, int(2 * seconds) + 20))
    current = rate * np.where(np.searchsorted(switches, times) % 2, 1 + burst, 1 - burst)
    current *= np.where(times < seconds / 3, 1.0, step)
    return times[rng.random(len(times)) * highest < current]


def decode_times(config: ReplicaConfig, count: int, seed: int = 0) -> npt.NDArray[Any]:
    sigma = config.decode_sigma
    return config.decode * np.random.default_rng([seed, 1]).lognormal(-sigma * sigma / 2, sigma, max(count, 1))


def summarize(fleet: Fleet, start: float, end: float) -> dict[str, Any]:
    """What happened to the requests that arrived in this time."""
    arrivals, states, latencies = np.array(fleet.arrivals), np.array(fleet.states), np.array(fleet.latencies)
    arrived = (arrivals >= start) & (arrivals < end)
    answered = latencies[arrived & (states == ANSWERED)]
    replicas = next(count for time, count in reversed(fleet.history) if time <= (start + end) / 2)
    tail = 1000 * np.quantile(answered, (0.5, 0.99, 0.999)) if len(answered) else [math.nan] * 3
    counts = [int((arrived & (states == state)).sum()) for state in (REFUSED, LATE, LOST)]
    return {
        "balance": fleet.balance,
        "replicas": replicas,
        "answered": len(answered),
        "queue": latencies[arrived].sum() / (end - start) / max(replicas, 1),
        **dict(zip(("p50 ms", "p99 ms", "p99.9 ms"), tail, strict=True)),
        **dict(zip(("refused", "late", "lost"), counts, strict=True)),
    }


def simulate(options: argparse.Namespace, config: ReplicaConfig, replicas: int, balance: str) -> list[dict[str, Any]]:
    """Rows of the table: one for the time after the first tenth, or with --timeline one for each interval."""
    fleet = Fleet(config, replicas, balance, seed=options.seed, retries=options.retries, detect=options.detect,
                  cold_start=options.cold_start)  # fmt: skip
    for slot in fleet.slots[: options.crash]:
        fleet.at(options.seconds / 3, fleet.crash, slot)
    if options.roll:
        fleet.at(options.seconds / 10, fleet.roll, list(fleet.slots), options.roll)
    if options.autoscale:
        fleet.at(AUTOSCALE_S, fleet.autoscale, options.autoscale, options.max_replicas)
        fleet.at(SCRAPE_S, fleet.scrape)
    arrivals = poisson(options.rate, options.seconds, options.seed, options.burst, options.step)
    decodes = decode_times(config, max(len(arrivals), 10_000), options.seed)
    fleet.run(arrivals, decodes, options.seconds, options.closed_loop)
    if options.timeline:
        starts = np.arange(0, options.seconds, options.timeline).tolist()
        return [{"from s": start} | summarize(fleet, start, start + options.timeline) for start in starts]
    whole = {"cores used": f"{fleet.busy / fleet.available:.1%}", "batch": fleet.batched / max(fleet.batches, 1)}
    return [summarize(fleet, options.seconds / 10, options.seconds) | whole]


def parse() -> tuple[argparse.Namespace, ReplicaConfig]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replica", choices=PRESETS, default="cpu", help="what a replica is")
    parser.add_argument("--replicas", default="95,100,120,140", help="numbers of replicas, a row for each")
    parser.add_argument("--balance", default="two-choices", help=f"some of {','.join(BALANCING)}, a row for each")
    parser.add_argument("--rate", type=float, default=10_000, help="requests per second")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--burst", type=float, default=0.0, help="0 to 1")
    parser.add_argument("--step", type=float, default=1.0)
    parser.add_argument("--closed-loop", type=int, default=0, metavar="CLIENTS", help="in place of --rate")
    parser.add_argument("--crash", type=int, default=0, help="replicas that die after a third of the time")
    parser.add_argument("--detect", type=float, default=4, help="seconds until a dead replica gets no requests")
    parser.add_argument("--retries", type=int, default=1, help="other replicas tried when a connection fails")
    parser.add_argument("--cold-start", type=float, default=20, help="seconds until a new process is ready")
    parser.add_argument("--roll", type=int, default=0, help="replicas that are restarted at a time, until all are new")
    parser.add_argument("--autoscale", type=float, default=0, help="target for the mean of vitrail_queue_images")
    parser.add_argument("--max-replicas", type=int, default=1000, help="of the autoscaler")
    parser.add_argument("--timeline", type=float, default=0, help="seconds of a row")
    parser.add_argument("--seed", type=int, default=0)
    for field in fields(ReplicaConfig):
        flag = f"--{field.name.replace('_', '-')}"
        if isinstance(field.default, bool):
            parser.add_argument(flag, action="store_true", default=None)
        else:
            parser.add_argument(flag, type=type(field.default), metavar="VALUE")
    options = parser.parse_args()
    given = {field.name: getattr(options, field.name) for field in fields(ReplicaConfig)}
    return options, replace(PRESETS[options.replica], **{name: v for name, v in given.items() if v is not None})


def cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}" if isinstance(value, float) else value


def main() -> None:
    options, config = parse()
    numbers, balances = [int(n) for n in options.replicas.split(",")], options.balance.split(",")
    rows = [row for n in numbers for balance in balances for row in simulate(options, config, n, balance)]
    table = Table(*rows[0], box=None)
    for row in rows:
        table.add_row(*map(cell, row.values()))
    console = Console(width=120)
    console.print(f"{options.rate:,.0f} requests/s; a replica answers at most {config.capacity:.0f} per second, in "
                  f"batches of up to {config.max_batch}")  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    main()
