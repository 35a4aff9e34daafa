"""Models on the Hugging Face hub: `user/model`, `user/model@revision`.

Only one of a repository's formats is downloaded: the weights that `archive.choose_weights_file` would open, and the
small JSON files beside them.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from vitrail.errors import CheckpointError, NotFoundError, VitrailError
from vitrail.storage.hub_client import (
    HubRepository,
    cached_files,
    cached_listing,
    cached_snapshot,
    download,
    explain_errors,
    is_unreachable,
    list_files,
)
from vitrail.weights.archive import SIDECARS, choose_weights_file
from vitrail.weights.file_type import summarize_names

HUB_PREFIX = re.compile(r"(hf-hub:|hf_hub:|hf://|https?://(www\.)?(huggingface\.co|hf\.co)/)(models/)?")
REPO_NAME_PART = r"[A-Za-z0-9_](?:[\w.\-]{0,94}[A-Za-z0-9_])?"
REPO_ID = re.compile(rf"({REPO_NAME_PART}/{REPO_NAME_PART})(?:@(.+)|/tree/([^/]+)/?)?", re.ASCII)


def parse_hub_id(name: str) -> tuple[str, str | None] | None:
    """'hf-hub:user/model@revision' -> ('user/model', 'revision'); None if it cannot be a hub id."""
    match = REPO_ID.fullmatch(HUB_PREFIX.sub("", name.strip(), count=1))
    if match is None or "--" in match[1] or ".." in match[1]:
        return None
    return match[1], match[2] or match[3]


def fetch(name: str, revision: str | None = None, *, update: bool = False) -> Path:
    """The local folder of a hub repository, downloaded if needed.

    A repository that is complete in the cache is used without contacting the hub; `update` checks for a new commit.
    """
    parsed = parse_hub_id(name)
    if parsed is None:
        raise NotFoundError(f"{name!r} is not a hub id; expected user/model or user/model@revision.")
    repo_name, written = parsed
    if revision and written and revision != written:
        raise NotFoundError(
            f"{name!r} names revision {written!r}, but revision={revision!r} was passed too; give only one."
        )
    repo = HubRepository("model", repo_name, revision or written)
    if not update and (folder := _complete_snapshot(repo)):
        return folder
    with explain_errors(repo):
        try:
            return download(repo, files_to_download(list_files(repo), repo.name))
        except Exception as error:
            if is_unreachable(error) and (folder := _cached_weights(repo)):
                return folder
            raise


def files_to_download(names: Iterable[str], repo: str) -> list[str]:
    """The files of a repository to download: one set of weights and its sidecar files."""
    names = list(names)
    try:
        weights = choose_weights_file(names)
    except CheckpointError as error:
        raise CheckpointError(f"{repo}: {error}") from None
    if weights is None:
        raise NotFoundError(
            f"no weights that vitrail can read in {repo}, which contains {summarize_names(names) or 'nothing'}."
        )
    files = [weights, *(s for s in SIDECARS if s in names)]
    if weights.endswith(".index.json"):
        base, suffix = weights.removesuffix(".index.json").rsplit(".", 1)
        files += fnmatch.filter(names, f"{base}-*-of-*.{suffix}")
    return files


def _complete_snapshot(repo: HubRepository) -> Path | None:
    """The cached snapshot if the cache has its file list and all its files."""
    names = cached_listing(repo)
    if names is not None:
        with suppress(VitrailError):
            return cached_snapshot(repo, files_to_download(names, repo.name))
    return None


def _cached_weights(repo: HubRepository) -> Path | None:
    """The cached snapshot if it contains weights; other files may be missing."""
    with suppress(CheckpointError):
        if choose_weights_file(cached_files(repo)):
            return cached_snapshot(repo)
    return None
