"""Fixtures: small images, folders and shards of them, and a configurable HTTP server."""

from __future__ import annotations

import io
import logging
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
from http_server import QuietHandler, run_http_server
from images import encoded
from PIL import Image

from vitrail import runtime


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, so that the user's own cache does not affect a test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("VITRAIL_DATA", str(folder))
    monkeypatch.setattr("vitrail.data.sources.data_cache.SYSTEM_DIR", tmp_path / "usr-share-datasets")
    monkeypatch.setattr(runtime.notes, "_logged", set())
    logging.getLogger("vitrail").setLevel(logging.CRITICAL)
    return folder


@pytest.fixture
def logged_notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The notes that open_data logs."""
    notes: list[str] = []
    monkeypatch.setattr("vitrail.data.sources.source_factory.warn_once", lambda given, about="": notes.extend(given))
    return notes


MakePng = Callable[[int], bytes]


@pytest.fixture(scope="session")
def png_bytes() -> MakePng:
    """`png_bytes(seed)`: a random image as PNG."""

    def make(seed: int, side: int = 6) -> bytes:
        pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
        return encoded(Image.fromarray(pixels), "PNG")

    return make


@pytest.fixture
def make_folder(tmp_path: Path, png_bytes: MakePng) -> Callable[..., Path]:
    """`make_folder("photos", {"cat": 3, "dog": 2})`: a folder of class folders; keys may have slashes."""
    counter = iter(range(10**6))

    def make(name: str, classes: Mapping[str, int]) -> Path:
        root = tmp_path / name
        for folder, count in classes.items():
            (root / folder).mkdir(parents=True, exist_ok=True)
            for i in range(count):
                (root / folder / f"{i:03d}.png").write_bytes(png_bytes(next(counter)))
        root.mkdir(exist_ok=True)
        return root

    return make


Members = list[tuple[str, bytes]]


def tar_bytes(members: Members, **options: Any) -> bytes:
    """The bytes of a tar file, made by Python's own tarfile."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", **options) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


@pytest.fixture(scope="session")
def make_tar() -> Callable[..., bytes]:
    return tar_bytes


@pytest.fixture
def shards(tmp_path: Path, png_bytes: MakePng) -> Callable[..., Path]:
    """`shards("web", 3, 4)`: a folder with 3 shards of 4 samples each, labeled 0, 1, 2, 0, ... in `.cls` files."""

    def make(name: str, count: int, each: int, prefix: str = "train", classes: int = 3) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        for s in range(count):
            members: Members = []
            for i in range(each):
                number = s * each + i
                members += [(f"{number:06d}.png", png_bytes(number)), (f"{number:06d}.cls", b"%d" % (number % classes))]
            (folder / f"{prefix}-{s:03d}.tar").write_bytes(tar_bytes(members))
        return folder

    return make


@dataclass
class FakeServer:
    """The files of the server, its behavior, and the requests it received."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    etag: str = "one"
    break_after: list[int] = field(default_factory=list)
    """For each of the next responses, the number of bytes after which the connection is closed."""
    failures: list[int] = field(default_factory=list)
    """Error statuses of the next responses; 0: no error."""
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """Method, path, range."""
    sent: int = 0
    """Bytes of files sent."""


class RequestHandler(QuietHandler):
    served: FakeServer

    def respond(self) -> None:
        path = unquote(urlsplit(self.path).path).lstrip("/")
        expected = self.headers.get("Range")
        self.served.requests.append((self.command, path, expected))
        if self.command == "GET" and self.served.failures and (status := self.served.failures.pop(0)):
            return self.send_error(status)
        if path not in self.served.files:
            return self.send_error(404)
        data = self.served.files[path]
        status, headers = 200, {"ETag": f'"{self.served.etag}"'}
        if self.served.ranges and expected and (match := re.fullmatch(r"bytes=(\d+)-(\d*)", expected)):
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
            self.served.sent += len(data)  # before the client can read it
            try:
                self.wfile.write(data)
            except ConnectionError:  # the client closed the connection
                self.served.sent -= len(data)
                self.close_connection = True
        return None


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    served = FakeServer()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("vitrail.data.sources.remote.RETRY_DELAY_S", 0.001)
    with run_http_server(type("Bound", (RequestHandler,), {"served": served})) as served.url:
        yield served
