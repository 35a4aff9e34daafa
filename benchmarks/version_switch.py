"""Switches versions of a model under load: no request may fail, every answer must be from the version that it names.

    python benchmarks/version_switch.py [MODEL] [--switches 6] [--clients 32] [--pause 3] [--workers 1] [--engine torch]

`vitrail serve --models` serves versions of MODEL (default: the one that ships with vitrail) that differ in the head, so
that each gives other scores. Clients send one JPEG after another, without a version; each answer is compared with the
output of the version that it names. Meanwhile versions are moved into the folder; in between, a truncated one, which
must be refused, and at the end the server returns to the version before by one call of the admin route.

Prints the number of failed and of wrong answers, the answers of each version, the time from `mv` to the first answer of
the new version, the latency while a version was being loaded and otherwise, and the server's memory before and after.
Exits with status 1 if a request failed, an answer was wrong, or a switch did not happen.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soak import request, resident_mib

SCORE_TOLERANCE = 1e-4
"""Allowed difference of a score from that of `Model.predict`; batches round differently."""
MIN_DIFFERENCE = 1e-2
"""Minimum difference of the scores of two versions for the same image."""
SWITCH_TIMEOUT_S = 120.0
TOKEN_VARIABLE, TOKEN = "VERSION_SWITCH_TOKEN", "of-the-benchmark"


@dataclass(frozen=True)
class Expected:
    """What the versions answer: version -> per image, top class and its score."""

    images: list[bytes]
    answers: dict[str, list[tuple[int, float]]]


@dataclass
class Results:
    """Answers under load."""

    latencies: list[tuple[float, float]] = field(default_factory=list)
    """When each answer arrived, and after how many seconds."""
    versions: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    loading: list[tuple[float, float]] = field(default_factory=list)
    """Begin and end of each switch."""


def make_versions(model: str, count: int, folder: Path) -> Expected:
    """Save `count` versions, 1 to N, and compute what they answer."""
    import torch

    import vitrail
    from vitrail.serve.static_files import WEB_DIR

    images = [path.read_bytes() for path in sorted((WEB_DIR / "samples").glob("*.jpg"))]
    vit = vitrail.load(model)
    bias = vit.net.head.bias.detach().clone()
    answers: dict[str, list[tuple[int, float]]] = {}
    for number in range(1, count + 1):
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            vit.net.head.bias.copy_(bias + 3 * torch.randn(bias.shape, generator=generator))
        vit.save(folder / str(number))
        answers[str(number)] = [(best.index, best.score) for [best] in vit.predict(images, top=1)]
    return Expected(images, answers)


def check_distinct(expected: Expected) -> None:
    """Every image must tell every two consecutive versions apart."""
    for old, new in zip(list(expected.answers)[:-1], list(expected.answers)[1:], strict=True):
        for a, b in zip(expected.answers[old], expected.answers[new], strict=True):
            if a[0] == b[0] and abs(a[1] - b[1]) < MIN_DIFFERENCE:
                print(f"note: versions {old} and {new} agree on an image ({a}, {b}), which cannot tell them apart")


async def client(port: int, expected: Expected, results: Results, number: int, stop: asyncio.Event) -> None:
    """One request after the other on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    turn = number
    while not stop.is_set():
        turn += 1
        index = turn % len(expected.images)
        data, start = expected.images[index], time.perf_counter()
        try:
            writer.write(request(data, "image/jpeg"))
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(answer.partition(b"content-length: ")[2].partition(b"\r")[0])
            body = await reader.readexactly(length)
        except (OSError, asyncio.IncompleteReadError) as error:
            results.problems.append(f"a connection was lost: {error!r}")
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            continue
        results.latencies.append((time.perf_counter(), time.perf_counter() - start))
        check_answer(answer.split()[1], body, index, expected, results)
    writer.close()


def check_answer(status: bytes, body: bytes, index: int, expected: Expected, results: Results) -> None:
    if status != b"200":
        results.problems.append(f"a request was answered {status.decode()}: {body.decode()[:200]}")
        return
    answer = json.loads(body)
    [best] = answer["results"][0]["predictions"]
    label, score = expected.answers[answer["version"]][index]
    results.versions[answer["version"]] += 1
    if best["index"] != label or abs(best["score"] - score) > SCORE_TOLERANCE:
        results.problems.append(f"version {answer['version']} answered {best}, expected class {label} with {score}")


def call(port: int, path: str, method: str = "GET") -> Any:
    """JSON of a route; with the token of operators."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    asked = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers, method=method)
    with urllib.request.urlopen(asked, timeout=SWITCH_TIMEOUT_S) as response:
        return json.load(response)


async def switch_to(version: str, port: int, results: Results, start: float, rollback: bool = False) -> None:
    """Wait until only this version answers."""
    before = results.versions.copy()
    until = time.monotonic() + SWITCH_TIMEOUT_S
    if rollback:
        await asyncio.to_thread(call, port, f"/admin/models/photos/versions/{version}/default?wait=60", "POST")
    while results.versions[version] == before[version]:
        if time.monotonic() > until:
            results.problems.append(f"version {version} did not answer within {SWITCH_TIMEOUT_S:g} s")
            return
        await asyncio.sleep(0.02)
    results.loading.append((start, time.perf_counter()))


async def run(port: int, store: Path, folder: Path, expected: Expected, options: argparse.Namespace) -> Results:
    results, stop = Results(), asyncio.Event()
    clients = [asyncio.create_task(client(port, expected, results, number, stop)) for number in range(options.clients)]
    await asyncio.sleep(options.pause)
    for number in range(2, options.switches + 2):
        start = time.perf_counter()
        os.rename(store / str(number), folder / str(number))
        await switch_to(str(number), port, results, start)
        await asyncio.sleep(options.pause)
        if number == 2:  # a truncated version must change nothing
            broken = shutil.copytree(folder / "2", store / "broken")
            os.truncate(broken / "model.safetensors", (broken / "model.safetensors").stat().st_size // 2)
            os.rename(broken, folder / "1000")
            await asyncio.sleep(3)
            shutil.rmtree(folder / "1000")
    previous = str(options.switches)
    await switch_to(previous, port, results, time.perf_counter(), rollback=True)
    await asyncio.sleep(options.pause)
    stop.set()
    await asyncio.gather(*clients)
    return results


def report(results: Results, memory: list[int]) -> None:
    windows = results.loading
    during = [s for at, s in results.latencies if any(a <= at <= b for a, b in windows)]
    otherwise = [s for at, s in results.latencies if not any(a <= at <= b for a, b in windows)]
    print(f"{len(results.latencies)} requests, {len(results.problems)} failed or wrong")
    print("answers by version", dict(sorted(results.versions.items(), key=lambda item: int(item[0]))))
    print("switches, s", " ".join(f"{b - a:.2f}" for a, b in windows))
    for name, seconds in (("during switches", during), ("otherwise", otherwise)):
        if len(seconds) > 100:
            p50, p99 = statistics.median(seconds), statistics.quantiles(seconds, n=100)[98]
            print(f"latency {name}: median {1000 * p50:.1f} ms, p99 {1000 * p99:.1f} ms, n = {len(seconds)}")
    print(f"memory of the server: {memory[0]} MiB before, {memory[1]} MiB after")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="vitrail/cifar10")
    parser.add_argument("--switches", type=int, default=6)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--pause", type=float, default=3.0, help="seconds between two switches")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--engine", default="torch")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, socket.socket() as free:
        store, folder = Path(temporary, "store"), Path(temporary, "models", "photos")
        folder.mkdir(parents=True)
        expected = make_versions(options.model, options.switches + 1, store)
        check_distinct(expected)
        os.rename(store / "1", folder / "1")
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command = [sys.executable, "-m", "vitrail", "serve", "--models", str(folder.parent), "--port", str(port)]
        command += ["--engine", options.engine, "--workers", str(options.workers), "--admin-token", TOKEN_VARIABLE]
        server = subprocess.Popen(command, env={**os.environ, TOKEN_VARIABLE: TOKEN})
        try:
            wait_until_ready(port)
            before = resident_mib(server.pid)
            results = asyncio.run(run(port, store, folder, expected, options))
            memory = [before, resident_mib(server.pid)]
            print(json.dumps(call(port, "/v1/models")))
        finally:
            server.terminate()
            status = server.wait(60)
    report(results, memory)
    failures = results.problems + ([f"the server exited with status {status}"] if status else [])
    for failure in failures[:10]:
        print("FAILED:", failure)
    sys.exit(bool(failures))


def wait_until_ready(port: int) -> None:
    for _ in range(1200):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the server did not become ready.")


if __name__ == "__main__":
    main()
