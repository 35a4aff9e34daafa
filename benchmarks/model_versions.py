"""Folders with versions of a model, and a server that watches one; for benchmarks of `vitrail serve --models`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TOKEN_VARIABLE, TOKEN = "BENCHMARK_ADMIN_TOKEN", "of-the-benchmark"
TIMEOUT_S = 120.0


def make_versions(
    model: str, count: int, folder: Path, images: Sequence[bytes], seed: int = 0
) -> dict[str, list[tuple[int, float]]]:
    """Save `count` versions, 1 to N, that differ in the bias of the head.

    Returns for each version the top class of every image, and its score.
    """
    import torch

    import vitrail

    vit = vitrail.load(model)
    bias = vit.net.head.bias.detach().clone()
    answers: dict[str, list[tuple[int, float]]] = {}
    for number in range(1, count + 1):
        generator = torch.Generator().manual_seed(1000 * seed + number)
        with torch.no_grad():
            vit.net.head.bias.copy_(bias + 3 * torch.randn(bias.shape, generator=generator))
        vit.save(folder / str(number))
        answers[str(number)] = [(best.index, best.score) for [best] in vit.predict(list(images), top=1)]
    return answers


@contextmanager
def serve_models(folder: Path, options: Sequence[str]) -> Iterator[tuple[int, int, list[int]]]:
    """Serve the models of a folder; yields the port, the process id and a list that receives the exit status."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vitrail", "serve", "--models", str(folder), "--port", str(port), *options]
    command += ["--admin-token", TOKEN_VARIABLE]
    ended: list[int] = []
    process = subprocess.Popen(command, env={**os.environ, TOKEN_VARIABLE: TOKEN}, stdout=subprocess.DEVNULL)
    try:
        _wait_until_ready(port)
        yield port, process.pid, ended
    finally:
        process.terminate()
        ended.append(process.wait(60))


def _wait_until_ready(port: int) -> None:
    until = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the server did not become ready.")


def call(port: int, path: str, method: str = "GET") -> Any:
    """JSON of a route, called with the token of operators."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers, method=method)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        return json.load(response)
