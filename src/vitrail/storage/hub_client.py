"""Client of the Hugging Face hub, with huggingface_hub: its cache, offline mode and tokens."""

from __future__ import annotations

import glob
import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
from huggingface_hub import HfApi, constants, errors, snapshot_download
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils.tqdm import tqdm

from vitrail.errors import CheckpointError, DataError, NotFoundError, VitrailError, first_line

LIBRARY = "vitrail"
SHA256 = re.compile(r"[0-9a-f]{64}")
FAILURES: dict[str, type[VitrailError]] = {"model": CheckpointError, "dataset": DataError}
"""The error of a download that failed, by kind of repository."""


@dataclass(frozen=True)
class HubRepository:
    """A model or dataset on the hub; without a revision, its main branch."""

    kind: Literal["model", "dataset"]
    name: str
    """`user/name`"""
    revision: str | None = None
    """Branch, tag or commit."""

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}" if self.revision else self.name


class ProgressBar(tqdm):
    """The hub's progress bar, shown only on a terminal."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options.setdefault("disable", None)  # for tqdm, None means: only on a terminal
        super().__init__(*args, **options)  # type: ignore[no-untyped-call]


def list_files(repo: HubRepository) -> list[str]:
    """The names of all files of a repository, from the hub."""
    api = HfApi(library_name=LIBRARY)
    info = (api.dataset_info if repo.kind == "dataset" else api.model_info)(repo.name, revision=repo.revision)
    return [file.rfilename for file in info.siblings or []]


def cached_listing(repo: HubRepository) -> list[str] | None:
    """The names of all files of a repository, if the cache has the list; the files may be missing."""
    listed = getattr(huggingface_hub, "get_cached_repo_tree", None)  # older versions do not store the file list
    if listed is None:
        return None
    try:
        return [file.path for file in listed(repo.name, repo_type=repo.kind, revision=repo.revision)]
    except (errors.CachedRepoTreeNotFoundError, errors.LocalEntryNotFoundError):
        return None


def cached_files(repo: HubRepository) -> list[str]:
    """The names of the files of a repository that are in the cache."""
    folder = cached_snapshot(repo)
    return [] if folder is None else [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]


def cached_snapshot(repo: HubRepository, files: Sequence[str] = ()) -> Path | None:
    """The folder of a repository in the cache; None if it is not there or lacks one of these files."""
    try:
        folder = _snapshot(repo, files, local_files_only=True)
    except errors.LocalEntryNotFoundError:
        return None
    return folder if all((folder / name).is_file() for name in files) else None


def download(repo: HubRepository, files: Sequence[str]) -> Path:
    """The folder of a repository in the cache, after its newest commit's files with these names were downloaded."""
    blobs = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo.name, repo_type=repo.kind) / "blobs"
    before = {path.name for path in blobs.glob("*")}
    folder = _snapshot(repo, files, local_files_only=False)
    new = [folder / name for name in files if (folder / name).resolve().name not in before]
    damaged = [path for path in new if not _is_intact(path)]
    for path in damaged:
        path.resolve().unlink(missing_ok=True)
        path.unlink()
    if damaged:
        raise FAILURES[repo.kind](
            f"{damaged[0].name} of {repo.name} was damaged during the download and has been removed; try again."
        )
    return folder


def _snapshot(repo: HubRepository, files: Sequence[str], *, local_files_only: bool) -> Path:
    return Path(
        snapshot_download(
            repo.name,
            repo_type=repo.kind,
            revision=repo.revision,
            allow_patterns=[glob.escape(name) for name in files],
            local_files_only=local_files_only,
            library_name=LIBRARY,
            tqdm_class=ProgressBar,
        )
    )


def _is_intact(path: Path) -> bool:
    """Whether a file in the cache has the SHA-256 that it is stored under; true for small files, which have none."""
    blob = path.resolve()
    if not SHA256.fullmatch(blob.name):
        return True
    with blob.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == blob.name


def is_unreachable(error: Exception) -> bool:
    """Whether the hub could not be reached or failed, so that nothing is known about the repository."""
    if isinstance(error, errors.HfHubHTTPError):
        return error.response.status_code >= 500
    return isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError | errors.HTTPError)  # type: ignore[attr-defined]


@contextmanager
def explain_errors(repo: HubRepository) -> Iterator[None]:
    """Context manager: errors of huggingface_hub become a VitrailError of one sentence; others pass through."""
    try:
        yield
    except VitrailError:
        raise
    except Exception as error:
        explained = _translate_error(error, repo)
        if explained is None:
            raise
        raise explained from error


def _translate_error(error: Exception, repo: HubRepository) -> VitrailError | None:
    """The VitrailError for an error of huggingface_hub; None for unrelated errors."""
    hub, cache, failure = constants.ENDPOINT, constants.HF_HUB_CACHE, FAILURES[repo.kind]
    page = f"{hub}/datasets/{repo.name}" if repo.kind == "dataset" else f"{hub}/{repo.name}"
    token = "provide a token with access, with `hf auth login` or in HF_TOKEN"
    if isinstance(error, errors.GatedRepoError):
        return NotFoundError(f"{repo.name} is gated: accept its terms at {page}, and {token}.")
    if isinstance(error, errors.RevisionNotFoundError):
        return NotFoundError(f"{repo.name} has no revision {repo.revision!r}; {page}/tree/main lists its revisions.")
    if isinstance(error, errors.RepositoryNotFoundError):
        return NotFoundError(f"no public {repo.kind} {repo.name} at {hub}; check the name, or {token}.")
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        if status in (401, 403):
            return NotFoundError(f"{hub} denied access to {repo} (status {status}); {token}.")
        return failure(f"{hub} returned status {status} for {repo}; try again later.")
    if constants.HF_HUB_OFFLINE and isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError):
        return NotFoundError(
            f"{repo} is missing or incomplete in the cache {cache}, and HF_HUB_OFFLINE prevents downloading it; "
            "unset HF_HUB_OFFLINE, or copy the repository into the cache."
        )
    if is_unreachable(error):
        return failure(
            f"could not download {repo} from {hub} ({first_line(error)}), and it is not in the cache {cache}; "
            "check the connection and try again."
        )
    if isinstance(error, OSError):
        return failure(f"could not store {repo} in the cache {cache}: {first_line(error)}.")
    return None
