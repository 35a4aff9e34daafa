"""Datasets on the Hugging Face hub, as Parquet: `hf:user/name`, `hf:user/name@revision:config`.

Only the Parquet files of one configuration are downloaded, to the cache of huggingface_hub; its
offline mode and tokens apply. A repository with other files is read from the branch where the hub
stores its conversion to Parquet.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from huggingface_hub.errors import RevisionNotFoundError
from huggingface_hub.repocard import metadata_load
from yaml import YAMLError  # type: ignore[import-untyped]

from vitrail.config import DataConfig
from vitrail.data.sources.base import SourceSplits
from vitrail.data.sources.source_spec import HUB_URL
from vitrail.data.sources.table import open_table, split_from_name
from vitrail.errors import DataError, NotFoundError, did_you_mean
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

REPOSITORY_PATTERN = re.compile(r"([\w.\-]+/[\w.\-]+)(?:@([^:]+))?(?::(.+))?", re.ASCII)
PARQUET_BRANCH = "refs/convert/parquet"
"""Branch of the hub's conversion to Parquet: CONFIG/SPLIT/0000.parquet."""
SHARD_COUNT = re.compile(r"-(\d+)-of-(\d+)")
DATASET_CARD = "README.md"


def parse_repository(spec: str) -> tuple[HubRepository, str | None]:
    """'user/name@revision:config' -> the repository and the configuration; None stands for the default or only one."""
    match = REPOSITORY_PATTERN.fullmatch(HUB_URL.sub("", spec.strip()).rstrip("/"))
    if match is None:
        raise NotFoundError(
            f"hf:{spec} is not a dataset name; expected hf:user/name, optionally with @revision or :config."
        )
    return HubRepository("dataset", match[1], match[2]), match[3]


def open_hub(spec: str, config: DataConfig, *, require_labels: bool = True) -> SourceSplits:
    """Open the splits of a dataset on the hub; download what is not in the cache."""
    repo, config_name = parse_repository(spec)
    with explain_errors(repo):
        folder, files = _fetch(repo, config_name)
    paths = {split: [folder / name for name in names] for split, names in files.items()}
    return open_table(paths, config, repo.name.split("/")[1], require_labels=require_labels)


def select_files(
    names: Sequence[str], card: dict[str, Any], repo: HubRepository, config: str | None = None
) -> dict[str, list[str]]:
    """Split -> its Parquet files, for the requested configuration or the only one."""
    names = sorted(n for n in names if n.endswith(".parquet"))
    configs = _configs_from_card(names, card) or _configs_from_paths(names)
    if not configs:
        return {}
    config = config or next((c for c in ("default", "") if c in configs), None)
    if config is None and len(configs) > 1:
        listed = ", ".join(sorted(configs)[:8])
        raise DataError(f"{repo} has several configurations ({listed}); choose one: hf:{repo}:{min(configs)}.")
    config = config if config is not None else next(iter(configs))
    if config not in configs:
        raise NotFoundError(f"{repo} has no configuration {config!r}{did_you_mean(config, configs)}")
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


def _fetch(repo: HubRepository, config: str | None) -> tuple[Path, dict[str, list[str]]]:
    """Download the files to read: the folder of the repository in the cache, and split -> file names."""
    branches = [repo] if repo.revision else [repo, replace(repo, revision=PARQUET_BRANCH)]
    unreachable: Exception | None = None
    for branch in branches:
        names, complete = cached_listing(branch), True
        if names is None:
            try:
                names = list_files(branch)
            except Exception as error:
                if isinstance(error, RevisionNotFoundError) and branch.revision == PARQUET_BRANCH:
                    break
                if not is_unreachable(error):
                    raise
                complete, unreachable = False, error
                names = cached_files(branch)
        files = select_files(names, _read_card(branch, names), repo, config)
        if files:
            needed = [n for split_files in files.values() for n in split_files]
            if not complete:
                _check_complete(needed, repo)
            return _local_folder(branch, needed), files
    if unreachable is not None:
        raise unreachable
    raise NotFoundError(
        f"{repo} has no Parquet files on the hub, and no conversion to Parquet; download its files yourself."
    )


def _local_folder(repo: HubRepository, files: Sequence[str]) -> Path:
    """The repository's folder in the cache, after missing files have been downloaded."""
    return cached_snapshot(repo, files) or download(repo, files)


def _read_card(repo: HubRepository, names: Sequence[str]) -> dict[str, Any]:
    """The metadata at the top of the repository's README; empty if there is none."""
    if DATASET_CARD not in names:
        return {}
    folder = _local_folder(repo, [DATASET_CARD])
    try:
        return metadata_load(folder / DATASET_CARD) or {}
    except (OSError, ValueError, YAMLError):  # not valid YAML: the file names are used instead
        return {}


def _check_complete(files: Sequence[str], repo: HubRepository) -> None:
    """Raise NotFoundError if a numbered file (train-00000-of-00002) is missing from the cache."""
    for name in files:
        match = SHARD_COUNT.search(name)
        count = len(fnmatch.filter(files, SHARD_COUNT.sub("-*-of-*", name))) if match else 0
        if match and count != int(match[2]):
            raise NotFoundError(
                f"the cache {constants.HF_HUB_CACHE} has {count} of {int(match[2])} files of {repo} like {name}, "
                "and the hub cannot be reached; connect to the network and try again."
            )
