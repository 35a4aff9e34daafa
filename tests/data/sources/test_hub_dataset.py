"""Datasets on the hub, with a local HTTP server in its place."""

from __future__ import annotations

import hashlib
import io
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http

from vitrail.config import DataConfig
from vitrail.data.sources import open_data, open_source_splits
from vitrail.data.sources.hub_dataset import PARQUET_BRANCH, Repository, parse_repository, select_files
from vitrail.errors import DataError, NotFoundError

REPO = "someone/animals"
MAIN, CONVERSION = "a" * 40, "c" * 40


@dataclass
class Hub:
    url: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    commits: dict[str, str] = field(default_factory=lambda: {"main": MAIN})
    asked: list[str] = field(default_factory=list)
    status: int = 0
    code: str = ""

    def downloaded(self) -> set[str]:
        return {line.split("/resolve/")[1].split("/", 1)[1] for line in self.asked if line.startswith("GET /datasets/")}


class RequestHandler(BaseHTTPRequestHandler):
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
        if self.hub.status:
            return self.say(self.hub.status, code=self.hub.code)
        if f"datasets/{REPO}" not in path:
            return self.say(401, code="RepoNotFound")
        before, _, after = path.partition(REPO)
        kind, _, rest = after.strip("/").partition("/")
        revision = rest
        for name in sorted({**self.hub.commits, **dict.fromkeys(self.hub.files)}, key=len, reverse=True):
            if revision == name or revision.startswith(f"{name}/"):
                rest = revision[len(name) :].strip("/")
                commit = self.hub.commits.get(name, name)
                break
        else:
            if revision:
                return self.say(404, code="RevisionNotFound")
            commit, rest = self.hub.commits["main"], ""
        if before.startswith("/api/"):
            return self.list(commit, tree=kind == "tree")
        if rest not in self.hub.files[commit]:
            return self.say(404, code="EntryNotFound")
        data = self.hub.files[commit][rest]
        etag = (hashlib.sha256 if rest.endswith("parquet") else hashlib.sha1)(data).hexdigest()
        return self.say(200, data, {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"})

    def list(self, commit: str, tree: bool) -> None:
        files = self.hub.files[commit]
        if tree:
            found: Any = []
            for name, data in files.items():
                one = {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                if name.endswith("parquet"):
                    one["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
                found.append(one)
        else:
            found = {"id": REPO, "sha": commit, "siblings": [{"rfilename": n} for n in files]}
        self.say(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

    def say(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None, code: str = "") -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[Hub]:
    """The local server, with huggingface_hub pointed at it, an empty cache and no delay between retries."""
    state = Hub()
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (RequestHandler,), {"hub": state})) as listening:
        state.url = f"http://127.0.0.1:{listening.server_address[1]}"
        for name, value in {
            "ENDPOINT": state.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": state.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_HUB_OFFLINE": False,
            "HF_TOKEN_PATH": str(tmp_path / "token"),
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        for part in (file_download, _http):
            monkeypatch.setattr(part.time, "sleep", lambda _: None)
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield state
        listening.shutdown()
        thread.join()


@pytest.fixture
def parquet(png_bytes):
    """The bytes of a Parquet file with images first..last, in the hub's layout."""

    def make(first: int, last: int, column: str = "image") -> bytes:
        images = [{"bytes": png_bytes(i), "path": None} for i in range(first, last)]
        table = pa.table({column: images, "label": [i % 2 for i in range(first, last)]})
        told = {"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}
        out = io.BytesIO()
        pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(told)}), out)
        return out.getvalue()

    return make


@pytest.fixture
def animals(hub, parquet):
    hub.files[MAIN] = {
        "README.md": b"# Animals",
        "data/train-00000-of-00002.parquet": parquet(0, 4),
        "data/train-00001-of-00002.parquet": parquet(4, 7),
        "data/test-00000-of-00001.parquet": parquet(10, 12),
        "notes.zip": b"must not be fetched",
    }
    return hub


def opened(spec, **settings):
    return open_source_splits(DataConfig(source=spec, **settings))


@pytest.mark.parametrize(
    "spec", [f"hf:{REPO}", f"hf:{REPO}@main", f"https://huggingface.co/datasets/{REPO}", f"hf:hf://datasets/{REPO}"]
)
def test_a_dataset_is_downloaded_and_opened(animals, png_bytes, spec):
    parts = opened(spec)
    assert animals.downloaded() == {n for n in animals.files[MAIN] if n != "notes.zip"}
    assert (len(parts.train), parts.validation, len(parts.test)) == (7, None, 2)
    assert parts.train.labels == ("cat", "dog")
    assert [parts.train[i].image for i in range(7)] == [png_bytes(i) for i in range(7)]
    assert parts.train.name == "animals/train"
    assert open_data(DataConfig(source=spec)).eval_split == "test"


def test_the_second_time_nothing_is_fetched_and_offline_it_still_opens(animals, monkeypatch):
    opened(f"hf:{REPO}")
    animals.asked.clear()
    assert len(opened(f"hf:{REPO}").train) == 7
    assert animals.asked == []
    animals.status = 503
    assert len(opened(f"hf:{REPO}").train) == 7
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert len(opened(f"hf:{REPO}").test) == 2


def test_a_cache_filled_by_another_program_is_used_if_complete(animals, tmp_path, monkeypatch):
    home = tmp_path / "hub" / "datasets--someone--animals"
    folder = home / "snapshots" / MAIN / "data"
    folder.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(MAIN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in ("train-00000-of-00002.parquet", "test-00000-of-00001.parquet"):
        (folder / name).write_bytes(animals.files[MAIN][f"data/{name}"])
    with pytest.raises(
        NotFoundError, match=r"has 1 of 2 files of someone/animals like data/train-00000-of-00002\.parquet"
    ):
        opened(f"hf:{REPO}")
    name = "train-00001-of-00002.parquet"
    (folder / name).write_bytes(animals.files[MAIN][f"data/{name}"])
    assert len(opened(f"hf:{REPO}").train) == 7


def test_other_files_are_read_from_the_hubs_conversion_to_parquet(hub, parquet):
    hub.files[MAIN] = {"images.zip": b"must not be fetched"}
    with pytest.raises(NotFoundError, match=r"someone/animals has no Parquet files on the hub, and no conversion"):
        opened(f"hf:{REPO}")
    hub.commits[PARQUET_BRANCH] = CONVERSION
    hub.files[CONVERSION] = {
        "default/train/0000.parquet": parquet(0, 3),
        "default/train/0001.parquet": parquet(3, 4),
        "default/validation/0000.parquet": parquet(4, 6),
    }
    parts = opened(f"hf:{REPO}")
    assert (len(parts.train), len(parts.validation), parts.test) == (4, 2, None)


def test_a_configuration_is_selected_by_name(hub, parquet):
    hub.files[MAIN] = {"big/train-0.parquet": parquet(0, 5), "small/train-0.parquet": parquet(0, 2)}
    assert len(opened(f"hf:{REPO}:small").train) == 2
    assert hub.downloaded() == {"small/train-0.parquet"}
    with pytest.raises(
        DataError, match=r"has several configurations \(big, small\); choose one: hf:someone/animals:big"
    ):
        opened(f"hf:{REPO}")
    with pytest.raises(NotFoundError, match=r"has no configuration 'smal'; did you mean 'small'\?"):
        opened(f"hf:{REPO}:smal")


def test_the_card_assigns_files_to_configurations(hub, parquet):
    hub.files[MAIN] = {
        "README.md": b"---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: a/*\n"
        b"  - split: validation\n    path: [b.parquet]\n---\n# Animals\n",
        "a/x.parquet": parquet(0, 3),
        "a/y.parquet": parquet(3, 5),
        "b.parquet": parquet(5, 6),
        "c.parquet": parquet(6, 9),
    }
    parts = opened(f"hf:{REPO}")
    assert (len(parts.train), len(parts.validation)) == (5, 1)
    assert "c.parquet" not in hub.downloaded()


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["train.parquet", "test.parquet"], {"train": ["train.parquet"], "test": ["test.parquet"]}),
        (["data/train-0.parquet", "val.parquet"], {"train": ["data/train-0.parquet"], "validation": ["val.parquet"]}),
        (["plain_text/train-0.parquet"], {"train": ["plain_text/train-0.parquet"]}),
        (["0000.parquet", "0001.parquet"], {"train": ["0000.parquet", "0001.parquet"]}),
        (["test-0.parquet"], {"train": ["test-0.parquet"]}),
        (["README.md"], {}),
    ],
)  # fmt: skip
def test_files_are_assigned_to_splits_by_their_names(names, expected):
    assert select_files(names, {}, Repository("a/b", None, None)) == expected


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("a/b", ("a/b", None, None)),
        ("a/b@v1", ("a/b", "v1", None)),
        ("a/b:c", ("a/b", None, "c")),
        ("a/b@refs/pr/1:c", ("a/b", "refs/pr/1", "c")),
    ],
)
def test_repository_names_are_parsed(spec, expected):
    assert parse_repository(spec) == Repository(*expected)


def test_invalid_repository_names_are_refused():
    with pytest.raises(NotFoundError, match="hf:mnist is not a dataset name; expected hf:user/name"):
        parse_repository("mnist")


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (
            401,
            "GatedRepo",
            r"someone/animals@v9 is gated: accept its terms at .*/datasets/someone/animals, and use a token",
        ),
        (401, "RepoNotFound", r"no public dataset someone/animals at http.* check the name, or use a token"),
        (404, "RevisionNotFound", r"someone/animals has no revision 'v9'"),
        (503, "", r"cannot download someone/animals@v9 from http.*it is not in the cache"),
        (403, "", r"denied access to someone/animals@v9 \(status 403\)"),
    ],
)
def test_an_http_error_is_one_sentence(animals, status, code, message):
    animals.status, animals.code = status, code
    with pytest.raises(NotFoundError, match=message):
        opened(f"hf:{REPO}@v9")


def test_no_network_and_offline_are_one_sentence(animals, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        NotFoundError, match=r"cannot download someone/animals from http://127\.0\.0\.1:9 .*check the connection"
    ):
        opened(f"hf:{REPO}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(NotFoundError, match="HF_HUB_OFFLINE is set"):
        opened(f"hf:{REPO}")
