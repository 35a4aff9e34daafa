"""Many requests to `vitrail serve`, some of them hostile: every good one answered correctly, memory flat.

    python benchmarks/soak.py [MODEL] [--requests 20000] [--hostile 0.05] [--clients 16] [--seed 0] [-- ...]

Good requests are pictures of several kinds and sizes in all three kinds of body, and each answer is
compared with `Model.predict` on the same bytes. Hostile ones are random bytes, decompression bombs,
truncated files, wrong types, nonsense where a form or JSON should be, clients that send slowly, clients
that hang up halfway and clients that do not wait for their answer. A hostile request must be answered
4xx, or not at all where nobody listens. It ends with status 1 if an answer was wrong, if there was
any 5xx but 503, if the server's memory grew by more than a twentieth after the first fifth of the
requests, or if it did not end with status 0. Options after -- go to `vitrail serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import random
import struct
import sys
import time
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image
from serve import service

SCORE = 1e-4
"""How far a score may be from the one computed alone: batches round differently."""
GROWTH = 0.05
SLOW = 0.3
"""Seconds between the pieces that a slow client sends."""
HOSTILE = ("random", "bomb", "jpeg bomb", "truncated", "kind", "form", "json", "value", "slow", "halfway", "impatient")


@dataclass
class Good:
    """A picture and what the model says of it."""

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
    """Requests so far, and the server's resident MiB."""


def good_ones(model: str | None, count: int = 96) -> list[Good]:
    """Parts of the sample pictures in several formats, with the model's own answers."""
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


def hostile_request(name: str, one: Good, chance: random.Random) -> bytes:
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
        return request(one.data, chance.choice(["text/plain", "application/x-www-form-urlencoded", "video/mp4"]))
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
        while status == 503:  # deliberate: come back later
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
        if name in ("slow", "halfway", "impatient"):
            await self.badly(name, good_request(one, chance.randrange(3)))
            return
        status, body = await self.ask(hostile_request(name, one, chance))
        if not 400 <= status < 500 and status != 503:
            self.tally.wrong.append(f"{name} was answered {status}: {body[:200]!r}")

    async def badly(self, name: str, data: bytes) -> None:
        """A good request, sent as nobody should; on a connection of its own."""
        other = Client(self.port, self.tally)
        await other.open()
        assert other.writer is not None
        if name == "slow":
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


def resident(pid: int) -> int:
    """MiB that a process holds in memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) // 1024


async def soak(port: int, pid: int, goods: list[Good], given: argparse.Namespace) -> Tally:
    tally, turn = Tally(), iter(range(given.requests))

    async def client(number: int) -> None:
        chance, mine = random.Random(given.seed * 1000 + number), Client(port, tally)
        for count in turn:
            if count % max(given.requests // 20, 1) == 0:
                tally.memory.append((count, resident(pid)))
            one = chance.choice(goods)
            if chance.random() < given.hostile:
                await mine.hostile(chance.choice(HOSTILE), one, chance)
            else:
                await mine.good(one, chance.randrange(3))
        mine.close()

    await asyncio.gather(*(client(number) for number in range(given.clients)))
    tally.memory.append((given.requests, resident(pid)))
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("model", nargs="?")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--hostile", type=float, default=0.05)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", default="torch")
    parser.add_argument("options", nargs="*")
    given = parser.parse_args()
    goods = good_ones(given.model)
    problems = []
    with service(given.model or "vitrail/cifar10", given.engine, given.options) as (port, pid, ended):
        start = time.perf_counter()
        tally = asyncio.run(soak(port, pid, goods, given))
        took = time.perf_counter() - start
    if ended != [0]:
        problems.append(f"the server ended with {ended}")
    print(f"{given.requests} requests in {took:.0f} s; {tally.good} good ones answered, {len(tally.wrong)} wrong")
    print("statuses", dict(sorted(tally.statuses.items())))
    print("hostile", dict(sorted(tally.hostile.items())))
    print("memory, MiB", " ".join(f"{count}:{mib}" for count, mib in tally.memory))
    settled = [mib for count, mib in tally.memory if count >= given.requests / 5]
    if max(settled) > settled[0] * (1 + GROWTH):
        problems.append(f"memory grew from {settled[0]} to {max(settled)} MiB")
    if any(status.startswith("5") and status != "503" for status in tally.statuses):
        problems.append("there were errors of the server's own")
    problems += tally.wrong[:10]
    for problem in problems:
        print("WRONG:", problem)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
