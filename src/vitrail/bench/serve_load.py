"""Throughput of `vitrail serve` under load, compared with a plain loop without HTTP.

There are two plain loops, and the faster one of each round counts. "together" decodes a batch of JPEGs on all cores,
then runs the engine on all cores. "apart" has an independent loop on each core that decodes a batch and runs it. The
service runs in its own process; the clients send requests over loopback in a closed loop, one JPEG per request. Loops
and service alternate in rounds, with the same images. The ratio by CPU time is more reliable on a machine with other
load. The CPU time of the clients is excluded.
"""

from __future__ import annotations

import asyncio
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.errors import DataError, VitrailError

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
    if not found and shards:
        raise DataError(f"got {shards}, expected a folder of .tar files with .jpg images.")
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
                raise VitrailError(f"the server exited with status {process.returncode}; see its message above.")
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
    """Latencies in seconds, and the total duration. Any status but 200 is an error."""
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
                raise VitrailError(
                    f"a request was answered {head.split(maxsplit=2)[1].decode()}: {body.decode()[:300]}"
                )
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


@dataclass(frozen=True, kw_only=True)
class ServeRound:
    """Images per second of the plain loops and of the service in one round, and the latencies of the service."""

    together: float
    apart: float
    service: float
    ratio: float
    """The service's rate divided by that of the faster loop."""
    cpu_ratio: float
    """The same for images per second of CPU time."""
    client_ms: float
    """CPU time of the clients for an image."""
    mean_ms: float
    p50_ms: float
    p99_ms: float

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def measure_service(
    model: str,
    *,
    engine: str = "torch",
    shards: str | None = None,
    clients: int = 32,
    seconds: float = 8,
    rounds: int = 3,
    options: Sequence[str] = (),
    show: Callable[[ServeRound], None] = lambda row: None,
) -> list[ServeRound]:
    """Measure the plain loops and the service in turns. `options` are further ones of `vitrail serve`."""
    files, rows = images(shards), []
    with service(model, engine, options) as (port, pid, _):
        plain = PlainLoop(model, engine, files)
        asyncio.run(load(port, files, clients, min(seconds, 1)))
        for _ in range(rounds):
            rows.append(_round(plain, port, pid, files, clients, seconds))
            show(rows[-1])
    return rows


def _round(plain: PlainLoop, port: int, pid: int, files: Sequence[bytes], clients: int, seconds: float) -> ServeRound:
    loops = {style: plain.run(style, seconds) for style in ("together", "apart")}
    plain_speed, plain_cpu = max(loops.values())
    before, mine = cpu_seconds(pid), own_cpu_seconds()
    times, took = asyncio.run(load(port, files, clients, seconds))
    used, own = cpu_seconds(pid) - before, own_cpu_seconds() - mine
    times.sort()
    return ServeRound(
        together=loops["together"][0],
        apart=loops["apart"][0],
        service=len(times) / took,
        ratio=len(times) / took / plain_speed,
        cpu_ratio=len(times) / used / plain_cpu,
        client_ms=1000 * own / len(times),
        mean_ms=1000 * statistics.fmean(times),
        p50_ms=1000 * times[len(times) // 2],
        p99_ms=1000 * times[int(len(times) * 0.99)],
    )


def median_round(rows: Sequence[ServeRound]) -> ServeRound:
    """The median of each column."""
    return ServeRound(**{name: statistics.median(row.to_dict()[name] for row in rows) for name in rows[0].to_dict()})
