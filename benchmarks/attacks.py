"""Latency of ordinary requests to `vitrail serve` while one client attacks, compared with the latency without attack.

    python benchmarks/attacks.py [MODEL] [--seconds 10] [--only NAME ...] [--same-address] [-- ...]

Three ordinary clients send photographs, about 15 per second in total. One attacker, at another address (127.0.0.2; with
--same-address at the same one), keeps several connections busy with requests within, or apparently within, all limits,
and repeats each as soon as it is answered. The table has, for each attack, the median and the 99th percentile (p99) of
the ordinary latency, the ratio of p99 to its value without attack, the responses to the attacker, and how long the
latency stays high afterwards. Exits with status 1 if a ratio exceeds 5 or an ordinary request was not answered 200.
Options after -- are passed to `vitrail serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import multiprocessing
import os
import random
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from PIL import Image

from vitrail.bench.serve_load import service

MAX_RATIO = 5.0
"""Allowed ratio of the p99 latency during an attack to that without."""
CLIENTS, RATE = 3, 5
"""Number of ordinary clients, and requests per second of each."""
ORDINARY, ATTACKER = "127.0.0.1", "127.0.0.2"


@dataclass(frozen=True)
class Attack:
    """A request that is repeated on several connections."""

    make: Callable[[], bytes]
    connections: int


def request(body: bytes, content_type: str, path: str = "/v1/predict") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {content_type}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def form(*images: bytes) -> bytes:
    """A form request with these images."""
    part = b'--edge\r\nContent-Disposition: form-data; name="images"; filename="a"\r\n\r\n'
    body = b"".join(part + image + b"\r\n" for image in images) + b"--edge--\r\n"
    return request(body, "multipart/form-data; boundary=edge")


@lru_cache(maxsize=1)
def photo() -> bytes:
    return saved(Image.effect_noise((500, 400), 60).convert("RGB"), "JPEG")


def saved(image: Image.Image, image_format: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, image_format, **options)
    return out.getvalue()


def chunk(name: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


@lru_cache(maxsize=2)
def deep_png(colors: int, side: int = 7000) -> bytes:
    """A black image of 16 bits: gray (colors 0) or RGB (2)."""
    packed, row = zlib.compressobj(1), bytes(1 + 2 * side * (3 if colors == 2 else 1))
    data = b"".join(packed.compress(row) for _ in range(side)) + packed.flush()
    header = struct.pack(">IIBBBBB", side, side, 16, colors, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND")


@lru_cache(maxsize=1)
def plain_ppm() -> bytes:
    """A plain-text PPM of seven megabytes."""
    return b"P3\n1600 750\n255\n" + b"1 " * 3_600_000


@lru_cache(maxsize=1)
def many_chunks() -> bytes:
    """A small PNG with a million empty chunks before its pixel data."""
    whole = saved(Image.new("RGB", (300, 200)), "PNG")
    return whole[:33] + chunk(b"prVt") * 1_000_000 + whole[33:]


@lru_cache(maxsize=1)
def many_segments() -> bytes:
    """A small JPEG whose header has three million segments."""
    return photo()[:2] + b"\xff\xe9\0\x02" * 3_000_000 + photo()[2:]


def large(image_format: str, side: int = 7000, **options: Any) -> bytes:
    return saved(Image.new("RGB", (side, side), (9, 99, 199)), image_format, **options)


@lru_cache(maxsize=1)
def many_scans() -> bytes:
    """A JPEG of 2.5 megapixels with its last scan repeated 110 times."""
    whole = saved(Image.new("RGB", (1580, 1580)), "JPEG", progressive=True)
    return whole[:-2] + 110 * whole[whole.rindex(b"\xff\xda") : -2] + whole[-2:]


@lru_cache(maxsize=1)
def long_exif() -> bytes:
    """A small PNG with 65,000 EXIF entries."""
    entries = b"".join(struct.pack("<HHII", number, 1, 1, 0) for number in range(65_000))
    exif = b"II*\0\x08\0\0\0" + struct.pack("<H", 65_000) + entries + bytes(4)
    whole = saved(Image.new("RGB", (300, 200)), "PNG")
    return whole[:33] + chunk(b"eXIf", exif) + whole[33:]


ATTACKS = {
    "16 PNGs, 16 bits, 49 MP": Attack(lambda: form(*[deep_png(0)] * 16), 1),
    "4 PNGs, RGB 16 bits, 49 MP": Attack(lambda: form(*[deep_png(2)] * 4), 8),
    "2 plain PPMs": Attack(lambda: form(plain_ppm(), plain_ppm()), 4),
    "2 WebPs, 49 MP": Attack(lambda: form(*[large("WEBP", method=0)] * 2), 8),
    "16 PNGs, 12 MP": Attack(lambda: form(*[large("PNG", 3464)] * 16), 8),
    "16 PNGs, 4 MP": Attack(lambda: form(*[large("PNG", 1990)] * 16), 8),
    "16 photographs": Attack(lambda: form(*[photo()] * 16), 12),
    "explanations": Attack(lambda: request(photo(), "image/jpeg", "/v1/explain?methods=occlusion"), 8),
    "16 JPEGs of 120 scans": Attack(lambda: form(*[many_scans()] * 16), 8),
    "4 JPEGs of 120 scans": Attack(lambda: form(*[many_scans()] * 4), 8),
    "16 PNGs with long EXIF": Attack(lambda: form(*[long_exif()] * 16), 8),
    "a PNG of many chunks": Attack(lambda: request(many_chunks(), "image/png"), 4),
    "a JPEG of many parts": Attack(lambda: request(many_segments(), "image/jpeg"), 4),
}


async def ask(port: int, data: bytes, address: str) -> int:
    """Send a request on a new connection; returns the status, or 0 if there was no response."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    except OSError:
        return 0
    try:
        writer.write(data)
        line = await reader.readline()
        await reader.read()
        return int(line.split()[1]) if line else 0
    except OSError:
        return 0
    finally:
        writer.close()


async def ordinary(port: int, seconds: float) -> tuple[list[float], Counter[int]]:
    """Send ordinary requests; returns sorted latencies in ms, and statuses."""
    data = request(photo(), "image/jpeg").replace(b"Host:", b"Connection: close\r\nHost:", 1)
    times, statuses, until = [], Counter[int](), time.monotonic() + seconds

    async def client(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < until:
            await asyncio.sleep(rng.expovariate(RATE))
            start = time.perf_counter()
            statuses[await ask(port, data, ORDINARY)] += 1
            times.append(1000 * (time.perf_counter() - start))

    await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    return sorted(times), statuses


def attack(port: int, name: str, address: str, ready: Any, stop: Any, results: Any) -> None:
    """Main function of the attacker process, at low priority so that it does not compete with the server."""
    os.nice(19)
    data, statuses = ATTACKS[name].make().replace(b"Host:", b"Connection: close\r\nHost:", 1), Counter[int]()

    async def connection() -> None:
        while not stop.is_set():
            statuses[await ask(port, data, address)] += 1

    async def run_connections() -> None:
        tasks = [asyncio.create_task(connection()) for _ in range(ATTACKS[name].connections)]
        ready.set()
        while not stop.is_set():
            await asyncio.sleep(0.05)
        for task in tasks:  # disconnect
            task.cancel()

    asyncio.run(run_connections())
    results.put(statuses)


def during(port: int, name: str, address: str, seconds: float) -> tuple[list[float], Counter[int], Counter[int]]:
    """Ordinary requests during an attack: latencies, statuses, and the statuses of the attacker."""
    context = multiprocessing.get_context("spawn")
    ready, stop, results = context.Event(), context.Event(), context.Queue()
    attacker = context.Process(target=attack, args=(port, name, address, ready, stop, results), daemon=True)
    attacker.start()
    ready.wait()
    time.sleep(1)
    found = asyncio.run(ordinary(port, seconds))
    stop.set()
    statuses = results.get()
    attacker.join()
    return *found, statuses


def percentile(times: list[float], fraction: float) -> float:
    return times[min(int(fraction * len(times)), len(times) - 1)]


def compare(port: int, names: list[str], address: str, seconds: float) -> list[str]:
    """Print a line for each attack; returns the failures."""
    asyncio.run(ordinary(port, 2))  # warm-up
    alone, statuses = asyncio.run(ordinary(port, 2 * seconds))
    baseline = percentile(alone, 0.99)
    failures = [] if set(statuses) == {200} else [f"without an attack: {dict(statuses)}"]
    print(f"{'attack':28} {'p50':>6} {'p99':>6} {'max':>6} ms  ratio  after  responses to the attacker")
    print(f"{'none':28} {percentile(alone, 0.5):6.0f} {baseline:6.0f} {alone[-1]:6.0f}", flush=True)
    for name in names:
        times, statuses, answers = during(port, name, address, seconds)
        end, ratio = time.monotonic(), percentile(times, 0.99) / baseline
        while percentile(asyncio.run(ordinary(port, 0.3))[0], 0.5) > 3 * baseline:
            pass
        cells = (percentile(times, 0.5), percentile(times, 0.99), times[-1])
        responses = ", ".join(f"{status or 'none'} {count} x" for status, count in sorted(answers.items()))
        print(
            f"{name:28} {cells[0]:6.0f} {cells[1]:6.0f} {cells[2]:6.0f}     {ratio:5.1f} "
            f"{time.monotonic() - end - 0.3:5.1f}s  {responses}",
            flush=True,
        )
        if ratio > MAX_RATIO:
            failures.append(f"{name}: p99 is {ratio:.1f} times that without attack")
        if set(statuses) != {200}:
            failures.append(f"{name}: ordinary requests were answered {dict(statuses)}")
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("model", nargs="?", default="vitrail/cifar10")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--only", nargs="*", choices=list(ATTACKS), default=list(ATTACKS))
    parser.add_argument("--same-address", action="store_true")
    parser.add_argument("--engine", default="torch")
    given, options = parser.parse_known_args()
    address = ORDINARY if given.same_address else ATTACKER
    with service(given.model, given.engine, [word for word in options if word != "--"]) as (port, _, ended):
        failures = compare(port, given.only, address, given.seconds)
    failures += [] if ended == [0] else [f"the server exited with {ended}"]
    for line in failures:
        print("FAILED:", line)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
