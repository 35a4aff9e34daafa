"""Throughput of `vitrail serve` under load, compared with a plain loop without HTTP.

    python benchmarks/serve.py MODEL [--data SHARDS] [--clients 32] [--seconds 8] [--rounds 3] [--engine torch] [-- ...]

There are two plain loops, and the faster one of each round counts. "together" decodes a batch of JPEGs on all cores,
then runs the engine on all cores. "apart" has an independent loop on each core that decodes a batch and runs it. The
service runs in its own process; the clients send requests over loopback in a closed loop, one JPEG per request. Loops
and service alternate in rounds, with the same images. Printed are the throughput in images per second, the latencies,
and the ratio by CPU time, which is more reliable on a machine with other load. The CPU time of the clients is excluded
and printed separately. Options after -- are passed to `vitrail serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in the server; must be set before torch is imported
TICKS = os.sysconf("SC_CLK_TCK")
BATCH = 32


def images(shards: str | None, count: int = 256) -> list[bytes]:
    """JPEG files from the tar shards in a folder; default: the bundled samples."""
    found: list[bytes] = []
    for path in sorted(Path(shards).glob("*.tar")) if shards else ():
        with tarfile.open(path) as tar:
            for member in tar:
                if member.name.lower().endswith((".jpg", ".jpeg")) and len(found) < count:
                    found.append(tar.extractfile(member).read())  # type: ignore[union-attr]
    if not found:
        from vitrail.serve.static_files import WEB_DIR

        found = [path.read_bytes() for path in sorted((WEB_DIR / "samples").glob("*.jpg"))]
    return found


@contextmanager
def service(model: str, engine: str, options: Sequence[str]) -> Iterator[tuple[int, int, list[int]]]:
    """Start a server; yields its port, its process id and a list that receives its exit status."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vitrail", "serve", model, "--port", str(port), "--engine", engine, *options]
    ended: list[int] = []
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        for _ in range(1200):
            if asyncio.run(_status(port)) == 200:
                break
            if process.poll() is not None:
                raise SystemExit(f"the server exited with status {process.returncode}")
            time.sleep(0.1)
        yield port, process.pid, ended
    finally:
        process.terminate()
        ended.append(process.wait(60))


async def _status(port: int) -> int:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return 0
    writer.write(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    line = await reader.readline()
    writer.close()
    return int(line.split()[1]) if line else 0


async def load(port: int, files: Sequence[bytes], clients: int, seconds: float) -> tuple[list[float], float]:
    """Latencies in seconds, and the total duration. Exits on any status but 200."""
    heads = [
        b"POST /v1/predict?top=1 HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/jpeg\r\n"
        b"Content-Length: %d\r\n\r\n" % len(data) + data
        for data in files
    ]
    times: list[float] = []
    turn = iter(range(10**9))
    start = time.perf_counter()
    until = start + seconds

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
        while time.perf_counter() < until:
            before = time.perf_counter()
            writer.write(heads[next(turn) % len(heads)])
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
            body = await reader.readexactly(length)
            if not head.startswith(b"HTTP/1.1 200"):
                raise SystemExit(body.decode())
            times.append(time.perf_counter() - before)
        writer.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    return times, time.perf_counter() - start


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and its children since their start."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return (int(fields[11]) + int(fields[12])) / TICKS + sum(cpu_seconds(int(child)) for child in children)


def own_cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class PlainLoop:
    """The plain loops: decode a batch, run it, repeat."""

    def __init__(self, model: str, engine: str, files: Sequence[bytes]) -> None:
        import torch

        import vitrail
        from vitrail.exporting.open_engine import open_engine
        from vitrail.runtime.cores import usable_cores

        vit = vitrail.load(model)
        self.files, self.preprocess = files, vit.preprocess
        self.engine = open_engine(vit, engine)
        self.cores = usable_cores()
        self.pool = ThreadPoolExecutor(self.cores, initializer=torch.set_num_threads, initargs=(1,))
        self.pool.submit(int).result()
        torch.set_num_threads(self.cores)
        for style in ("together", "apart"):
            self.run(style, 0.5)

    def run(self, style: str, seconds: float) -> tuple[float, float]:
        """Images per second, and per second of CPU time."""
        start, used = time.perf_counter(), own_cpu_seconds()
        if style == "apart":
            loops = [self.pool.submit(self._loop, start + seconds, map, i) for i in range(self.cores)]
            done = sum(loop.result() for loop in loops)
        else:
            done = self._loop(start + seconds, self.pool.map, 0)
        return done / (time.perf_counter() - start), done / (own_cpu_seconds() - used)

    def _loop(self, until: float, each: Callable[..., Iterable[Any]], first: int) -> int:
        done, size = 0, BATCH // 4 if each is map else BATCH
        while time.perf_counter() < until:
            group = [self.files[(first * 100 + done + i) % len(self.files)] for i in range(size)]
            self.engine.logits(np.stack([*each(self.preprocess.pixels, group)]))
            done += size
        return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("model")
    parser.add_argument("--data")
    parser.add_argument("--engine", default="torch")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given, options = parser.parse_known_args()
    files = images(given.data)
    rows = []
    with service(given.model, given.engine, [word for word in options if word != "--"]) as (port, pid, _):
        plain = PlainLoop(given.model, given.engine, files)
        asyncio.run(load(port, files, given.clients, 1))
        for _ in range(given.rounds):
            loops = {style: plain.run(style, given.seconds) for style in ("together", "apart")}
            plain_speed, plain_cpu = max(loops.values())
            before, mine = cpu_seconds(pid), own_cpu_seconds()
            times, took = asyncio.run(load(port, files, given.clients, given.seconds))
            used, clients = cpu_seconds(pid) - before, own_cpu_seconds() - mine
            times.sort()
            rows.append(
                {
                    **{style: speed for style, (speed, _) in loops.items()},
                    "service": len(times) / took,
                    "ratio": len(times) / took / plain_speed,
                    "cpu_ratio": len(times) / used / plain_cpu,
                    "client_ms": 1000 * clients / len(times),
                    "mean_ms": 1000 * statistics.fmean(times),
                    "p50_ms": 1000 * times[len(times) // 2],
                    "p99_ms": 1000 * times[int(len(times) * 0.99)],
                }
            )
            if not given.json:
                print("  ".join(f"{name} {value:.2f}" for name, value in rows[-1].items()), flush=True)
    middle = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    if given.json:
        print(json.dumps({"rounds": rows, "median": middle}, indent=2))
        return
    loop, slow = max(middle["together"], middle["apart"]), middle["p99_ms"] / middle["mean_ms"]
    print(
        f"median of {len(rows)}: {middle['service']:.1f} images/s, {100 * middle['ratio']:.0f} % of the plain "
        f"loop's {loop:.1f} ({100 * middle['cpu_ratio']:.0f} % by CPU time); "
        f"mean {middle['mean_ms']:.0f} ms, p99 {middle['p99_ms']:.0f} ms = {slow:.1f} x"
    )


if __name__ == "__main__":
    main()
