"""Datasets on the Hugging Face hub, as Parquet: `hf:user/name`, `hf:user/name@revision:config`.

Only the Parquet files of one configuration are downloaded, to the cache of huggingface_hub; its
offline mode and tokens apply. A repository with other files is read from the branch where the hub
stores its conversion to Parquet.
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
from vitrail.errors import DataError, NotFoundError, VitrailError, did_you_mean

REPOSITORY_PATTERN = re.compile(r"([\w.\-]+/[\w.\-]+)(?:@([^:]+))?(?::(.+))?", re.ASCII)
PARQUET_BRANCH = "refs/convert/parquet"
"""Branch of the hub's conversion to Parquet: CONFIG/SPLIT/0000.parquet."""
SHARD_COUNT = re.compile(r"-(\d+)-of-(\d+)")
DATASET_CARD = "README.md"


class HubProgressBar(tqdm):
    """The hub's progress bar, shown only on a terminal."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options.setdefault("disable", None)  # None: tqdm disables itself if the output is not a terminal
        super().__init__(*args, **options)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Repository:
    """A dataset on the hub: repository, revision and configuration."""

    name: str
    revision: str | None
    config: str | None

    def __str__(self) -> str:
        return self.name + (f"@{self.revision}" if self.revision else "")


def parse_repository(spec: str) -> Repository:
    match = REPOSITORY_PATTERN.fullmatch(HUB_URL.sub("", spec.strip()).rstrip("/"))
    if match is None:
        raise NotFoundError(
            f"hf:{spec} is not a dataset name; expected hf:user/name, optionally with @revision or :config."
        )
    return Repository(*match.groups())


def open_hub(spec: str, config: DataConfig, *, require_labels: bool = True) -> SourceSplits:
    """Open the splits of a dataset on the hub; download what is not in the cache."""
    repository = parse_repository(spec)
    try:
        folder, files = _fetch(repository)
    except VitrailError:
        raise
    except Exception as error:
        translated = _translate_error(error, repository)
        if translated is None:
            raise
        raise translated from error
    paths = {split: [folder / name for name in names] for split, names in files.items()}
    return open_table(paths, config, repository.name.split("/")[1], require_labels=require_labels)


def select_files(names: Sequence[str], card: dict[str, Any], repository: Repository) -> dict[str, list[str]]:
    """Split -> its Parquet files, for the requested configuration or the only one."""
    names = sorted(n for n in names if n.endswith(".parquet"))
    configs = _configs_from_card(names, card) or _configs_from_paths(names)
    if not configs:
        return {}
    config = repository.config or next((c for c in ("default", "") if c in configs), None)
    if config is None and len(configs) > 1:
        listed = ", ".join(sorted(configs)[:8])
        raise DataError(
            f"{repository} has several configurations ({listed}); choose one: hf:{repository}:{min(configs)}."
        )
    config = config if config is not None else next(iter(configs))
    if config not in configs:
        raise NotFoundError(f"{repository} has no configuration {config!r}{did_you_mean(config, configs)}")
    splits: dict[str, list[str]] = {}
    for split, files in configs[config].items():
        splits.setdefault(split_from_name(split) or split, []).extend(files)
    train = splits.get("train") or next(iter(splits.values()))
    selected = {"train": train}
    for split in ("validation", "test"):
        if split in splits and splits[split] is not train:
            selected[split] = splits[split]
    return selected


def _configs_from_card(names: Sequence[str], card: dict[str, Any]) -> dict[str, dict[str, list[str]]]:
    """Config -> split -> files, from the metadata of the dataset card."""
    configs: dict[str, dict[str, list[str]]] = {}
    for config in card.get("configs") or []:
        files = config.get("data_files")
        files = [{"split": "train", "path": files}] if isinstance(files, str) else files or []
        for entry in (f for f in files if isinstance(f, dict)):
            paths = entry.get("path") or []
            patterns = [paths] if isinstance(paths, str) else paths
            matching = [n for n in names if any(fnmatch.fnmatch(n, p) for p in patterns)]
            if matching:
                configs.setdefault(config.get("config_name", "default"), {})[entry.get("split", "train")] = matching
    return configs


def _configs_from_paths(names: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """Config -> split -> files, from paths: SPLIT-00000-of-00001.parquet, CONFIG/SPLIT/0000.parquet, data/SPLIT-..."""
    configs: dict[str, dict[str, list[str]]] = {}
    for name in names:
        *folders, file = name.split("/")
        config_folders = [f for f in folders if f != "data" and not split_from_name(f)]
        splits = (split_from_name(part) for part in (file, *reversed(folders)))
        split = next((split for split in splits if split), "train")
        configs.setdefault("/".join(config_folders), {}).setdefault(split, []).append(name)
    return configs


def _fetch(repository: Repository) -> tuple[Path, dict[str, list[str]]]:
    """Download the files to read: the folder of the repository in the cache, and split -> file names."""
    branches = [repository.revision] if repository.revision else [None, PARQUET_BRANCH]
    unreachable: Exception | None = None
    for revision in branches:
        names, online = None, True
        try:
            names = _list_files(repository.name, revision)
        except Exception as error:
            if isinstance(error, errors.RevisionNotFoundError) and revision == PARQUET_BRANCH:
                break
            if not _is_unreachable(error):
                raise
            online, unreachable = False, error
            names = _cached_files(repository.name, revision)
        files = select_files(names, _read_card(repository.name, revision, names, online), repository)
        if files:
            to_download = [n for split_files in files.values() for n in split_files]
            if not online:
                _check_complete(to_download, repository)
            return _download(repository.name, revision, to_download, local=not online), files
    if unreachable is not None:
        raise unreachable
    raise NotFoundError(
        f"{repository} has no Parquet files on the hub, and no conversion to Parquet; download its files yourself."
    )


def _list_files(name: str, revision: str | None) -> list[str]:
    """All file names of a repository, from the cached listing or from the hub."""
    cached = getattr(huggingface_hub, "get_cached_repo_tree", None)  # older versions do not cache listings
    if cached is not None:
        try:
            return [file.path for file in cached(name, repo_type="dataset", revision=revision)]
        except (errors.CachedRepoTreeNotFoundError, errors.LocalEntryNotFoundError):
            pass
    info = HfApi(library_name="vitrail").dataset_info(name, revision=revision)
    return [file.rfilename for file in info.siblings or []]


def _cached_files(name: str, revision: str | None) -> list[str]:
    """The files of a repository that are in the cache."""
    try:
        folder = _download(name, revision, [], local=True)
    except errors.LocalEntryNotFoundError:
        return []
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def _download(name: str, revision: str | None, files: Sequence[str], local: bool = False) -> Path:
    """The repository's folder in the cache, after missing files have been downloaded (local: without)."""

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


def _read_card(name: str, revision: str | None, names: Sequence[str], online: bool) -> dict[str, Any]:
    """The metadata at the top of the repository's README; empty if there is none."""
    if DATASET_CARD not in names:
        return {}
    folder = _download(name, revision, [DATASET_CARD], local=not online)
    try:
        return metadata_load(folder / DATASET_CARD) or {}
    except (OSError, ValueError, YAMLError):  # not valid YAML: the file names are used instead
        return {}


def _check_complete(files: Sequence[str], repository: Repository) -> None:
    """Raise NotFoundError if a numbered file (train-00000-of-00002) is missing from the cache."""
    for name in files:
        match = SHARD_COUNT.search(name)
        count = len(fnmatch.filter(files, SHARD_COUNT.sub("-*-of-*", name))) if match else 0
        if match and count != int(match[2]):
            raise NotFoundError(
                f"the cache {constants.HF_HUB_CACHE} has {count} of {int(match[2])} files of {repository} like {name}, "
                "and the hub cannot be reached; connect to the network and try again."
            )


def _is_unreachable(error: Exception) -> bool:
    """Whether the error is about the connection, not the repository: offline mode, no network, server error."""
    if isinstance(error, errors.HfHubHTTPError):
        return error.response.status_code >= 500
    return isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError | errors.HTTPError)  # type: ignore[attr-defined]


def _translate_error(error: Exception, repository: Repository) -> VitrailError | None:
    """A one-sentence error for an exception of huggingface_hub; None for other exceptions."""
    hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    page = f"{hub}/datasets/{repository.name}"
    token = "use a token with access to it (`hf auth login`, or HF_TOKEN)"
    if isinstance(error, errors.GatedRepoError):
        return NotFoundError(f"{repository} is gated: accept its terms at {page}, and {token}.")
    if isinstance(error, errors.RevisionNotFoundError):
        return NotFoundError(f"{repository.name} has no revision {repository.revision!r}; see {page}/tree/main.")
    if isinstance(error, errors.RepositoryNotFoundError):
        return NotFoundError(f"no public dataset {repository.name} at {hub}; check the name, or {token}.")
    if _is_unreachable(error):
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        if constants.HF_HUB_OFFLINE:
            reason = "HF_HUB_OFFLINE is set"
        return NotFoundError(
            f"cannot download {repository} from {hub} ({reason}), and it is not in the cache {cache}; "
            "check the connection and try again."
        )
    if isinstance(error, errors.HfHubHTTPError):
        return NotFoundError(f"{hub} denied access to {repository} (status {error.response.status_code}); {token}.")
    if isinstance(error, OSError):
        return DataError(f"cannot write {repository} to the cache {cache}: {error}.")
    return None
