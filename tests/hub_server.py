"""A local HTTP server in place of the Hugging Face hub, with one repository and faults to simulate."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from http_server import QuietHandler, run_http_server
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http

LARGE = (".safetensors", ".parquet")


@dataclass
class FakeHub:
    """State of the fake hub: its repository, the faults to simulate, and the requests received."""

    kind: str
    """`model` or `dataset`."""
    name: str
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Commit -> the contents of its files."""
    commits: dict[str, str] = field(default_factory=dict)
    """Branch -> commit."""
    url: str = ""
    requests: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    token: str | None = None
    gated: bool = False
    error_status: int | None = None
    error_code: str = ""
    truncate_at: int | None = None
    corrupt: bool = False

    @property
    def path(self) -> str:
        return f"datasets/{self.name}" if self.kind == "dataset" else self.name

    def downloaded(self) -> set[str]:
        gets = (line.partition("/resolve/")[2] for line in self.requests if line.startswith("GET"))
        return {line.split("/", 1)[1] for line in gets if line}


class HubHandler(QuietHandler):
    """The endpoints of the hub that a download uses."""

    hub: FakeHub

    def respond(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        authorization = self.headers.get("authorization")
        self.hub.tokens.add(authorization)
        if self.hub.error_status:
            return self.send_reply(self.hub.error_status, code=self.hub.error_code)
        api = f"/api/{self.hub.kind}s/{self.hub.name}"
        if not path.startswith((api, f"/{self.hub.path}/")):
            return self.send_reply(401, code="RepoNotFound")  # the real hub's response without a token
        if self.hub.token and authorization != f"Bearer {self.hub.token}":
            return self.send_reply(401, code="GatedRepo" if self.hub.gated else "RepoNotFound")
        kind, _, rest = path.partition(self.hub.name)[2].strip("/").partition("/")
        found = self.split_revision(rest)
        if found is None:
            return self.send_reply(404, code="RevisionNotFound")
        commit, file = found
        if path.startswith(api):
            return self.send_listing(commit, tree=kind == "tree")
        return self.send_file(commit, file)

    def split_revision(self, path: str) -> tuple[str, str] | None:
        """`refs/convert/parquet/a/b.txt` -> the commit of that branch, and a/b.txt."""
        if not path:
            return self.hub.commits["main"], ""
        for name in sorted({*self.hub.commits, *self.hub.files}, key=len, reverse=True):
            if path == name or path.startswith(f"{name}/"):
                return self.hub.commits.get(name, name), path[len(name) :].strip("/")
        return None

    def send_listing(self, commit: str, tree: bool) -> None:
        files = self.hub.files[commit]
        if tree:
            listing: Any = [self.describe(n, data) for n, data in files.items()]
        else:
            listing = {"id": self.hub.name, "sha": commit, "siblings": [{"rfilename": n} for n in files]}
        self.send_reply(200, json.dumps(listing).encode(), {"Content-Type": "application/json"})

    def describe(self, name: str, data: bytes) -> dict[str, Any]:
        entry = {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        if name.endswith(LARGE):
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        return entry

    def send_file(self, commit: str, name: str) -> None:
        if name not in self.hub.files[commit]:
            return self.send_reply(404, code="EntryNotFound")
        data = self.hub.files[commit][name]
        large = name.endswith(LARGE)
        etag = (hashlib.sha256 if large else hashlib.sha1)(data).hexdigest()
        if large and self.hub.corrupt:
            data = data[:-1] + bytes([data[-1] ^ 1])
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        self.send_reply(200, data, headers, stop=self.hub.truncate_at if large else None)

    def send_reply(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None, **options: Any) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        if options.get("code"):
            self.send_header("X-Error-Code", options["code"])
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: options.get("stop")])
            self.close_connection = options.get("stop") is not None


@contextmanager
def serve(hub: FakeHub) -> Iterator[FakeHub]:
    """Run the server; `hub.url` is its address."""
    with run_http_server(type("Bound", (HubHandler,), {"hub": hub})) as hub.url:
        yield hub


def use_hub(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Point huggingface_hub at the fake hub, with an empty cache and no delay between retries; returns the cache."""
    cache = folder / "hub"
    for name, value in {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": False,
        "HF_TOKEN_PATH": str(folder / "token"),
    }.items():
        monkeypatch.setattr(constants, name, value)
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for module in (file_download, _http):
        monkeypatch.setattr(module.time, "sleep", lambda _: None)
    return cache


def fill_cache(cache: Path, hub: FakeHub, names: tuple[str, ...], commit: str) -> Path:
    """Fill the cache as other programs do, without a list of the repository's files; returns the snapshot's folder."""
    home = cache / f"{hub.kind}s--{hub.name.replace('/', '--')}"
    folder = home / "snapshots" / commit
    (home / "refs").mkdir(parents=True, exist_ok=True)
    (home / "refs" / "main").write_text(commit)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(hub.files[commit][name])
    return folder
