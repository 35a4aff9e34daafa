"""Many requests to `vitrail serve`, some of them hostile: every good one answered correctly, memory flat.

    python benchmarks/soak.py [MODEL] [--requests 20000] [--hostile 0.05] [--clients 16] [--seed 0] [-- ...]

Before it each attack of `benchmarks/attacks.py` is measured by itself (--seconds 0: none is). Then good requests,
images of various kinds and sizes in all three kinds of body, are sent by some clients, and each answer is compared
with `Model.predict` on the same bytes. Hostile ones among them are random bytes, decompression bombs, JPEGs of many
scans, images of 49 million pixels at once, truncated files, wrong types, nonsense where a form or JSON should be,
lists of millions, headers without end, clients that send slowly, nothing, or half a request, clients that send many
large bodies but for the last byte, that hang up halfway or after a large body, clients that do not wait for their
answer, and the requests of `benchmarks/attacks.py`. A hostile request must be answered 4xx or 503, or not at all
where no client listens; those that are images after all may be answered 200.

It ends with status 1 if an answer was wrong, if there was any 5xx but 503, if the server's memory grew by more than a
twentieth between the second and the last fifth of the requests, if an attack made an ordinary request's p99 five
times longer, or if the server did not end with status 0. Another process asks /healthz all the time; the longest
answer time is printed. Options after -- go to `vitrail serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import io
import json
import multiprocessing
import random
import socket
import struct
import sys
import time
import zlib
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from attacks import ATTACKER, ATTACKS, compare, deep_png, form, many_chunks, many_parts, plain_ppm
from PIL import Image
from serve import service

SCORE = 1e-4
"""How far a score may be from the one computed alone: batches round differently."""
GROWTH = 0.05
SAMPLES = 25
"""Looks at the server's memory in each twentieth."""
SLOW = 2.2
"""Seconds between the pieces that a slow client sends."""
ATTACKING = {
    "deep": lambda: form(*[deep_png(0)] * 16),
    "plain": lambda: form(plain_ppm()),
    "chunks": lambda: request(many_chunks(), "image/png"),
    "parts": lambda: request(many_parts(), "image/jpeg"),
}
"""Requests that cost much more than they seem to."""
SENT = ("random", "bomb", "jpeg bomb", "scans", "large", "truncated", "kind", "form", "json", "lists", "escapes")
"""Hostile by what they send."""
BEHAVED = ("slow", "halfway", "impatient", "large and gone", "headers", "silent", "half-closed", "stalled")
"""Hostile by how."""
HOSTILE = (*SENT, *ATTACKING, "value", *BEHAVED)
LARGE = ("large", "chunks", "parts")
"""Those that may be answered 200, since they are images after all."""
STALLED = 40
"""Bodies of 15 million bytes that a stalling client all but ends: together they are more than the server holds."""
SILENT = 10
"""Connections that a silent client opens, and leaves to the server."""


@dataclass
class Good:
    """An image and what the model says of it."""

    data: bytes
    kind: str
    index: int = 0
    score: float = 0.0


@dataclass
class Tally:
    """What came of it all."""

    good: int = 0
    wrong: list[str] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    hostile: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[int, int]] = field(default_factory=list)
    """Requests so far, and the server's resident MiB: the least of some, since large images come and go."""
    peak: int = 0
    silent: list[asyncio.StreamWriter] = field(default_factory=list)
    """Connections on which nothing more is sent."""

    def add(self, count: int, mib: int) -> None:
        """What the server holds, in the twentieth that began with this request."""
        self.peak = max(self.peak, mib)
        if self.memory and self.memory[-1][0] == count:
            mib = min(mib, self.memory.pop()[1])
        self.memory.append((count, mib))


def good_ones(model: str | None, count: int = 96) -> list[Good]:
    """Parts of the sample images in several formats, with the model's own answers."""
    import vitrail
    from vitrail.serve.web import WEB

    chance = random.Random(0)
    photos = [Image.open(path).convert("RGB") for path in sorted((WEB / "samples").glob("*.jpg"))]
    found = []
    for number in range(count):
        photo, kind = photos[number % len(photos)], ("jpeg", "png", "webp")[number % 3]
        width, height = chance.randint(40, photo.width), chance.randint(40, photo.height)
        left, top = chance.randint(0, photo.width - width), chance.randint(0, photo.height - height)
        out = io.BytesIO()
        photo.crop((left, top, left + width, top + height)).save(out, kind)
        found.append(Good(out.getvalue(), kind))
    vit = vitrail.load(model or "vitrail/cifar10")
    for one, [best] in zip(found, vit.predict([g.data for g in found], top=1), strict=True):
        one.index, one.score = best.index, best.score
    return found


def png(width: int, height: int) -> bytes:
    """A small file that says it has so many pixels."""
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(bytes(1000))))
    out = b"\x89PNG\r\n\x1a\n"
    for name, data in chunks:
        out += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    return out


def request(body: bytes, kind: str, path: str = "/v1/predict?top=1") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def good_request(one: Good, way: int) -> bytes:
    """Raw, as base64, or in a form."""
    if way == 0:
        return request(one.data, f"image/{one.kind}")
    if way == 1:
        return request(json.dumps({"image": base64.b64encode(one.data).decode()}).encode(), "application/json")
    part = b'--edge\r\nContent-Disposition: form-data; name="images"; filename="a"\r\n\r\n'
    return request(part + one.data + b"\r\n--edge--\r\n", "multipart/form-data; boundary=edge")


@lru_cache(maxsize=1)
def many_scans() -> bytes:
    """A progressive JPEG of 49 million pixels whose last scan comes a hundred times."""
    out = io.BytesIO()
    Image.new("L", (7000, 7000), 100).save(out, "JPEG", progressive=True)
    data = out.getvalue()
    last = data.rindex(b"\xff\xda")
    return data[:last] + 100 * data[last:-2] + data[-2:]


@lru_cache(maxsize=1)
def large_ones() -> bytes:
    """A form with three images of 49 million pixels, each a small file."""
    out = io.BytesIO()
    Image.new("RGB", (7000, 7000), (9, 99, 199)).save(out, "PNG")
    part = b'--edge\r\nContent-Disposition: form-data; name="images"; filename="a"\r\n\r\n' + out.getvalue() + b"\r\n"
    return request(3 * part + b"--edge--\r\n", "multipart/form-data; boundary=edge")


@lru_cache(maxsize=4)
def list_bomb(number: int) -> bytes:
    """Nine megabytes of JSON that are next to nothing."""
    item = (b"[]", b"{}", b"1", b'""')[number]
    name = b"images" if number == 3 else b"hide"
    inside = item + (b"," + item) * (9_000_000 // (len(item) + 1))
    return request(b'{"image": "AAAA", "%s": [%s]}' % (name, inside), "application/json")


def hostile_request(name: str, one: Good, chance: random.Random) -> bytes:
    if name in ATTACKING:
        return ATTACKING[name]()
    if name == "scans":
        return request(many_scans(), "image/jpeg")
    if name == "large":
        return large_ones()
    if name == "lists":
        return list_bomb(chance.randrange(4))
    if name == "escapes":
        return request(b'{"image": "' + rb"\n" * 4_000_000 + b'"}', "application/json")
    if name == "bomb":
        return request(png(50_000, 50_000), "image/png")
    if name == "jpeg bomb":
        out = io.BytesIO()
        Image.new("RGB", (8, 8)).save(out, "JPEG")
        data = bytearray(out.getvalue())
        at = data.index(b"\xff\xc0")
        data[at + 5 : at + 9] = struct.pack(">HH", 65_000, 65_000)
        return request(bytes(data), "image/jpeg")
    if name == "truncated":
        return request(one.data[: chance.randint(1, int(0.9 * len(one.data)))], f"image/{one.kind}")
    if name == "kind":
        return request(one.data, chance.choice(["text/plain", "text/html", "video/mp4"]))
    if name == "form":
        return request(chance.randbytes(2000), "multipart/form-data; boundary=edge")
    if name == "json":
        return request(chance.choice([b"{", b"[" * 50_000, b'{"image": 3}', b"\xff"]), "application/json")
    if name == "value":
        return request(one.data, f"image/{one.kind}", "/v1/predict?hide=[99999]")
    return request(chance.randbytes(chance.randint(0, 20_000)), "image/jpeg")


class Client:
    """One connection, opened again where the server has closed it."""

    def __init__(self, port: int, tally: Tally) -> None:
        self.port, self.tally = port, tally
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def ask(self, data: bytes) -> tuple[int, bytes]:
        for attempt in (0, 1):
            try:
                await self.open()
                assert self.writer is not None
                self.writer.write(data)
                return await self.answer()
            except (ConnectionError, asyncio.IncompleteReadError):
                self.close()
                if attempt:
                    raise
        raise AssertionError

    async def open(self) -> None:
        if self.writer is None:
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)

    async def answer(self) -> tuple[int, bytes]:
        assert self.reader is not None
        head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length: ")[2].partition(b"\r")[0])
        body = await self.reader.readexactly(length)
        if b"connection: close" in head:
            self.close()
        status = int(head.split()[1])
        self.tally.statuses[str(status)] += 1
        return status, body

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self.reader = self.writer = None

    async def good(self, one: Good, way: int) -> None:
        status, body = await self.ask(good_request(one, way))
        while status in (429, 503):  # deliberate: come back later
            await asyncio.sleep(1)
            status, body = await self.ask(good_request(one, way))
        if status != 200:
            self.tally.wrong.append(f"a good request was answered {status}: {body.decode()}")
            return
        [best] = json.loads(body)["results"][0]["predictions"]
        if best["index"] != one.index or abs(best["score"] - one.score) > SCORE:
            self.tally.wrong.append(f"got {best}, wanted class {one.index} with {one.score}")
        self.tally.good += 1

    async def hostile(self, name: str, one: Good, chance: random.Random) -> None:
        self.tally.hostile[name] += 1
        if name in BEHAVED:
            await self.badly(name, good_request(one, chance.randrange(3)))
            return
        status, body = await self.ask(hostile_request(name, one, chance))
        if not 400 <= status < 500 and status != 503 and not (name in LARGE and status == 200):
            self.tally.wrong.append(f"{name} was answered {status}: {body[:200]!r}")

    async def badly(self, name: str, data: bytes) -> None:
        """A good request, sent as nobody should; on a connection of its own."""
        other = Client(self.port, self.tally)
        await other.open()
        assert other.writer is not None
        if name == "silent":
            for number in range(SILENT):
                self.tally.silent.append((await asyncio.open_connection("127.0.0.1", self.port))[1])
                self.tally.silent[-1].write(data[: 20 * (number % 2)])
        elif name == "headers":
            await other.flood()
        elif name == "stalled":
            await self.stall(request(bytes(15_000_000), "image/jpeg")[:-1])
        elif name == "half-closed":
            other.writer.write(data)
            other.writer.write_eof()
            await other.reader.read()  # type: ignore[union-attr]
        elif name == "large and gone":
            other.writer.write(request(bytes(15_000_000), "image/png"))
            await other.writer.drain()
        elif name == "slow":
            for piece in (data[:100], data[100 : len(data) // 2], data[len(data) // 2 :]):
                other.writer.write(piece)
                await other.writer.drain()
                await asyncio.sleep(SLOW)
            status, body = await other.answer()
            if status != 200:
                self.tally.wrong.append(f"a slow client was answered {status}: {body[:200]!r}")
        else:
            other.writer.write(data[: len(data) // 2] if name == "halfway" else data)
            await other.writer.drain()
        other.close()

    async def stall(self, data: bytes) -> None:
        """Many requests at once that do not end, for a while."""
        others = [Client(self.port, self.tally) for _ in range(STALLED)]
        for other in others:
            await other.open()
            assert other.writer is not None
            with contextlib.suppress(OSError):  # refused
                other.writer.write(data)
                await other.writer.drain()
        await asyncio.sleep(SLOW)
        for other in others:
            other.close()

    async def flood(self) -> None:
        """Headers until nobody takes them."""
        assert self.writer is not None
        self.writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: ")
        with contextlib.suppress(OSError):
            for _ in range(512):
                self.writer.write(b"a" * 65_536)
                await self.writer.drain()
            self.tally.wrong.append("32 MiB of headers were taken")


def watch(port: int, longest: Any, asked: Any) -> None:
    """Ask /healthz for ever, and keep the longest that it took; in a process of its own."""
    request = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    while True:
        start = time.perf_counter()
        try:
            with socket.create_connection(("127.0.0.1", port)) as sock:
                sock.sendall(request)
                answer = sock.recv(100)
        except OSError:
            answer = b""
        if answer.startswith(b"HTTP/1.1 200"):
            longest.value = max(longest.value, time.perf_counter() - start)
            asked.value += 1
        time.sleep(0.05)


def resident(pid: int) -> int:
    """MiB that a process holds in memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) // 1024


async def soak(port: int, pid: int, goods: list[Good], given: argparse.Namespace) -> Tally:
    tally, turn = Tally(), iter(range(given.requests))

    async def client(number: int) -> None:
        chance, mine = random.Random(given.seed * 1000 + number), Client(port, tally)
        for count in turn:
            if count % max(given.requests // (20 * SAMPLES), 1) == 0:
                tally.add(count * 20 // given.requests * given.requests // 20, resident(pid))
            one = chance.choice(goods)
            if chance.random() < given.hostile:
                await mine.hostile(chance.choice(HOSTILE), one, chance)
            else:
                await mine.good(one, chance.randrange(3))
        mine.close()

    await asyncio.gather(*(client(number) for number in range(given.clients)))
    for writer in tally.silent:
        writer.close()
    tally.add(given.requests, resident(pid))
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("model", nargs="?")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--hostile", type=float, default=0.05)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", default="torch")
    parser.add_argument("--seconds", type=float, default=10, help="of each attack that is measured")
    given, options = parser.parse_known_args()
    options = [word for word in options if word != "--"]
    goods = good_ones(given.model)
    problems = []
    with service(given.model or "vitrail/cifar10", given.engine, options) as (port, pid, ended):
        if given.seconds:
            problems += compare(port, list(ATTACKS), ATTACKER, given.seconds)
        context = multiprocessing.get_context("spawn")
        longest, asked = context.Value("d", 0.0), context.Value("i", 0)
        watcher = context.Process(target=watch, args=(port, longest, asked), daemon=True)
        watcher.start()
        start = time.perf_counter()
        tally = asyncio.run(soak(port, pid, goods, given))
        took = time.perf_counter() - start
        watcher.terminate()
    if ended != [0]:
        problems.append(f"the server ended with {ended}")
    print(f"{given.requests} requests in {took:.0f} s; {tally.good} good ones answered, {len(tally.wrong)} wrong")
    print("statuses", dict(sorted(tally.statuses.items())))
    print("hostile", dict(sorted(tally.hostile.items())))
    print(f"/healthz, asked {asked.value} times, took at most {1000 * longest.value:.0f} ms")
    print("memory, MiB", " ".join(f"{count}:{mib}" for count, mib in tally.memory), "peak", tally.peak)
    early = min(mib for count, mib in tally.memory if 0.2 <= count / given.requests < 0.4)
    late = min(mib for count, mib in tally.memory if count / given.requests >= 0.8)
    if late > early * (1 + GROWTH):
        problems.append(f"memory grew from {early} to {late} MiB")
    if any(status.startswith("5") and status != "503" for status in tally.statuses):
        problems.append("there were errors of the server's own")
    problems += tally.wrong[:10]
    for problem in problems:
        print("WRONG:", problem)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
