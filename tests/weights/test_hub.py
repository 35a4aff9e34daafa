"""The hub client against a local HTTP server: the requests it sends, the files it fetches, and its errors."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import torch
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http, enable_progress_bars
from safetensors.torch import save

from vitrail.errors import CheckpointError, NotFoundError
from vitrail.weights import hub
from vitrail.weights.archive import open_archive
from vitrail.weights.hub import ProgressBar, fetch, files_to_download, parse_hub_id

REPO = "timm/vit_small"
COMMITS = {"main": "a" * 40, "v2": "b" * 40}
WEIGHTS = save({"head.weight": torch.arange(3000.0)})
NEWER = save({"head.weight": torch.zeros(3000)})
FILES = {
    "config.json": b'{"architecture": "vit_small_patch16_224"}',
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"must not be fetched",
    "tf_model.h5": b"must not be fetched",
    "tokenizer.json": b"{}",
    "README.md": b"# A model",
}


@dataclass
class FakeHub:
    """State of the fake hub: its files, the faults to simulate, and the requests received."""

    url: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=lambda: {c: dict(FILES) for c in COMMITS.values()})
    commits: dict[str, str] = field(default_factory=lambda: dict(COMMITS))
    requests: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    token: str | None = None
    gated: bool = False
    error_status: int | None = None
    truncate_at: int | None = None
    corrupt: bool = False

    def downloaded(self) -> set[str]:
        return {line.rsplit("/", 1)[-1] for line in self.requests if line.startswith("GET") and "/resolve/" in line}


class HubHandler(BaseHTTPRequestHandler):
    """The endpoints of the hub that a download uses."""

    hub: FakeHub

    def do_HEAD(self) -> None:
        self.respond()

    def do_GET(self) -> None:
        self.respond()

    def log_message(self, *_: Any) -> None:
        pass

    def respond(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        authorization = self.headers.get("authorization")
        self.hub.tokens.add(authorization)
        if self.hub.error_status:
            return self.send_reply(self.hub.error_status)
        if REPO not in path:
            return self.send_reply(401, code="RepoNotFound")  # the real hub's response without a token
        if self.hub.token and authorization != f"Bearer {self.hub.token}":
            return self.send_reply(401, code="GatedRepo" if self.hub.gated else "RepoNotFound")
        before, _, after = path.partition(REPO)
        kind, _, rest = after.strip("/").partition("/")
        name = {"": "main", "revision": rest}.get(kind, rest.split("/")[0])
        commit = self.hub.commits.get(name, name)
        if commit not in self.hub.files:
            return self.send_reply(404, code="RevisionNotFound")
        if before == "/api/models/":
            return self.send_listing(commit, tree=kind == "tree")
        return self.send_file(commit, rest.split("/", 1)[1])

    def send_listing(self, commit: str, tree: bool) -> None:
        files = self.hub.files[commit]
        if tree:
            listing: Any = [self.describe(n, data) for n, data in files.items()]
        else:
            listing = {"id": REPO, "sha": commit, "siblings": [{"rfilename": n} for n in files]}
        self.send_reply(200, json.dumps(listing).encode(), {"Content-Type": "application/json"})

    def describe(self, name: str, data: bytes) -> dict[str, Any]:
        entry = {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        if name.endswith(".safetensors"):
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        return entry

    def send_file(self, commit: str, name: str) -> None:
        data = self.hub.files[commit][name]
        large = name.endswith(".safetensors")
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


@pytest.fixture
def server() -> Iterator[FakeHub]:
    state = FakeHub()
    handler = type("Bound", (HubHandler,), {"hub": state})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http_server:
        state.url = f"http://127.0.0.1:{http_server.server_address[1]}"
        thread = threading.Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield state
        http_server.shutdown()
        thread.join()


@pytest.fixture
def cache(server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Points huggingface_hub at the fake hub, with an empty cache and no delay between retries."""
    cache = tmp_path / "cache"
    for name, value in {
        "ENDPOINT": server.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": False,
        "HF_TOKEN_PATH": str(tmp_path / "token"),
    }.items():
        monkeypatch.setattr(constants, name, value)
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for module in (file_download, _http):
        monkeypatch.setattr(module.time, "sleep", lambda _: None)
    return cache


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k", ("timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k", None)),
        ("google/vit-base-patch16-224", ("google/vit-base-patch16-224", None)),
        ("facebook/dinov2-base@main", ("facebook/dinov2-base", "main")),
        ("user/model@refs/pr/3", ("user/model", "refs/pr/3")),
        ("hf-hub:user/model@abc", ("user/model", "abc")),
        ("hf_hub:user/model", ("user/model", None)),
        ("hf://user/model", ("user/model", None)),
        ("https://huggingface.co/user/model", ("user/model", None)),
        ("https://huggingface.co/user/model/tree/v2", ("user/model", "v2")),
        ("model", None),
        ("a/b/c", None),
        ("user/", None),
        ("./model", None),
        ("../up", None),
        ("user/a..b", None),
        ("user/a--b", None),
        ("folder/model.safetensors@", None),
    ],
)
def test_hub_ids_are_parsed(name: str, expected: tuple[str, str | None] | None):
    assert parse_hub_id(name) == expected


def test_files_to_download_has_one_set_of_weights():
    assert files_to_download(FILES, REPO) == ["model.safetensors", "config.json"]
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    sharded = [*shards, "model.safetensors.index.json", "pytorch_model.bin", "preprocessor_config.json", "logo.png"]
    assert set(files_to_download(sharded, REPO)) == {
        *shards,
        "model.safetensors.index.json",
        "preprocessor_config.json",
    }
    pickled = ["pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json", "flax_model.msgpack"]
    assert set(files_to_download(pickled, REPO)) == set(pickled[:2])
    with pytest.raises(NotFoundError, match=r"no weights .* in timm/vit_small, which contains tf_model\.h5"):
        files_to_download(["tf_model.h5"], REPO)
    with pytest.raises(CheckpointError, match=r"timm/vit_small: several files .*a\.pth, b\.pth"):
        files_to_download(["a.pth", "b.pth"], REPO)


def test_repository_is_fetched_and_opened(server: FakeHub, cache: Path):
    folder = fetch(REPO)
    assert folder.is_relative_to(cache)
    assert server.downloaded() == {"model.safetensors", "config.json"}
    archive = open_archive(folder)
    assert torch.equal(archive.tensors["head.weight"], torch.arange(3000.0))
    assert archive.sidecars["config.json"]["architecture"] == "vit_small_patch16_224"


def test_second_fetch_sends_no_requests(server: FakeHub, cache: Path):
    first = fetch(REPO)
    server.requests.clear()
    assert fetch(f"hf-hub:{REPO}@main") == first
    assert server.requests == []


def test_update_follows_the_branch(server: FakeHub, cache: Path):
    first = fetch(REPO)
    server.commits["main"] = "c" * 40
    server.files["c" * 40] = {**FILES, "model.safetensors": NEWER}
    assert fetch(REPO) == first
    second = fetch(REPO, update=True)
    assert second.name == "c" * 40
    assert open_archive(second).tensors["head.weight"].sum() == 0
    assert fetch(REPO) == second


def test_a_revision_is_fetched_by_branch_or_commit(server: FakeHub, cache: Path):
    assert fetch(f"{REPO}@v2").name == "b" * 40
    server.requests.clear()
    assert fetch(REPO, revision="b" * 40).name == "b" * 40
    assert server.requests == []
    with pytest.raises(NotFoundError, match="'v2', but revision='main' was passed too"):
        fetch(f"{REPO}@v2", revision="main")
    with pytest.raises(NotFoundError, match="timm/vit_small has no revision 'v3'"):
        fetch(f"{REPO}@v3")


def test_offline_mode_uses_the_cache_and_reports_missing_files(
    server: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    first = fetch(REPO)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    server.requests.clear()
    assert fetch(REPO) == fetch(REPO, update=True) == first
    with pytest.raises(
        NotFoundError, match=rf"user/other is missing or incomplete in the cache {cache}.*HF_HUB_OFFLINE prevents"
    ):
        fetch("user/other")
    (first / "model.safetensors").unlink()
    with pytest.raises(NotFoundError, match="missing or incomplete"):
        fetch(REPO)
    assert server.requests == []


def fill_cache(cache: Path, names: tuple[str, ...]) -> Path:
    """Fills the cache as other programs do, without a list of the repository's files."""
    repo_folder = cache / "models--timm--vit_small"
    folder = repo_folder / "snapshots" / COMMITS["main"]
    folder.mkdir(parents=True)
    (repo_folder / "refs").mkdir()
    (repo_folder / "refs" / "main").write_text(COMMITS["main"])
    for name in names:
        (folder / name).write_bytes(FILES[name])
    return folder


def test_incomplete_cache_of_another_program_is_completed(server: FakeHub, cache: Path):
    folder = fill_cache(cache, ("model.safetensors",))
    assert fetch(REPO) == folder
    assert server.downloaded() == {"config.json"}


@pytest.mark.parametrize("fault", ["offline", "no network", "server error"])
def test_incomplete_cache_is_used_when_the_hub_is_unavailable(
    server: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch, fault: str
):
    folder = fill_cache(cache, ("model.safetensors",))
    if fault == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif fault == "no network":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    else:
        server.error_status = 503
    assert fetch(REPO) == folder


def test_cache_without_weights_is_not_used(server: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch):
    fill_cache(cache, ("config.json",))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(NotFoundError, match="missing or incomplete"):
        fetch(REPO)


def test_connection_failure_is_a_one_sentence_error(server: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        CheckpointError, match=r"could not download .* from http://127\.0\.0\.1:9 .*check the connection"
    ):
        fetch(REPO)


def test_server_error_of_the_hub_is_a_one_sentence_error(server: FakeHub, cache: Path):
    server.error_status = 503
    with pytest.raises(CheckpointError, match=r"returned status 503 for timm/vit_small; try again later"):
        fetch(REPO)


def test_unknown_repository_is_a_one_sentence_error(server: FakeHub, cache: Path):
    with pytest.raises(
        NotFoundError, match=r"no public repository user/nothing at http.*check the name, or provide a token.*HF_TOKEN"
    ):
        fetch("user/nothing")
    with pytest.raises(NotFoundError, match="'nothing' is not a hub id; expected user/model"):
        fetch("nothing")


def test_gated_repository_error_mentions_its_terms(server: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch):
    server.token, server.gated = "hf_right", True
    with pytest.raises(NotFoundError, match=rf"gated: accept its terms at {server.url}/{REPO}, and provide a token"):
        fetch(REPO)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert open_archive(fetch(REPO)).shape("head.weight") == (3000,)
    assert "Bearer hf_right" in server.tokens


def test_interrupted_download_leaves_no_weights(server: FakeHub, cache: Path):
    server.truncate_at = 500
    with pytest.raises(CheckpointError, match=r"could not (download|store) timm/vit_small"):
        fetch(REPO)
    assert not list(cache.rglob("model.safetensors"))
    server.truncate_at = None
    assert open_archive(fetch(REPO)).shape("head.weight") == (3000,)


def test_corrupted_download_is_discarded(server: FakeHub, cache: Path):
    server.corrupt = True
    with pytest.raises(CheckpointError, match=r"model\.safetensors of timm/vit_small was damaged .*try again"):
        fetch(REPO)
    server.corrupt = False
    assert torch.equal(open_archive(fetch(REPO)).tensors["head.weight"], torch.arange(3000.0))


def test_unrelated_exceptions_propagate_unchanged(server: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(hub, "_download", fail)
    with pytest.raises(ZeroDivisionError):
        fetch(REPO)


def test_environment_variables_configure_a_fresh_process(server: FakeHub, tmp_path: Path):
    """HF_ENDPOINT, HF_HOME and HF_TOKEN are honored, and no progress bar is written to a log."""
    server.token = "hf_right"
    environment = {n: v for n, v in os.environ.items() if not n.startswith(("HF_", "HUGGING"))} | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(tmp_path),
        "HF_TOKEN": "hf_right",
        "NO_PROXY": "127.0.0.1",
    }
    code = f"from vitrail.weights.hub import fetch; print(fetch({REPO!r}))"
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert process.stderr == ""
    assert Path(process.stdout.strip()) == tmp_path / "hub" / "models--timm--vit_small" / "snapshots" / COMMITS["main"]


def test_progress_bar_is_drawn_only_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    enable_progress_bars()  # another library may have disabled them in this process
    for stream, drawn in ((Terminal(), True), (io.StringIO(), False)):
        with ProgressBar(total=1, file=stream) as bar:
            bar.update(1)
        assert bool(stream.getvalue()) is drawn
