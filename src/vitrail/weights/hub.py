"""Repositories on the Hugging Face hub, through huggingface_hub: its cache, its offline mode, its tokens.

Of a repository's many formats only one is fetched: the weights `archive.choose_weights_file` would open,
and the small JSON files beside them.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import HfApi, constants, errors, snapshot_download, try_to_load_from_cache
from huggingface_hub.utils.tqdm import tqdm

from vitrail.errors import CheckpointError, NotFoundError, VitrailError
from vitrail.weights.archive import SIDECARS, choose_weights_file
from vitrail.weights.file_type import first_line, summarize_names

HUB_PREFIX = re.compile(r"(hf-hub:|hf_hub:|hf://|https?://(www\.)?(huggingface\.co|hf\.co)/)(models/)?")
PART = r"[A-Za-z0-9_](?:[\w.\-]{0,94}[A-Za-z0-9_])?"
NAME = re.compile(rf"({PART}/{PART})(?:@(.+)|/tree/([^/]+)/?)?", re.ASCII)
SHA256 = re.compile(r"[0-9a-f]{64}")
LIBRARY = "vitrail"


class ProgressBar(tqdm):
    """The hub's progress bar, silent where nobody watches."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options.setdefault("disable", None)  # tqdm's word for: only on a terminal
        super().__init__(*args, **options)  # type: ignore[no-untyped-call]


def parse_hub_id(name: str) -> tuple[str, str | None] | None:
    """'hf-hub:user/model@revision' -> ('user/model', 'revision'); None for what cannot be a hub id."""
    match = NAME.fullmatch(HUB_PREFIX.sub("", name.strip(), count=1))
    if match is None or "--" in match[1] or ".." in match[1]:
        return None
    return match[1], match[2] or match[3]


def fetch(name: str, revision: str | None = None, *, update: bool = False) -> Path:
    """The folder of a hub repository on this machine, downloaded where it is not there yet.

    A repository that is complete in the cache is used without asking the hub; `update` asks whether
    the branch has moved on.
    """
    parsed = parse_hub_id(name)
    if parsed is None:
        raise NotFoundError(f"{name!r} is no hub id; wanted user/model or user/model@revision.")
    repo, written = parsed
    if revision and written and revision != written:
        raise NotFoundError(
            f"{name!r} names revision {written!r}, and {revision!r} was asked for too; give one of them."
        )
    revision = revision or written
    if not update and (folder := _complete(repo, revision)):
        return folder
    try:
        return _download(repo, revision)
    except VitrailError:
        raise
    except Exception as error:
        if _unreachable(error) and (folder := _cached(repo, revision)):
            return folder
        explained = _explain(error, repo, revision)
        if explained is None:
            raise
        raise explained from error


def files_to_download(names: Iterable[str], repo: str) -> list[str]:
    """Of a repository's files, those to fetch: one set of weights and what describes it."""
    names = list(names)
    try:
        weights = choose_weights_file(names)
    except CheckpointError as error:
        raise CheckpointError(f"{repo}: {error}") from None
    if weights is None:
        raise NotFoundError(
            f"no weights that vitrail can read in {repo}, which holds {summarize_names(names) or 'nothing'}."
        )
    chosen = [weights, *(s for s in SIDECARS if s in names)]
    if weights.endswith(".index.json"):
        base, suffix = weights.removesuffix(".index.json").rsplit(".", 1)
        chosen += fnmatch.filter(names, f"{base}-*-of-*.{suffix}")
    return chosen


def _download(repo: str, revision: str | None) -> Path:
    info = HfApi(library_name=LIBRARY).model_info(repo, revision=revision)
    chosen = files_to_download([file.rfilename for file in info.siblings or []], repo)
    new = [n for n in chosen if not isinstance(try_to_load_from_cache(repo, n, revision=info.sha), str)]
    folder = Path(
        snapshot_download(
            repo,
            revision=revision,
            allow_patterns=[glob.escape(n) for n in chosen],
            library_name=LIBRARY,
            tqdm_class=ProgressBar,
        )
    )
    for file in new:
        _verify(folder / file, repo)
    return folder


def _verify(path: Path, repo: str) -> None:
    """Large files are named after their content in the cache: a download that differs is removed."""
    blob = path.resolve()
    if not SHA256.fullmatch(blob.name):
        return
    with blob.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != blob.name:
        path.unlink()
        blob.unlink(missing_ok=True)
        raise CheckpointError(f"{path.name} of {repo} was damaged on its way here and has been removed; try again.")


def _complete(repo: str, revision: str | None) -> Path | None:
    """The cached snapshot, where the cache knows what belongs to it and has it all."""
    listed = getattr(huggingface_hub, "get_cached_repo_tree", None)  # older versions keep no listing
    if listed is None:
        return None
    try:
        names = [file.path for file in listed(repo, revision=revision)]
        patterns = [glob.escape(n) for n in files_to_download(names, repo)]
        return Path(snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=patterns))
    except (errors.CachedRepoTreeNotFoundError, errors.LocalEntryNotFoundError, VitrailError):
        return None


def _cached(repo: str, revision: str | None) -> Path | None:
    """The cached snapshot, where weights are in it, whatever else may be missing."""
    try:
        folder = Path(snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=[]))
        return folder if choose_weights_file(f.name for f in folder.iterdir()) else None
    except (errors.LocalEntryNotFoundError, CheckpointError):
        return None


def _unreachable(error: Exception) -> bool:
    """Whether the hub said nothing about the repository itself: offline, no network, or out of order."""
    if isinstance(error, errors.HfHubHTTPError):
        return error.response.status_code >= 500
    return isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError | errors.HTTPError)  # type: ignore[attr-defined]


def _explain(error: Exception, repo: str, revision: str | None) -> VitrailError | None:
    """One sentence of ours for an error of the hub; None for what is no business of the hub's."""
    hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    what = f"{repo} at revision {revision!r}" if revision else repo
    token = "give a token that may read it, with `hf auth login` or in HF_TOKEN"
    if isinstance(error, errors.GatedRepoError):
        return NotFoundError(f"{repo} is gated: accept its terms at {hub}/{repo}, and {token}.")
    if isinstance(error, errors.RevisionNotFoundError):
        return NotFoundError(f"{repo} has no revision {revision!r}; see {hub}/{repo}/tree/main for those there are.")
    if isinstance(error, errors.RepositoryNotFoundError):
        return NotFoundError(f"no repository {repo} at {hub} for everybody to read; check the name, or {token}.")
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        if status in (401, 403):
            return NotFoundError(f"{hub} did not let us read {repo} (status {status}); {token}.")
        return CheckpointError(f"{hub} answered {status} when asked for {what}; try again later.")
    if constants.HF_HUB_OFFLINE and isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError):
        return NotFoundError(
            f"{what} is not in the cache {cache}, or not all of it, and HF_HUB_OFFLINE forbids to download it; "
            "unset that, or copy the repository there."
        )
    if _unreachable(error):
        return CheckpointError(
            f"could not get {what} from {hub} ({first_line(error)}), and the cache {cache} does not have it; "
            "check the connection, and try again."
        )
    if isinstance(error, OSError):
        return CheckpointError(f"could not store {what} in the cache {cache}: {first_line(error)}.")
    return None
