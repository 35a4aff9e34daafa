"""Small images, the folders and shards people keep them in, and a server that behaves as it is told."""

from __future__ import annotations

import io
import logging
import re
import tarfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
from images import encoded
from PIL import Image

from vitrail import runtime


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache: what lies in somebody's own must not decide a test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("VITRAIL_DATA", str(folder))
    monkeypatch.setattr("vitrail.data.sources.data_cache.SYSTEM_DIR", tmp_path / "usr-share-datasets")
    monkeypatch.setattr(runtime, "_logged", set())
    logging.getLogger("vitrail").setLevel(logging.CRITICAL)
    return folder


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said aloud."""
    notes: list[str] = []
    monkeypatch.setattr("vitrail.data.sources.source_factory.say", lambda given, about="": notes.extend(given))
    return notes


Draw = Callable[[int], bytes]


@pytest.fixture(scope="session")
def draw() -> Draw:
    """An image of its own for each number, as the bytes of a PNG."""

    def make(seed: int, side: int = 6) -> bytes:
        pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
        return encoded(Image.fromarray(pixels), "PNG")

    return make


@pytest.fixture
def plant(tmp_path: Path, draw: Draw) -> Callable[..., Path]:
    """`plant("photos", {"cat": 3, "dog": 2})`: a folder of class folders; keys may have slashes."""
    counter = iter(range(10**6))

    def make(name: str, classes: Mapping[str, int]) -> Path:
        root = tmp_path / name
        for folder, count in classes.items():
            (root / folder).mkdir(parents=True, exist_ok=True)
            for i in range(count):
                (root / folder / f"{i:03d}.png").write_bytes(draw(next(counter)))
        root.mkdir(exist_ok=True)
        return root

    return make


Members = list[tuple[str, bytes]]


def pack(members: Members, **options: Any) -> bytes:
    """The bytes of a tar file, made by Python's own tarfile."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", **options) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


@pytest.fixture(scope="session")
def tar_of() -> Callable[..., bytes]:
    return pack


@pytest.fixture
def shards(tmp_path: Path, draw: Draw) -> Callable[..., Path]:
    """`shards("web", 3, 4)`: a folder with 3 shards of 4 samples each, labeled 0, 1, 2, 0, ... in `.cls` files."""

    def make(name: str, count: int, each: int, prefix: str = "train", classes: int = 3) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        for s in range(count):
            members: Members = []
            for i in range(each):
                number = s * each + i
                members += [(f"{number:06d}.png", draw(number)), (f"{number:06d}.cls", b"%d" % (number % classes))]
            (folder / f"{prefix}-{s:03d}.tar").write_bytes(pack(members))
        return folder

    return make


@dataclass
class Served:
    """What the server has, how it behaves, and what it was asked."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    etag: str = "one"
    break_after: list[int] = field(default_factory=list)
    """Bytes after which the next answers break off, one number for each."""
    failures: list[int] = field(default_factory=list)
    """Statuses of the next answers, 0 for none, before it behaves."""
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    """Method, path, range."""
    sent: int = 0
    """Bytes of files."""


class Answer(BaseHTTPRequestHandler):
    served: Served

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path).lstrip("/")
        wanted = self.headers.get("Range")
        self.served.asked.append((self.command, path, wanted))
        if self.command == "GET" and self.served.failures and (status := self.served.failures.pop(0)):
            return self.send_error(status)
        if path not in self.served.files:
            return self.send_error(404)
        data = self.served.files[path]
        status, headers = 200, {"ETag": f'"{self.served.etag}"'}
        if self.served.ranges and wanted and (match := re.fullmatch(r"bytes=(\d+)-(\d*)", wanted)):
            start, end = int(match[1]), int(match[2] or len(data) - 1)
            if start >= len(data):
                return self.send_error(416)
            headers["Content-Range"] = f"bytes {start}-{min(end, len(data) - 1)}/{len(data)}"
            status, data = 206, data[start : end + 1]
        headers |= {"Accept-Ranges": "bytes"} if self.served.ranges else {}
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            if self.served.break_after:
                data = data[: self.served.break_after.pop(0)]
                self.close_connection = True
            self.served.sent += len(data)  # before: whoever has it all may look at once
            try:
                self.wfile.write(data)
            except ConnectionError:  # whoever asked has heard enough
                self.served.sent -= len(data)
                self.close_connection = True
        return None


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    served = Served()
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Answer,), {"served": served})) as listening:
        served.url = f"http://127.0.0.1:{listening.server_address[1]}"
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr("vitrail.data.sources.remote.RETRY_DELAY_S", 0.001)
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield served
        listening.shutdown()
        thread.join()
