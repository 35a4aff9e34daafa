"""Servers for tests, on loopback, and an engine that can be blocked."""

from __future__ import annotations

import io
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from conftest import import_peer, need_extra
from images import encoded
from small_models import gradient, model, small

import vitrail
from vitrail.engines.engine import TorchEngine

need_extra("serve")  # skips the tests that import this module
httpx = import_peer("httpx")

import uvicorn  # noqa: E402

from vitrail.serve.access import AccessConfig  # noqa: E402
from vitrail.serve.app import Service, create_app  # noqa: E402
from vitrail.serve.limits import BatchingConfig, Limits  # noqa: E402
from vitrail.serve.served_model import ServedModel  # noqa: E402
from vitrail.serve.server import uvicorn_config  # noqa: E402

JPEG = {"content-type": "image/jpeg"}
QUICK = BatchingConfig(batch_size=4, engine_threads=1, intra_op_threads=1, decode_threads=2)


class BlockingEngine(TorchEngine):
    """Runs a network while `go` is set, and records the batch sizes."""

    def __init__(self, vit: vitrail.Model) -> None:
        super().__init__(vit.net, vit.info)
        self.go = threading.Event()
        self.go.set()
        self.batches: list[int] = []

    def logits(self, pixels: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        self.batches.append(len(pixels))
        assert self.go.wait(20)
        return super().logits(pixels)


def served(vit: vitrail.Model | None = None) -> ServedModel:
    vit = vit or model(small())
    return ServedModel(BlockingEngine(vit), vit, name="small")


@contextmanager
def run_server(
    served_model: ServedModel,
    limits: Limits | None = None,
    batching: BatchingConfig = QUICK,
    token: str | None = None,
    hosts: tuple[str, ...] | None = None,
    access: AccessConfig | None = None,
) -> Iterator[tuple[httpx.Client, Service]]:
    """Run a server in a thread; yields a client and its `Service`."""
    app = create_app(served_model, limits, batching, token, hosts, access_config=access)
    server = uvicorn.Server(uvicorn_config(app, port=0))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        port = server.servers[0].sockets[0].getsockname()[1]
        wait_until(lambda: app.state.service.default.batcher.ready)
        if isinstance(served_model.engine, BlockingEngine):
            served_model.engine.batches.clear()
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            yield client, app.state.service
    finally:
        if isinstance(served_model.engine, BlockingEngine):
            served_model.engine.go.set()
        server.should_exit = True
        thread.join(20)
    assert not thread.is_alive()


def other_client(client: httpx.Client) -> httpx.Client:
    """A client with another IP address."""
    transport = httpx.HTTPTransport(local_address="127.0.0.2")
    return httpx.Client(base_url=client.base_url, timeout=20, transport=transport)


class BusyServer:
    """A server whose engine is blocked with one image in it."""

    def __init__(self, client: httpx.Client, service: Service, pool: ThreadPoolExecutor) -> None:
        self.client, self.service, self.pool = client, service, pool
        self.engine: BlockingEngine = service.default.served.engine  # type: ignore[assignment]
        self.engine.go.clear()
        self.first = self.send(0)
        wait_until(lambda: self.engine.batches == [1])

    def send(self, number: int = 0, path: str = "predict", **headers: str) -> Future[httpx.Response]:
        return self.pool.submit(self.client.post, f"/v1/{path}", content=photo(number), headers=JPEG | headers)

    def wait_until_queued(self, count: int) -> None:
        """Wait until `count` images are decoded and queued."""
        wait_until(lambda: len(self.service.default.batcher._image_queue) == count)


def wait_until(condition: Any, seconds: float = 20) -> None:
    """Wait until the condition is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.005)


def photo(number: int = 0, kind: str = "JPEG") -> bytes:
    return encoded(gradient(50 + 3 * number, 40 + number), kind)


def png_with_size(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG whose header states this size."""
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0),
        b"IDAT": zlib.compress(data),
        b"IEND": b"",
    }
    png = b"\x89PNG\r\n\x1a\n"
    for name, content in chunks.items():
        png += struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
    return png


def malicious_files() -> dict[str, bytes]:
    """Files that are not valid images, by name."""
    jpeg, png = photo(), photo(kind="PNG")
    random = np.random.default_rng(0)
    scans = io.BytesIO(photo())
    bomb = png_with_size(60_000, 60_000, bytes(1000))
    large_jpeg = bytearray(jpeg)
    frame_header = jpeg.index(b"\xff\xc0")
    large_jpeg[frame_header + 5 : frame_header + 9] = struct.pack(">HH", 65_000, 65_000)
    return {
        "random": random.bytes(3000),
        "text": b"hello, I am a text file",
        "html": b"<!DOCTYPE html><html>404",
        "svg": b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
        "address": b"http://127.0.0.1:1/cat.jpg",
        "path": b"/etc/passwd",
        "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n",
        "truncated": jpeg[: len(jpeg) // 2],
        "truncated png": png[: len(png) // 2],
        "only a header": jpeg[:20],
        "zeros": bytes(3000),
        "bomb": bomb,
        "jpeg bomb": bytes(large_jpeg),
        "empty scans": scans.getvalue()[: jpeg.index(b"\xff\xda")] + b"\xff\xda\0\x02" * 500,
        "tiff": b"II*\0\x08\0\0\0\0\0",
        "gif": b"GIF89a\x01",
        "heic": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(40),
    }
