"""How long an ordinary request takes while one client attacks `vitrail serve`, compared with how long it takes alone.

    python benchmarks/attacks.py [MODEL] [--seconds 10] [--only NAME ...] [--same-address] [-- ...]

Three ordinary clients send a photograph each, about 15 a second together. One attacker, at another address
(127.0.0.2; with --same-address at theirs), keeps some connections busy with requests that are each inside every
limit, or look like it, and sends the next as soon as the last is answered, whatever the answer says. For each attack:
the ordinary requests' median and 99th percentile, the latter divided by its value before all attacks, what the
attacker was answered, and for how long the attack is felt after its end. Ends with status 1 where that ratio is more
than 5, or an ordinary request was not answered 200. Options after -- go to `vitrail serve`.
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
from serve import service

MOST = 5.0
"""How many times an ordinary request's p99 may be what it is without an attack."""
CLIENTS, RATE = 3, 5
"""Ordinary clients, and requests a second of each."""
ORDINARY, ATTACKER = "127.0.0.1", "127.0.0.2"


@dataclass(frozen=True)
class Attack:
    """One request, sent again and again on some connections."""

    make: Callable[[], bytes]
    connections: int


def request(body: bytes, kind: str, path: str = "/v1/predict") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def form(*images: bytes) -> bytes:
    """A request with these images."""
    part = b'--edge\r\nContent-Disposition: form-data; name="images"; filename="a"\r\n\r\n'
    body = b"".join(part + image + b"\r\n" for image in images) + b"--edge--\r\n"
    return request(body, "multipart/form-data; boundary=edge")


@lru_cache(maxsize=1)
def photo() -> bytes:
    return saved(Image.effect_noise((500, 400), 60).convert("RGB"), "JPEG")


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
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
    """Seven megabytes of numbers."""
    return b"P3\n1600 750\n255\n" + b"1 " * 3_600_000


@lru_cache(maxsize=1)
def many_chunks() -> bytes:
    """A small PNG with a million empty chunks before its pixels."""
    whole = saved(Image.new("RGB", (300, 200)), "PNG")
    return whole[:33] + chunk(b"prVt") * 1_000_000 + whole[33:]


@lru_cache(maxsize=1)
def many_parts() -> bytes:
    """A small JPEG whose header has three million parts."""
    return photo()[:2] + b"\xff\xe9\0\x02" * 3_000_000 + photo()[2:]


def large(kind: str, side: int = 7000, **options: Any) -> bytes:
    return saved(Image.new("RGB", (side, side), (9, 99, 199)), kind, **options)


@lru_cache(maxsize=1)
def many_scans() -> bytes:
    """A JPEG of 2.5 megapixels whose last scan comes 110 times more."""
    whole = saved(Image.new("RGB", (1580, 1580)), "JPEG", progressive=True)
    return whole[:-2] + 110 * whole[whole.rindex(b"\xff\xda") : -2] + whole[-2:]


@lru_cache(maxsize=1)
def long_exif() -> bytes:
    """A small PNG with 65,000 entries of EXIF."""
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
    "a JPEG of many parts": Attack(lambda: request(many_parts(), "image/jpeg"), 4),
}


async def ask(port: int, data: bytes, address: str) -> int:
    """The status of an answer, on a connection of its own; 0: there was none."""
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
    """Milliseconds that requests took, sorted, and their statuses."""
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
    """The attacker's process; it does not compete with the server for the cores of this machine."""
    os.nice(19)
    data, statuses = ATTACKS[name].make().replace(b"Host:", b"Connection: close\r\nHost:", 1), Counter[int]()

    async def connection() -> None:
        while not stop.is_set():
            statuses[await ask(port, data, address)] += 1

    async def all_of_them() -> None:
        tasks = [asyncio.create_task(connection()) for _ in range(ATTACKS[name].connections)]
        ready.set()
        while not stop.is_set():
            await asyncio.sleep(0.05)
        for task in tasks:  # it hangs up
            task.cancel()

    asyncio.run(all_of_them())
    results.put(statuses)


def under(port: int, name: str, address: str, seconds: float) -> tuple[list[float], Counter[int], Counter[int]]:
    """Ordinary requests while an attack goes on: their times and statuses, and the attacker's statuses."""
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


def percentile(times: list[float], share: float) -> float:
    return times[min(int(share * len(times)), len(times) - 1)]


def compare(port: int, names: list[str], address: str, seconds: float) -> list[str]:
    """Print a line for each attack; gives what is wrong."""
    asyncio.run(ordinary(port, 2))  # to get warm
    alone, statuses = asyncio.run(ordinary(port, 2 * seconds))
    usual = percentile(alone, 0.99)
    wrong = [] if set(statuses) == {200} else [f"without an attack: {dict(statuses)}"]
    print(f"{'attack':28} {'p50':>6} {'p99':>6} {'max':>6} ms  ratio  after  the attacker is answered")
    print(f"{'none':28} {percentile(alone, 0.5):6.0f} {usual:6.0f} {alone[-1]:6.0f}", flush=True)
    for name in names:
        times, statuses, answers = under(port, name, address, seconds)
        end, ratio = time.monotonic(), percentile(times, 0.99) / usual
        while percentile(asyncio.run(ordinary(port, 0.3))[0], 0.5) > 3 * usual:
            pass
        cells = (percentile(times, 0.5), percentile(times, 0.99), times[-1])
        said = ", ".join(f"{status or 'nothing'} {count} x" for status, count in sorted(answers.items()))
        print(
            f"{name:28} {cells[0]:6.0f} {cells[1]:6.0f} {cells[2]:6.0f}     {ratio:5.1f} "
            f"{time.monotonic() - end - 0.3:5.1f}s  {said}",
            flush=True,
        )
        if ratio > MOST:
            wrong.append(f"{name}: p99 is {ratio:.1f} times what it is without")
        if set(statuses) != {200}:
            wrong.append(f"{name}: ordinary requests were answered {dict(statuses)}")
    return wrong


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
        wrong = compare(port, given.only, address, given.seconds)
    wrong += [] if ended == [0] else [f"the server ended with {ended}"]
    for line in wrong:
        print("WRONG:", line)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
