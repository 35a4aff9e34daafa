"""Soak test of `vitrail serve`: many requests, some hostile; checks responses and memory.

    python benchmarks/soak.py [MODEL] [--requests 20000] [--hostile 0.05] [--clients 16] [--seed 0] [-- ...]

First each attack of `benchmarks/attacks.py` is measured (--seconds 0 skips this). Then clients send valid requests:
images of various formats and sizes, as raw body, form and JSON. Each response is compared with `Model.predict` on the
same bytes. Hostile requests among them are random bytes, decompression bombs, JPEGs with many scans, several images of
49 million pixels, truncated files, wrong types, invalid forms and JSON, lists of millions, endless headers, slow,
silent and half-closed clients, large bodies without their last byte, clients that disconnect halfway or after a large
body, clients that do not wait for their response, and the requests of `benchmarks/attacks.py`. A hostile request must
be answered 4xx or 503, or not at all if the client is gone; those that are valid images may be answered 200.

Exits with status 1 if a response was wrong, if there was any 5xx but 503, if the memory of the server grew by more than
5 % between the second and the last fifth of the requests, if an attack made the p99 of ordinary requests five times
longer, or if the server did not exit with status 0. Another process polls /healthz; the longest latency is printed.
Options after -- are passed to `vitrail serve`.

With --models N the server has N models with two versions each (`vitrail serve --models`). Clients choose a model at
random; every --switch-every seconds a version of one of them is taken away or returned, and each response is compared
with the version that it names.

With --rotate-every S the server has tokens (`--tokens`), of which clients use the newest: every S seconds one is added
and, when clients use it, the old one removed. No valid request may be answered 401. --rate-limit goes to the server
after --; clients that are limited try again.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import io
import itertools
import json
import multiprocessing
import random
import secrets
import socket
import struct
import sys
import tempfile
import time
import zlib
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from attacks import ATTACKER, ATTACKS, compare, deep_png, form, many_chunks, many_segments, plain_ppm
from model_versions import make_versions, serve_models
from PIL import Image

from vitrail.bench.serve_load import service

SCORE_TOLERANCE = 1e-4
"""Allowed difference of a score from that of `Model.predict`; batches round differently."""
MAX_GROWTH = 0.05
MEMORY_SAMPLES = 25
"""Measurements of the server's memory per twentieth of the requests."""
SLOW_INTERVAL_S = 2.2
"""Seconds between the pieces that a slow client sends."""
EXPENSIVE = {
    "deep": lambda: form(*[deep_png(0)] * 16),
    "plain": lambda: form(plain_ppm()),
    "chunks": lambda: request(many_chunks(), "image/png"),
    "parts": lambda: request(many_segments(), "image/jpeg"),
}
"""Requests that are much more expensive than they seem."""
HOSTILE_CONTENT = (
    "random",
    "bomb",
    "jpeg bomb",
    "scans",
    "large",
    "truncated",
    "kind",
    "form",
    "json",
    "lists",
    "escapes",
)
"""Clients that are hostile by what they send."""
HOSTILE_BEHAVIOR = ("slow", "halfway", "impatient", "large and gone", "headers", "silent", "half-closed", "stalled")
"""Clients that are hostile by how they send."""
HOSTILE = (*HOSTILE_CONTENT, *EXPENSIVE, "value", *HOSTILE_BEHAVIOR)
MAY_SUCCEED = ("large", "chunks", "parts")
"""Hostile requests that may be answered 200, because they are valid images."""
STALLED_BODIES = 40
"""Incomplete bodies of 15 million bytes that a stalling client sends; together they exceed the server's limit."""
SILENT_CONNECTIONS = 10
"""Connections that a silent client opens and leaves open."""
TOKENS_READ_S = 3.0
"""Seconds after which the server has read a new tokens file."""


@dataclass
class Sample:
    """An image with the model's prediction."""

    data: bytes
    kind: str
    answers: dict[tuple[str, str], tuple[int, float]] = field(default_factory=dict)
    """Top class and its score, by model and version; for a single model, of ("", "")."""


class Tokens:
    """The tokens file of the server, and the token that clients send."""

    def __init__(self, path: Path) -> None:
        self.path, self.rotations = path, 0
        self.current = secrets.token_hex(16)
        self._write(self.current)

    def _write(self, *tokens: str) -> None:
        new = self.path.with_suffix(".new")
        new.write_text("".join(f"soak: {token}\n" for token in tokens))
        new.replace(self.path)

    async def rotate(self, every: float) -> None:
        while True:
            await asyncio.sleep(every)
            old, new = self.current, secrets.token_hex(16)
            self._write(old, new)
            await asyncio.sleep(TOKENS_READ_S)
            self.current = new
            await asyncio.sleep(TOKENS_READ_S)  # requests that were begun with the old one
            self._write(new)
            self.rotations += 1

    def sign(self, data: bytes) -> bytes:
        """A request with the token in a header."""
        host = b"Host: localhost\r\n"
        return data.replace(host, host + f"Authorization: Bearer {self.current}\r\n".encode(), 1)


@dataclass
class Results:
    """Results of the soak test."""

    tokens: Tokens | None = None
    good: int = 0
    wrong: list[str] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    hostile: Counter[str] = field(default_factory=Counter)
    versions: Counter[str] = field(default_factory=Counter)
    """Answers by model and version."""
    switches: int = 0
    memory: list[tuple[int, int]] = field(default_factory=list)
    """Number of requests so far, and resident MiB of the server: the minimum of several measurements."""
    peak: int = 0
    silent: list[asyncio.StreamWriter] = field(default_factory=list)
    """Silent connections."""

    def add(self, count: int, mib: int) -> None:
        """Record the memory of the server in the twentieth that began with request `count`."""
        self.peak = max(self.peak, mib)
        if self.memory and self.memory[-1][0] == count:
            mib = min(mib, self.memory.pop()[1])
        self.memory.append((count, mib))


def make_samples(model: str | None, count: int = 96) -> list[Sample]:
    """Crops of the sample images in several formats, with the model's predictions."""
    import vitrail
    from vitrail.serve.static_files import WEB_DIR

    rng = random.Random(0)
    photos = [Image.open(path).convert("RGB") for path in sorted((WEB_DIR / "samples").glob("*.jpg"))]
    found = []
    for number in range(count):
        photo, kind = photos[number % len(photos)], ("jpeg", "png", "webp")[number % 3]
        width, height = rng.randint(40, photo.width), rng.randint(40, photo.height)
        left, top = rng.randint(0, photo.width - width), rng.randint(0, photo.height - height)
        out = io.BytesIO()
        photo.crop((left, top, left + width, top + height)).save(out, kind)
        found.append(Sample(out.getvalue(), kind))
    vit = vitrail.load(model or "vitrail/cifar10")
    for one, [best] in zip(found, vit.predict([g.data for g in found], top=1), strict=True):
        one.answers["", ""] = best.index, best.score
    return found


def make_models(model: str, count: int, folder: Path, samples: list[Sample]) -> list[str]:
    """Write `count` models with two versions each; returns their names."""
    names = [f"model-{number}" for number in range(count)]
    for number, name in enumerate(names):
        answers = make_versions(model, 2, folder / name, [one.data for one in samples], seed=number)
        for version, expected in answers.items():
            for one, answer in zip(samples, expected, strict=True):
                one.answers[name, version] = answer
    return names


async def switch_versions(folder: Path, names: list[str], seconds: float, results: Results) -> None:
    """Take the newer version of one model after the other away, and return it."""
    for name in itertools.cycle(names):
        await asyncio.sleep(seconds)
        shown, hidden = folder / name / "2", folder / name / ".2"
        shown.rename(hidden) if shown.exists() else hidden.rename(shown)
        results.switches += 1


def png(width: int, height: int) -> bytes:
    """A small PNG whose header states this size."""
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(bytes(1000))))
    out = b"\x89PNG\r\n\x1a\n"
    for name, data in chunks:
        out += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    return out


def request(body: bytes, kind: str, path: str = "/v1/predict?top=1") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def good_request(one: Sample, way: int, model: str = "") -> bytes:
    """Request with the image as raw body (0), base64 (1) or form (2)."""
    path = "/v1/predict?top=1" + (f"&model={model}" if model else "")
    if way == 0:
        return request(one.data, f"image/{one.kind}", path)
    if way == 1:
        return request(json.dumps({"image": base64.b64encode(one.data).decode()}).encode(), "application/json", path)
    part = b'--edge\r\nContent-Disposition: form-data; name="images"; filename="a"\r\n\r\n'
    return request(part + one.data + b"\r\n--edge--\r\n", "multipart/form-data; boundary=edge", path)


@lru_cache(maxsize=1)
def many_scans() -> bytes:
    """A progressive JPEG of 49 million pixels with its last scan repeated a hundred times."""
    out = io.BytesIO()
    Image.new("L", (7000, 7000), 100).save(out, "JPEG", progressive=True)
    data = out.getvalue()
    last = data.rindex(b"\xff\xda")
    return data[:last] + 100 * data[last:-2] + data[-2:]


@lru_cache(maxsize=1)
def large_form() -> bytes:
    """A form with three images of 49 million pixels, each a small file."""
    out = io.BytesIO()
    Image.new("RGB", (7000, 7000), (9, 99, 199)).save(out, "PNG")
    part = b'--edge\r\nContent-Disposition: form-data; name="images"; filename="a"\r\n\r\n' + out.getvalue() + b"\r\n"
    return request(3 * part + b"--edge--\r\n", "multipart/form-data; boundary=edge")


@lru_cache(maxsize=4)
def list_bomb(number: int) -> bytes:
    """Nine megabytes of JSON with empty values."""
    item = (b"[]", b"{}", b"1", b'""')[number]
    name = b"images" if number == 3 else b"hide"
    inside = item + (b"," + item) * (9_000_000 // (len(item) + 1))
    return request(b'{"image": "AAAA", "%s": [%s]}' % (name, inside), "application/json")


def hostile_request(name: str, one: Sample, rng: random.Random) -> bytes:
    if name in EXPENSIVE:
        return EXPENSIVE[name]()
    if name == "scans":
        return request(many_scans(), "image/jpeg")
    if name == "large":
        return large_form()
    if name == "lists":
        return list_bomb(rng.randrange(4))
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
        return request(one.data[: rng.randint(1, int(0.9 * len(one.data)))], f"image/{one.kind}")
    if name == "kind":
        return request(one.data, rng.choice(["text/plain", "text/html", "video/mp4"]))
    if name == "form":
        return request(rng.randbytes(2000), "multipart/form-data; boundary=edge")
    if name == "json":
        return request(rng.choice([b"{", b"[" * 50_000, b'{"image": 3}', b"\xff"]), "application/json")
    if name == "value":
        return request(one.data, f"image/{one.kind}", "/v1/predict?hide=[99999]")
    return request(rng.randbytes(rng.randint(0, 20_000)), "image/jpeg")


class Client:
    """A connection that is reopened when the server closes it."""

    def __init__(self, port: int, results: Results) -> None:
        self.port, self.results = port, results
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def ask(self, data: bytes) -> tuple[int, bytes]:
        data = self.sign(data)
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

    def sign(self, data: bytes) -> bytes:
        return data if self.results.tokens is None else self.results.tokens.sign(data)

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
        self.results.statuses[str(status)] += 1
        return status, body

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self.reader = self.writer = None

    async def good(self, one: Sample, way: int, model: str = "") -> None:
        status, body = await self.ask(good_request(one, way, model))
        while status in (429, 503):  # retry later, as the server asks
            await asyncio.sleep(1)
            status, body = await self.ask(good_request(one, way, model))
        if status != 200:
            self.results.wrong.append(f"a good request was answered {status}: {body.decode()}")
            return
        answer = json.loads(body)
        [best] = answer["results"][0]["predictions"]
        version = (answer["model"], answer["version"]) if model else ("", "")
        index, score = one.answers[version]
        if answer["model"] != (model or answer["model"]):
            self.results.wrong.append(f"asked for {model}, got {answer['model']}")
        if best["index"] != index or abs(best["score"] - score) > SCORE_TOLERANCE:
            self.results.wrong.append(f"got {best} of {version}, expected class {index} with {score}")
        self.results.good += 1
        self.results.versions[" ".join(version)] += 1

    async def hostile(self, name: str, one: Sample, rng: random.Random) -> None:
        self.results.hostile[name] += 1
        if name in HOSTILE_BEHAVIOR:
            await self.misbehave(name, good_request(one, rng.randrange(3)))
            return
        status, body = await self.ask(hostile_request(name, one, rng))
        if not 400 <= status < 500 and status != 503 and not (name in MAY_SUCCEED and status == 200):
            self.results.wrong.append(f"{name} was answered {status}: {body[:200]!r}")

    async def misbehave(self, name: str, data: bytes) -> None:
        """Send a valid request with hostile behavior, on a new connection."""
        data = self.sign(data)
        other = Client(self.port, self.results)
        await other.open()
        assert other.writer is not None
        if name == "silent":
            for number in range(SILENT_CONNECTIONS):
                self.results.silent.append((await asyncio.open_connection("127.0.0.1", self.port))[1])
                self.results.silent[-1].write(data[: 20 * (number % 2)])
        elif name == "headers":
            await other.flood()
        elif name == "stalled":
            await self.stall(self.sign(request(bytes(15_000_000), "image/jpeg"))[:-1])
        elif name == "half-closed":
            other.writer.write(data)
            other.writer.write_eof()
            await other.reader.read()  # type: ignore[union-attr]
        elif name == "large and gone":
            other.writer.write(self.sign(request(bytes(15_000_000), "image/png")))
            await other.writer.drain()
        elif name == "slow":
            for piece in (data[:100], data[100 : len(data) // 2], data[len(data) // 2 :]):
                other.writer.write(piece)
                await other.writer.drain()
                await asyncio.sleep(SLOW_INTERVAL_S)
            status, body = await other.answer()
            if status != 200:
                self.results.wrong.append(f"a slow client was answered {status}: {body[:200]!r}")
        else:
            other.writer.write(data[: len(data) // 2] if name == "halfway" else data)
            await other.writer.drain()
        other.close()

    async def stall(self, data: bytes) -> None:
        """Send many incomplete requests and keep them open for a while."""
        others = [Client(self.port, self.results) for _ in range(STALLED_BODIES)]
        for other in others:
            await other.open()
            assert other.writer is not None
            with contextlib.suppress(OSError):  # rejected
                other.writer.write(data)
                await other.writer.drain()
        await asyncio.sleep(SLOW_INTERVAL_S)
        for other in others:
            other.close()

    async def flood(self) -> None:
        """Send endless headers until the server closes the connection."""
        assert self.writer is not None
        self.writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: ")
        with contextlib.suppress(OSError):
            for _ in range(512):
                self.writer.write(b"a" * 65_536)
                await self.writer.drain()
            self.results.wrong.append("the server accepted 32 MiB of headers")


def poll_health(port: int, longest: Any, polls: Any) -> None:
    """Main function of a process that polls /healthz and records the longest latency."""
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
            polls.value += 1
        time.sleep(0.05)


def resident_mib(pid: int) -> int:
    """Resident memory of a process, in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) // 1024


async def soak(
    port: int, pid: int, samples: list[Sample], given: argparse.Namespace, folder: Path, names: list[str],
    tokens: Tokens | None,
) -> Results:  # fmt: skip
    results, turn = Results(tokens=tokens), iter(range(given.requests))
    background = [asyncio.ensure_future(switch_versions(folder, names, given.switch_every, results))]
    if tokens is not None:
        background.append(asyncio.ensure_future(tokens.rotate(given.rotate_every)))

    async def client(number: int) -> None:
        rng, mine = random.Random(given.seed * 1000 + number), Client(port, results)
        for count in turn:
            if count % max(given.requests // (20 * MEMORY_SAMPLES), 1) == 0:
                results.add(count * 20 // given.requests * given.requests // 20, resident_mib(pid))
            one = rng.choice(samples)
            if rng.random() < given.hostile:
                await mine.hostile(rng.choice(HOSTILE), one, rng)
            else:
                await mine.good(one, rng.randrange(3), rng.choice(names or [""]))
        mine.close()

    await asyncio.gather(*(client(number) for number in range(given.clients)))
    for task in background:
        task.cancel()
    for writer in results.silent:
        writer.close()
    results.add(given.requests, resident_mib(pid))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("model", nargs="?")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--hostile", type=float, default=0.05)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", default="torch")
    parser.add_argument("--models", type=int, default=0, help="number of models with two versions each; 0: one model")
    parser.add_argument("--switch-every", type=float, default=20, help="seconds between two switches of versions")
    parser.add_argument("--rotate-every", type=float, default=0, help="seconds between two rotations of tokens")
    parser.add_argument("--seconds", type=float, default=10, help="duration of each attack; 0 skips the attacks")
    given, options = parser.parse_known_args()
    options = [word for word in options if word != "--"]
    samples = make_samples(given.model)
    failures: list[str] = []
    with contextlib.ExitStack() as stack:
        folder, model = Path(stack.enter_context(tempfile.TemporaryDirectory())), given.model or "vitrail/cifar10"
        names = make_models(model, given.models, folder, samples)
        tokens = None
        if given.rotate_every:
            tokens = Tokens(Path(stack.enter_context(tempfile.TemporaryDirectory()), "tokens"))
            options += ["--tokens", str(tokens.path)]
        port, pid, ended = stack.enter_context(
            serve_models(folder, ["--engine", given.engine, *options])
            if names
            else service(model, given.engine, options)
        )
        if given.seconds:
            failures += compare(port, list(ATTACKS), ATTACKER, given.seconds)
        context = multiprocessing.get_context("spawn")
        longest, polls = context.Value("d", 0.0), context.Value("i", 0)
        watcher = context.Process(target=poll_health, args=(port, longest, polls), daemon=True)
        watcher.start()
        start = time.perf_counter()
        results = asyncio.run(soak(port, pid, samples, given, folder, names, tokens))
        took = time.perf_counter() - start
        watcher.terminate()
    if ended != [0]:
        failures.append(f"the server exited with {ended}")
    print(f"{given.requests} requests in {took:.0f} s; {results.good} good ones answered, {len(results.wrong)} wrong")
    print("statuses", dict(sorted(results.statuses.items())))
    print("hostile", dict(sorted(results.hostile.items())))
    if names:
        print(f"{results.switches} switches; answers by version", dict(sorted(results.versions.items())))
    if tokens is not None:
        print(f"{tokens.rotations} rotations of tokens")
    print(f"/healthz, polled {polls.value} times, took at most {1000 * longest.value:.0f} ms")
    print("memory, MiB", " ".join(f"{count}:{mib}" for count, mib in results.memory), "peak", results.peak)
    early = min(mib for count, mib in results.memory if 0.2 <= count / given.requests < 0.4)
    late = min(mib for count, mib in results.memory if count / given.requests >= 0.8)
    if late > early * (1 + MAX_GROWTH):
        failures.append(f"memory grew from {early} to {late} MiB")
    if any(status.startswith("5") and status != "503" for status in results.statuses):
        failures.append("there were unexpected 5xx responses")
    failures += results.wrong[:10]
    for failure in failures:
        print("FAILED:", failure)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
