"""The hub client against a local HTTP server: listings, snapshots, downloads and errors, for models and datasets."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hub_server import FakeHub, fill_cache, serve, use_hub
from huggingface_hub import constants
from huggingface_hub.utils import enable_progress_bars

from vitrail.errors import CheckpointError, DataError, NotFoundError, VitrailError
from vitrail.storage import hub_client
from vitrail.storage.hub_client import (
    HubRepository,
    ProgressBar,
    cached_files,
    cached_listing,
    cached_snapshot,
    download,
    explain_errors,
    list_files,
)

MAIN, NEWER = "a" * 40, "b" * 40
FILES = {"README.md": b"# text", "part[1].safetensors": b"1" * 2000, "sub/part.safetensors": b"2" * 3000}
NAMES = sorted(FILES)
FAILURES: dict[str, type[VitrailError]] = {"model": CheckpointError, "dataset": DataError}


@pytest.fixture(params=["model", "dataset"])
def server(request: pytest.FixtureRequest) -> Iterator[FakeHub]:
    with serve(FakeHub(request.param, "user/name", {MAIN: dict(FILES)}, {"main": MAIN})) as hub:
        yield hub


@pytest.fixture
def cache(server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_hub(server.url, tmp_path, monkeypatch)


@pytest.fixture
def repo(server: FakeHub, cache: Path) -> HubRepository:
    return HubRepository(server.kind, server.name)  # type: ignore[arg-type]


def test_only_the_named_files_are_downloaded(server: FakeHub, cache: Path, repo: HubRepository):
    """A name is not a pattern, although it has brackets."""
    assert sorted(list_files(repo)) == NAMES
    folder = download(repo, ["part[1].safetensors"])
    assert folder.is_relative_to(cache / f"{server.kind}s--user--name")
    assert (folder / "part[1].safetensors").read_bytes() == b"1" * 2000
    assert server.downloaded() == {"part[1].safetensors"}
    assert download(repo, ["sub/part.safetensors"]) == folder
    assert sorted(cached_files(repo)) == NAMES[1:]


def test_the_cache_answers_without_requests(server: FakeHub, repo: HubRepository):
    assert cached_listing(repo) is None
    assert cached_files(repo) == []
    assert cached_snapshot(repo) is None
    assert server.requests == []
    folder = download(repo, NAMES[:2])
    server.requests.clear()
    assert sorted(cached_listing(repo) or []) == NAMES  # also those that were not downloaded
    assert cached_snapshot(repo, NAMES[:2]) == folder
    assert cached_snapshot(repo, NAMES) is None
    assert server.requests == []


def test_the_cache_of_another_program_has_no_listing(server: FakeHub, cache: Path, repo: HubRepository):
    folder = fill_cache(cache, server, ("sub/part.safetensors",), MAIN)
    assert cached_listing(repo) is None
    assert cached_files(repo) == ["sub/part.safetensors"]
    assert cached_snapshot(repo, ["sub/part.safetensors"]) == folder
    assert cached_snapshot(repo, NAMES) is None


def test_older_versions_of_huggingface_hub_have_no_listing(repo: HubRepository, monkeypatch: pytest.MonkeyPatch):
    download(repo, NAMES)
    assert cached_listing(repo) is not None
    monkeypatch.setattr(hub_client, "huggingface_hub", SimpleNamespace())
    assert cached_listing(repo) is None


def test_a_download_follows_the_branch_and_a_commit_does_not_move(server: FakeHub, repo: HubRepository):
    first = download(repo, NAMES)
    server.commits["main"], server.files[NEWER] = NEWER, {**FILES, "README.md": b"# other text"}
    server.requests.clear()
    assert download(repo, NAMES).name == NEWER
    assert server.downloaded() == {"README.md"}
    assert download(HubRepository(repo.kind, repo.name, MAIN), NAMES) == first


def test_all_damaged_files_of_a_download_are_removed(server: FakeHub, cache: Path, repo: HubRepository):
    server.corrupt = True
    with pytest.raises(FAILURES[server.kind], match=r"part\[1\]\.safetensors of user/name was damaged .*try again"):
        download(repo, NAMES)
    assert cached_files(repo) == ["README.md"]
    server.corrupt = False
    folder = download(repo, NAMES)
    assert {name: (folder / name).read_bytes() for name in NAMES} == FILES


def test_files_that_were_there_before_are_not_verified_again(repo: HubRepository, monkeypatch: pytest.MonkeyPatch):
    verified: list[str] = []
    monkeypatch.setattr(hub_client, "_is_intact", lambda path: verified.append(path.name) or True)
    download(repo, NAMES[:2])
    download(repo, NAMES)
    assert verified == ["README.md", "part[1].safetensors", "part.safetensors"]


@pytest.mark.parametrize(
    ("status", "code", "error", "message"),
    [
        (401, "GatedRepo", NotFoundError, "user/name is gated: accept its terms at {page}, and provide a token"),
        (401, "RepoNotFound", NotFoundError, "no public {kind} user/name at {url}; check the name, or provide a token"),
        (404, "RevisionNotFound", NotFoundError, "user/name has no revision 'v9'; {page}/tree/main lists its"),
        (403, "", NotFoundError, "{url} denied access to user/name@v9 (status 403); provide a token"),
        (404, "", None, "{url} returned status 404 for user/name@v9; try again later."),
        (503, "", None, "{url} returned status 503 for user/name@v9; try again later."),
    ],
)
def test_a_refusal_of_the_hub_is_one_sentence(
    server: FakeHub, cache: Path, status: int, code: str, error: type[VitrailError] | None, message: str
):
    server.error_status, server.error_code = status, code
    repo = HubRepository(server.kind, server.name, "v9")  # type: ignore[arg-type]
    with pytest.raises(error or FAILURES[server.kind]) as caught, explain_errors(repo):
        list_files(repo)
    expected = message.format(url=server.url, page=f"{server.url}/{server.path}", kind=server.kind)
    assert str(caught.value).startswith(expected)


def test_no_connection_is_one_sentence(
    server: FakeHub, cache: Path, repo: HubRepository, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    expected = rf"could not download user/name from http://127\.0\.0\.1:9 \(.*it is not in the cache {cache}; check the"
    with pytest.raises(FAILURES[server.kind], match=expected), explain_errors(repo):
        list_files(repo)


def test_offline_mode_is_one_sentence(cache: Path, repo: HubRepository, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for ask in (list_files, lambda repo: download(repo, NAMES)):
        expected = rf"user/name is missing or incomplete in the cache {cache}, and HF_HUB_OFFLINE prevents downloading"
        with pytest.raises(NotFoundError, match=expected), explain_errors(repo):
            ask(repo)


def test_a_cache_that_cannot_be_written_is_one_sentence(server: FakeHub, cache: Path, repo: HubRepository):
    cache.parent.mkdir(exist_ok=True)
    cache.write_text("a file is in the way")
    expected = f"could not store user/name in the cache {cache}: "
    with pytest.raises(FAILURES[server.kind], match=expected), explain_errors(repo):
        download(repo, NAMES)


@pytest.mark.parametrize("error", [ZeroDivisionError(), ValueError("no"), NotFoundError("of our own")])
def test_other_errors_pass_unchanged(error: Exception):
    with pytest.raises(type(error)) as caught, explain_errors(HubRepository("model", "user/name")):
        raise error
    assert caught.value is error


def test_a_truncated_download_leaves_nothing_under_the_files_name(server: FakeHub, cache: Path, repo: HubRepository):
    server.truncate_at = 500
    with pytest.raises(FAILURES[server.kind], match=r"could not (download|store) user/name"), explain_errors(repo):
        download(repo, NAMES)
    assert not list(cache.rglob("*.safetensors"))


def test_progress_bar_is_drawn_only_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    enable_progress_bars()  # another library may have disabled them in this process
    for stream, drawn in ((Terminal(), True), (io.StringIO(), False)):
        with ProgressBar(total=1, file=stream) as bar:
            bar.update(1)
        assert bool(stream.getvalue()) is drawn


def test_downloads_draw_with_that_progress_bar(repo: HubRepository, monkeypatch: pytest.MonkeyPatch):
    used: dict[str, Any] = {}
    snapshot = hub_client.snapshot_download
    monkeypatch.setattr(
        hub_client, "snapshot_download", lambda *args, **options: used.update(options) or snapshot(*args, **options)
    )
    download(repo, NAMES)
    assert used["tqdm_class"] is ProgressBar


def test_huggingface_hub_is_imported_only_with_the_client():
    code = (
        "import sys, vitrail.storage.atomic_write, vitrail.storage.locks; assert 'huggingface_hub' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
