"""Data sets on the Hugging Face hub, as Parquet: `hf:user/name`, `hf:user/name@revision:config`.

Of a repository only the Parquet files of one configuration are fetched, into huggingface_hub's own
cache; its offline mode and tokens are honored. A repository of other files is read from the
branch where the hub keeps its own conversion of it.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import HfApi, constants, errors, snapshot_download
from huggingface_hub.repocard import metadata_load
from huggingface_hub.utils.tqdm import tqdm
from yaml import YAMLError  # type: ignore[import-untyped]

from vitrail.config import DataConfig
from vitrail.data.sources.base import SourceSplits
from vitrail.data.sources.source_spec import HUB_URL
from vitrail.data.sources.table import open_table, split_from_name
from vitrail.errors import DataError, NotFound, VitrailError, nearest

REPOSITORY_PATTERN = re.compile(r"([\w.\-]+/[\w.\-]+)(?:@([^:]+))?(?::(.+))?", re.ASCII)
PARQUET_BRANCH = "refs/convert/parquet"
"""The branch of the hub's own conversion: CONFIG/PART/0000.parquet."""
SHARD_COUNT = re.compile(r"-(\d+)-of-(\d+)")
DATASET_CARD = "README.md"


class HubProgressBar(tqdm):
    """The hub's progress bar, silent where nobody watches."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options.setdefault("disable", None)  # tqdm's word for: only on a terminal
        super().__init__(*args, **options)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Repository:
    """A data set on the hub, as a spec names it."""

    name: str
    revision: str | None
    config: str | None

    def __str__(self) -> str:
        return self.name + (f"@{self.revision}" if self.revision else "")


def parse_repository(spec: str) -> Repository:
    match = REPOSITORY_PATTERN.fullmatch(HUB_URL.sub("", spec.strip()).rstrip("/"))
    if match is None:
        raise NotFound(f"hf:{spec} is no data set on the hub; wanted hf:user/name, with @revision or :config after it.")
    return Repository(*match.groups())


def open_hub(spec: str, config: DataConfig, *, require_labels: bool = True) -> SourceSplits:
    """The parts of a data set on the hub, downloaded where they are not here yet."""
    repository = parse_repository(spec)
    try:
        folder, files = _fetch(repository)
    except VitrailError:
        raise
    except Exception as error:
        explained = _translate_error(error, repository)
        if explained is None:
            raise
        raise explained from error
    found = {part: [folder / name for name in names] for part, names in files.items()}
    return open_table(found, config, repository.name.split("/")[1], require_labels=require_labels)


def select_files(names: Sequence[str], card: dict[str, Any], repository: Repository) -> dict[str, list[str]]:
    """Part -> its Parquet files, of the configuration asked for or of the only one."""
    names = sorted(n for n in names if n.endswith(".parquet"))
    configs = _configs_from_card(names, card) or _configs_from_paths(names)
    if not configs:
        return {}
    wanted = repository.config or next((c for c in ("default", "") if c in configs), None)
    if wanted is None and len(configs) > 1:
        listed = ", ".join(sorted(configs)[:8])
        raise DataError(
            f"{repository} has several configurations ({listed}); say which: hf:{repository}:{min(configs)}."
        )
    wanted = wanted if wanted is not None else next(iter(configs))
    if wanted not in configs:
        raise NotFound(f"{repository} has no configuration {wanted!r}{nearest(wanted, configs)}")
    parts: dict[str, list[str]] = {}
    for part, files in configs[wanted].items():
        parts.setdefault(split_from_name(part) or part, []).extend(files)
    first = parts.get("train") or next(iter(parts.values()))
    return {"train": first, **{p: parts[p] for p in ("validation", "test") if p in parts and parts[p] is not first}}


def _configs_from_card(names: Sequence[str], card: dict[str, Any]) -> dict[str, dict[str, list[str]]]:
    """Config -> part -> files, as the repository's card tells."""
    found: dict[str, dict[str, list[str]]] = {}
    for config in card.get("configs") or []:
        files = config.get("data_files")
        files = [{"split": "train", "path": files}] if isinstance(files, str) else files or []
        for part in (f for f in files if isinstance(f, dict)):
            paths = part.get("path") or []
            patterns = [paths] if isinstance(paths, str) else paths
            mine = [n for n in names if any(fnmatch.fnmatch(n, p) for p in patterns)]
            if mine:
                found.setdefault(config.get("config_name", "default"), {})[part.get("split", "train")] = mine
    return found


def _configs_from_paths(names: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """The same from where the files lie: PART-00000-of-00001.parquet, CONFIG/PART/0000.parquet, data/PART-..."""
    found: dict[str, dict[str, list[str]]] = {}
    for name in names:
        *folders, file = name.split("/")
        words = [f for f in folders if f != "data" and not split_from_name(f)]
        part = split_from_name(file) or next(
            (split_from_name(f) for f in reversed(folders) if split_from_name(f)), "train"
        )
        found.setdefault("/".join(words), {}).setdefault(part, []).append(name)
    return found


def _fetch(repository: Repository) -> tuple[Path, dict[str, list[str]]]:
    """The folder of the cached repository, and the files to read in it."""
    branches = [repository.revision] if repository.revision else [None, PARQUET_BRANCH]
    unreachable: Exception | None = None
    for revision in branches:
        names, known = None, True
        try:
            names = _list_files(repository.name, revision)
        except Exception as error:
            if isinstance(error, errors.RevisionNotFoundError) and revision == PARQUET_BRANCH:
                break
            if not _is_unreachable(error):
                raise
            known, unreachable = False, error
            names = _cached_files(repository.name, revision)
        files = select_files(names, _read_card(repository.name, revision, names, known), repository)
        if files:
            wanted = [n for mine in files.values() for n in mine]
            _check_complete(wanted, repository) if not known else None
            return _download(repository.name, revision, wanted, local=not known), files
    if unreachable is not None:
        raise unreachable
    raise NotFound(f"{repository} has no Parquet files on the hub, and no conversion to Parquet; download it by hand.")


def _list_files(name: str, revision: str | None) -> list[str]:
    """Every file of a repository: what the cache knows of it, else what the hub says."""
    cached = getattr(huggingface_hub, "get_cached_repo_tree", None)  # older versions keep no listing
    if cached is not None:
        try:
            return [file.path for file in cached(name, repo_type="dataset", revision=revision)]
        except (errors.CachedRepoTreeNotFoundError, errors.LocalEntryNotFoundError):
            pass
    info = HfApi(library_name="vitrail").dataset_info(name, revision=revision)
    return [file.rfilename for file in info.siblings or []]


def _cached_files(name: str, revision: str | None) -> list[str]:
    """The files of a repository that are in the cache, whatever else it may have."""
    try:
        folder = _download(name, revision, [], local=True)
    except errors.LocalEntryNotFoundError:
        return []
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def _download(name: str, revision: str | None, files: Sequence[str], local: bool = False) -> Path:
    """The repository's folder in the cache with these files in it; the hub is asked for what is not there."""

    def get(local_files_only: bool) -> Path:
        return Path(
            snapshot_download(
                name,
                repo_type="dataset",
                revision=revision,
                allow_patterns=[glob.escape(n) for n in files],
                local_files_only=local_files_only,
                library_name="vitrail",
                tqdm_class=HubProgressBar,
            )
        )

    if local:
        return get(local_files_only=True)
    with contextlib.suppress(errors.LocalEntryNotFoundError):
        folder = get(local_files_only=True)
        if all((folder / n).is_file() for n in files):
            return folder
    return get(local_files_only=False)


def _read_card(name: str, revision: str | None, names: Sequence[str], known: bool) -> dict[str, Any]:
    """What the head of the repository's README says; nothing where it has none."""
    if DATASET_CARD not in names:
        return {}
    folder = _download(name, revision, [DATASET_CARD], local=not known)
    try:
        return metadata_load(folder / DATASET_CARD) or {}
    except (OSError, ValueError, YAMLError):  # prose that is no YAML: the files' names have to do
        return {}


def _check_complete(files: Sequence[str], repository: Repository) -> None:
    """Of a set that counts itself (train-00000-of-00002), none may be missing."""
    for name in files:
        match = SHARD_COUNT.search(name)
        count = len(fnmatch.filter(files, SHARD_COUNT.sub("-*-of-*", name))) if match else 0
        if match and count != int(match[2]):
            raise NotFound(
                f"{repository} is in the cache {constants.HF_HUB_CACHE} with {count} of {int(match[2])} files like "
                f"{name}, and the hub cannot be reached; try again with a connection."
            )


def _is_unreachable(error: Exception) -> bool:
    """Whether the hub said nothing about the repository itself: offline, no network, or out of order."""
    if isinstance(error, errors.HfHubHTTPError):
        return error.response.status_code >= 500
    return isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError | errors.HTTPError)  # type: ignore[attr-defined]


def _translate_error(error: Exception, repository: Repository) -> VitrailError | None:
    """One sentence of ours for an error of the hub; None for what is no business of the hub's."""
    hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    page = f"{hub}/datasets/{repository.name}"
    token = "give a token that may read it, with `hf auth login` or in HF_TOKEN"
    if isinstance(error, errors.GatedRepoError):
        return NotFound(f"{repository} is gated: accept its terms at {page}, and {token}.")
    if isinstance(error, errors.RevisionNotFoundError):
        return NotFound(f"{repository.name} has no revision {repository.revision!r}; see {page}/tree/main.")
    if isinstance(error, errors.RepositoryNotFoundError):
        return NotFound(f"no data set {repository.name} at {hub} for everybody to read; check the name, or {token}.")
    if _is_unreachable(error):
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        if constants.HF_HUB_OFFLINE:
            reason = "HF_HUB_OFFLINE forbids to ask"
        return NotFound(
            f"could not get {repository} from {hub} ({reason}), and the cache {cache} does not have it; "
            "check the connection, and try again."
        )
    if isinstance(error, errors.HfHubHTTPError):
        return NotFound(f"{hub} did not let us read {repository} (status {error.response.status_code}); {token}.")
    if isinstance(error, OSError):
        return DataError(f"could not store {repository} in the cache {cache}: {error}.")
    return None
