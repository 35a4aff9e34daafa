"""The hub, imitated by a real server on this machine: what is asked of it, and what its answers become."""

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
class Hub:
    """What the server has, how it misbehaves, and what it was asked."""

    url: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=lambda: {c: dict(FILES) for c in COMMITS.values()})
    commits: dict[str, str] = field(default_factory=lambda: dict(COMMITS))
    asked: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    token: str | None = None
    gated: bool = False
    broken: int | None = None
    cut: int | None = None
    flip: bool = False

    def downloaded(self) -> set[str]:
        return {line.rsplit("/", 1)[-1] for line in self.asked if line.startswith("GET") and "/resolve/" in line}


class Answer(BaseHTTPRequestHandler):
    """The few endpoints that a download needs."""

    hub: Hub

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        given = self.headers.get("authorization")
        self.hub.tokens.add(given)
        if self.hub.broken:
            return self.say(self.hub.broken)
        if REPO not in path:
            return self.say(401, code="RepoNotFound")  # as the real one answers those without a token
        if self.hub.token and given != f"Bearer {self.hub.token}":
            return self.say(401, code="GatedRepo" if self.hub.gated else "RepoNotFound")
        before, _, after = path.partition(REPO)
        kind, _, rest = after.strip("/").partition("/")
        name = {"": "main", "revision": rest}.get(kind, rest.split("/")[0])
        commit = self.hub.commits.get(name, name)
        if commit not in self.hub.files:
            return self.say(404, code="RevisionNotFound")
        if before == "/api/models/":
            return self.list(commit, tree=kind == "tree")
        return self.file(commit, rest.split("/", 1)[1])

    def list(self, commit: str, tree: bool) -> None:
        files = self.hub.files[commit]
        if tree:
            listing: Any = [self.describe(n, data) for n, data in files.items()]
        else:
            listing = {"id": REPO, "sha": commit, "siblings": [{"rfilename": n} for n in files]}
        self.say(200, json.dumps(listing).encode(), {"Content-Type": "application/json"})

    def describe(self, name: str, data: bytes) -> dict[str, Any]:
        found = {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        if name.endswith(".safetensors"):
            found["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        return found

    def file(self, commit: str, name: str) -> None:
        data = self.hub.files[commit][name]
        large = name.endswith(".safetensors")
        etag = (hashlib.sha256 if large else hashlib.sha1)(data).hexdigest()
        if large and self.hub.flip:
            data = data[:-1] + bytes([data[-1] ^ 1])
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        self.say(200, data, headers, stop=self.hub.cut if large else None)

    def say(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None, **how: Any) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        if how.get("code"):
            self.send_header("X-Error-Code", how["code"])
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: how.get("stop")])
            self.close_connection = how.get("stop") is not None


@pytest.fixture
def server() -> Iterator[Hub]:
    state = Hub()
    handler = type("Bound", (Answer,), {"hub": state})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        state.url = f"http://127.0.0.1:{listening.server_address[1]}"
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield state
        listening.shutdown()
        thread.join()


@pytest.fixture
def cache(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """huggingface_hub turned to the imitation, with an empty cache and no waiting between tries."""
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
    for part in (file_download, _http):
        monkeypatch.setattr(part.time, "sleep", lambda _: None)
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
def test_names_of_repositories(name: str, expected: tuple[str, str | None] | None):
    assert parse_hub_id(name) == expected


def test_one_set_of_weights_is_expected():
    assert files_to_download(FILES, REPO) == ["model.safetensors", "config.json"]
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    both = [*shards, "model.safetensors.index.json", "pytorch_model.bin", "preprocessor_config.json", "logo.png"]
    assert set(files_to_download(both, REPO)) == {*shards, "model.safetensors.index.json", "preprocessor_config.json"}
    old = ["pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json", "flax_model.msgpack"]
    assert set(files_to_download(old, REPO)) == set(old[:2])
    with pytest.raises(NotFoundError, match=r"no weights .* in timm/vit_small, which contains tf_model\.h5"):
        files_to_download(["tf_model.h5"], REPO)
    with pytest.raises(CheckpointError, match=r"timm/vit_small: several files .*a\.pth, b\.pth"):
        files_to_download(["a.pth", "b.pth"], REPO)


def test_a_repository_is_fetched_and_opens(server: Hub, cache: Path):
    folder = fetch(REPO)
    assert folder.is_relative_to(cache)
    assert server.downloaded() == {"model.safetensors", "config.json"}
    archive = open_archive(folder)
    assert torch.equal(archive.tensors["head.weight"], torch.arange(3000.0))
    assert archive.sidecars["config.json"]["architecture"] == "vit_small_patch16_224"


def test_the_second_time_nothing_is_asked(server: Hub, cache: Path):
    first = fetch(REPO)
    server.asked.clear()
    assert fetch(f"hf-hub:{REPO}@main") == first
    assert server.asked == []


def test_an_update_asks_and_follows_the_branch(server: Hub, cache: Path):
    first = fetch(REPO)
    server.commits["main"] = "c" * 40
    server.files["c" * 40] = {**FILES, "model.safetensors": NEWER}
    assert fetch(REPO) == first
    second = fetch(REPO, update=True)
    assert second.name == "c" * 40
    assert open_archive(second).tensors["head.weight"].sum() == 0
    assert fetch(REPO) == second


def test_a_revision_is_fetched_by_branch_or_commit(server: Hub, cache: Path):
    assert fetch(f"{REPO}@v2").name == "b" * 40
    server.asked.clear()
    assert fetch(REPO, revision="b" * 40).name == "b" * 40
    assert server.asked == []
    with pytest.raises(NotFoundError, match="'v2', but revision='main' was passed too"):
        fetch(f"{REPO}@v2", revision="main")
    with pytest.raises(NotFoundError, match="timm/vit_small has no revision 'v3'"):
        fetch(f"{REPO}@v3")


def test_offline_uses_the_cache_and_says_what_it_lacks(server: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch):
    first = fetch(REPO)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    server.asked.clear()
    assert fetch(REPO) == fetch(REPO, update=True) == first
    with pytest.raises(
        NotFoundError, match=rf"user/other is missing or incomplete in the cache {cache}.*HF_HUB_OFFLINE prevents"
    ):
        fetch("user/other")
    (first / "model.safetensors").unlink()
    with pytest.raises(NotFoundError, match="missing or incomplete"):
        fetch(REPO)
    assert server.asked == []


def by_hand(cache: Path, names: tuple[str, ...]) -> Path:
    """A cache as other programs leave it: without a list of what the repository holds."""
    home = cache / "models--timm--vit_small"
    folder = home / "snapshots" / COMMITS["main"]
    folder.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(COMMITS["main"])
    for name in names:
        (folder / name).write_bytes(FILES[name])
    return folder


def test_what_another_program_cached_is_completed(server: Hub, cache: Path):
    folder = by_hand(cache, ("model.safetensors",))
    assert fetch(REPO) == folder
    assert server.downloaded() == {"config.json"}


@pytest.mark.parametrize("trouble", ["offline", "no network", "out of order"])
def test_what_another_program_cached_serves_when_the_hub_does_not(
    server: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
):
    folder = by_hand(cache, ("model.safetensors",))
    if trouble == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif trouble == "no network":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    else:
        server.broken = 503
    assert fetch(REPO) == folder


def test_a_cache_without_weights_does_not_serve(server: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch):
    by_hand(cache, ("config.json",))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(NotFoundError, match="missing or incomplete"):
        fetch(REPO)


def test_no_network_is_one_sentence(server: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        CheckpointError, match=r"could not download .* from http://127\.0\.0\.1:9 .*check the connection"
    ):
        fetch(REPO)


def test_a_hub_out_of_order_is_one_sentence(server: Hub, cache: Path):
    server.broken = 503
    with pytest.raises(CheckpointError, match=r"returned status 503 for timm/vit_small; try again later"):
        fetch(REPO)


def test_an_unknown_repository_is_one_sentence(server: Hub, cache: Path):
    with pytest.raises(
        NotFoundError, match=r"no public repository user/nothing at http.*check the name, or provide a token.*HF_TOKEN"
    ):
        fetch("user/nothing")
    with pytest.raises(NotFoundError, match="'nothing' is not a hub id; expected user/model"):
        fetch("nothing")


def test_a_gated_repository_wants_its_terms_accepted(server: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch):
    server.token, server.gated = "hf_right", True
    with pytest.raises(NotFoundError, match=rf"gated: accept its terms at {server.url}/{REPO}, and provide a token"):
        fetch(REPO)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert open_archive(fetch(REPO)).shape("head.weight") == (3000,)
    assert "Bearer hf_right" in server.tokens


def test_a_transfer_that_breaks_off_leaves_no_weights(server: Hub, cache: Path):
    server.cut = 500
    with pytest.raises(CheckpointError, match=r"could not (download|store) timm/vit_small"):
        fetch(REPO)
    assert not list(cache.rglob("model.safetensors"))
    server.cut = None
    assert open_archive(fetch(REPO)).shape("head.weight") == (3000,)


def test_a_transfer_that_was_damaged_is_thrown_away(server: Hub, cache: Path):
    server.flip = True
    with pytest.raises(CheckpointError, match=r"model\.safetensors of timm/vit_small was damaged .*try again"):
        fetch(REPO)
    server.flip = False
    assert torch.equal(open_archive(fetch(REPO)).tensors["head.weight"], torch.arange(3000.0))


def test_errors_that_are_not_the_hubs_stay_themselves(server: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch):
    def fails(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(hub, "_download", fails)
    with pytest.raises(ZeroDivisionError):
        fetch(REPO)


def test_the_environment_alone_is_enough_and_nobody_is_disturbed(server: Hub, tmp_path: Path):
    """In a fresh process: HF_ENDPOINT, HF_HOME and HF_TOKEN are honored, and no bar is drawn into a log."""
    server.token = "hf_right"
    environment = {n: v for n, v in os.environ.items() if not n.startswith(("HF_", "HUGGING"))} | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(tmp_path),
        "HF_TOKEN": "hf_right",
        "NO_PROXY": "127.0.0.1",
    }
    code = f"from vitrail.weights.hub import fetch; print(fetch({REPO!r}))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert Path(done.stdout.strip()) == tmp_path / "hub" / "models--timm--vit_small" / "snapshots" / COMMITS["main"]


def test_the_bar_is_drawn_on_a_terminal_alone():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    enable_progress_bars()  # another library may have switched them off in this process
    for stream, drawn in ((Terminal(), True), (io.StringIO(), False)):
        with ProgressBar(total=1, file=stream) as bar:
            bar.update(1)
        assert bool(stream.getvalue()) is drawn
