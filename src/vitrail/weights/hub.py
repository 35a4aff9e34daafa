"""Download model repositories from the Hugging Face hub with huggingface_hub: its cache, offline mode and tokens.

Only one of a repository's formats is downloaded: the weights that `archive.choose_weights_file` would open, and the
small JSON files beside them.
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
REPO_NAME_PART = r"[A-Za-z0-9_](?:[\w.\-]{0,94}[A-Za-z0-9_])?"
REPO_ID = re.compile(rf"({REPO_NAME_PART}/{REPO_NAME_PART})(?:@(.+)|/tree/([^/]+)/?)?", re.ASCII)
SHA256 = re.compile(r"[0-9a-f]{64}")
LIBRARY = "vitrail"


class ProgressBar(tqdm):
    """The hub's progress bar, shown only on a terminal."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options.setdefault("disable", None)  # for tqdm, None means: only on a terminal
        super().__init__(*args, **options)  # type: ignore[no-untyped-call]


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
    repo, written = parsed
    if revision and written and revision != written:
        raise NotFoundError(
            f"{name!r} names revision {written!r}, but revision={revision!r} was passed too; give only one."
        )
    revision = revision or written
    if not update and (folder := _complete_snapshot(repo, revision)):
        return folder
    try:
        return _download(repo, revision)
    except VitrailError:
        raise
    except Exception as error:
        if _is_unreachable(error) and (folder := _cached_weights(repo, revision)):
            return folder
        explained = _translate_error(error, repo, revision)
        if explained is None:
            raise
        raise explained from error


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


def _download(repo: str, revision: str | None) -> Path:
    info = HfApi(library_name=LIBRARY).model_info(repo, revision=revision)
    names = files_to_download([file.rfilename for file in info.siblings or []], repo)
    new = [n for n in names if not isinstance(try_to_load_from_cache(repo, n, revision=info.sha), str)]
    folder = Path(
        snapshot_download(
            repo,
            revision=revision,
            allow_patterns=[glob.escape(n) for n in names],
            library_name=LIBRARY,
            tqdm_class=ProgressBar,
        )
    )
    for file in new:
        _verify(folder / file, repo)
    return folder


def _verify(path: Path, repo: str) -> None:
    """Check the SHA-256 that names a large file in the cache; a file that differs is removed."""
    blob = path.resolve()
    if not SHA256.fullmatch(blob.name):
        return
    with blob.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != blob.name:
        path.unlink()
        blob.unlink(missing_ok=True)
        raise CheckpointError(f"{path.name} of {repo} was damaged during the download and has been removed; try again.")


def _complete_snapshot(repo: str, revision: str | None) -> Path | None:
    """The cached snapshot if the cache has its file list and all its files."""
    listed = getattr(huggingface_hub, "get_cached_repo_tree", None)  # older versions do not store the file list
    if listed is None:
        return None
    try:
        names = [file.path for file in listed(repo, revision=revision)]
        patterns = [glob.escape(n) for n in files_to_download(names, repo)]
        return Path(snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=patterns))
    except (errors.CachedRepoTreeNotFoundError, errors.LocalEntryNotFoundError, VitrailError):
        return None


def _cached_weights(repo: str, revision: str | None) -> Path | None:
    """The cached snapshot if it contains weights; other files may be missing."""
    try:
        folder = Path(snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=[]))
        return folder if choose_weights_file(f.name for f in folder.iterdir()) else None
    except (errors.LocalEntryNotFoundError, CheckpointError):
        return None


def _is_unreachable(error: Exception) -> bool:
    """Whether the hub could not be reached or failed, so that nothing is known about the repository."""
    if isinstance(error, errors.HfHubHTTPError):
        return error.response.status_code >= 500
    return isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError | errors.HTTPError)  # type: ignore[attr-defined]


def _translate_error(error: Exception, repo: str, revision: str | None) -> VitrailError | None:
    """The VitrailError for an error of huggingface_hub; None for unrelated errors."""
    hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    what = f"{repo} at revision {revision!r}" if revision else repo
    token = "provide a token with access, with `hf auth login` or in HF_TOKEN"
    if isinstance(error, errors.GatedRepoError):
        return NotFoundError(f"{repo} is gated: accept its terms at {hub}/{repo}, and {token}.")
    if isinstance(error, errors.RevisionNotFoundError):
        return NotFoundError(f"{repo} has no revision {revision!r}; {hub}/{repo}/tree/main lists its revisions.")
    if isinstance(error, errors.RepositoryNotFoundError):
        return NotFoundError(f"no public repository {repo} at {hub}; check the name, or {token}.")
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        if status in (401, 403):
            return NotFoundError(f"{hub} denied access to {repo} (status {status}); {token}.")
        return CheckpointError(f"{hub} returned status {status} for {what}; try again later.")
    if constants.HF_HUB_OFFLINE and isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError):
        return NotFoundError(
            f"{what} is missing or incomplete in the cache {cache}, and HF_HUB_OFFLINE prevents downloading it; "
            "unset HF_HUB_OFFLINE, or copy the repository into the cache."
        )
    if _is_unreachable(error):
        return CheckpointError(
            f"could not download {what} from {hub} ({first_line(error)}), and it is not in the cache {cache}; "
            "check the connection and try again."
        )
    if isinstance(error, OSError):
        return CheckpointError(f"could not store {what} in the cache {cache}: {first_line(error)}.")
    return None
