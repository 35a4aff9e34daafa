"""The hub client against a local HTTP server: the requests it sends, the files it fetches, and its errors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hub_server import FakeHub, fill_cache, serve, use_hub
from huggingface_hub import constants
from safetensors.torch import save

from vitrail.errors import CheckpointError, NotFoundError
from vitrail.weights.archive import open_archive
from vitrail.weights.hub import fetch, files_to_download, parse_hub_id

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


@pytest.fixture
def server() -> Iterator[FakeHub]:
    files = {commit: dict(FILES) for commit in COMMITS.values()}
    with serve(FakeHub("model", REPO, files, dict(COMMITS))) as hub:
        yield hub


@pytest.fixture
def cache(server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_hub(server.url, tmp_path, monkeypatch)


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


def test_incomplete_cache_of_another_program_is_completed(server: FakeHub, cache: Path):
    folder = fill_cache(cache, server, ("model.safetensors",), COMMITS["main"])
    assert fetch(REPO) == folder
    assert server.downloaded() == {"config.json"}


@pytest.mark.parametrize("fault", ["offline", "no network", "server error"])
def test_incomplete_cache_is_used_when_the_hub_is_unavailable(
    server: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch, fault: str
):
    folder = fill_cache(cache, server, ("model.safetensors",), COMMITS["main"])
    if fault == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif fault == "no network":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    else:
        server.error_status = 503
    assert fetch(REPO) == folder


def test_cache_without_weights_is_not_used(server: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch):
    fill_cache(cache, server, ("config.json",), COMMITS["main"])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(NotFoundError, match="missing or incomplete"):
        fetch(REPO)


def test_unknown_repository_is_a_one_sentence_error(server: FakeHub, cache: Path):
    with pytest.raises(
        NotFoundError, match=r"no public model user/nothing at http.*check the name, or provide a token.*HF_TOKEN"
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
