"""Cost per request of tokens, limits, log and spans: three servers, with nothing, all but spans, and everything on.

    python benchmarks/access.py [MODEL] [--rounds 7] [--requests 1000] [--clients 8]

The servers run at the same time and are asked in turns: GET /v1/model, which computes nothing, and POST /v1/predict
with one small image. What counts is the CPU time of the server process per request, in microseconds, and the ratio of
the medians; latency on a shared machine says little. The second server has ten named tokens, a rate limit that is never
reached, a trusted proxy and an access log in a file; the third one also sends spans to a collector in this process.
Requests to both have a token, a traceparent and an X-Forwarded-For header. The extra `otel` is needed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import threading
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from attacks import request, saved
from PIL import Image

from vitrail.bench.serve_load import cpu_seconds, service

TOKEN = "token-number-7-of-ten"
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
HEADERS = f"Authorization: Bearer {TOKEN}\r\nX-Forwarded-For: 198.51.100.7\r\ntraceparent: {TRACEPARENT}\r\n"


class Collector(BaseHTTPRequestHandler):
    """Receives spans and drops them."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        pass


async def ask(port: int, data: bytes, count: int, clients: int) -> None:
    """Send a request this often, each client when it has its last response."""
    left = iter(range(count))

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in left:
            writer.write(data)
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]))
            assert head.startswith(b"HTTP/1.1 200"), head
        writer.close()

    await asyncio.gather(*(client() for _ in range(clients)))


def with_headers(data: bytes) -> bytes:
    return data.replace(b"Host: localhost\r\n", f"Host: localhost\r\n{HEADERS}".encode(), 1)


def microseconds(port: int, pid: int, data: bytes, count: int, clients: int) -> float:
    """CPU time of the server per request."""
    before = cpu_seconds(pid)
    asyncio.run(ask(port, data, count, clients))
    return 1e6 * (cpu_seconds(pid) - before) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("model", nargs="?", default="vitrail/cifar10")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=8)
    given = parser.parse_args()
    image = request(saved(Image.effect_noise((32, 32), 60).convert("RGB"), "JPEG"), "image/jpeg")
    asked = {"GET /v1/model": b"GET /v1/model HTTP/1.1\r\nHost: localhost\r\n\r\n", "POST /v1/predict": image}
    collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens"
        tokens.write_text("".join(f"client-{n}: token-number-{n}-of-ten\n" for n in range(10)))
        on = ["--tokens", str(tokens), "--access-log", f"{folder}/log", "--trusted-proxy", "127.0.0.1"]
        on += ["--rate-limit", "1000000/s:1000000"]
        with ExitStack() as stack:

            def start(*options: str) -> tuple[int, int]:
                return stack.enter_context(service(given.model, "torch", options))[:2]

            servers = {"off": start(), "no spans": start(*on)}
            os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{collector.server_port}"
            servers["on"] = start(*on)
            for name, data in asked.items():
                costs: dict[str, list[float]] = {side: [] for side in servers}
                for round_ in range(given.rounds + 1):  # the first one warms up
                    for side, (port, pid) in servers.items():
                        sent = data if side == "off" else with_headers(data)
                        cost = microseconds(port, pid, sent, given.requests, given.clients)
                        costs[side] += [cost] if round_ else []
                medians = {side: statistics.median(values) for side, values in costs.items()}
                print(f"{name}: {medians['off']:.0f} us with everything off", end="")
                for side in ("no spans", "on"):
                    ratio, more = medians[side] / medians["off"], medians[side] - medians["off"]
                    print(f"; {side}: {ratio:.2f} times that, {more:+.0f} us", end="")
                print(flush=True)
    collector.shutdown()


if __name__ == "__main__":
    main()
