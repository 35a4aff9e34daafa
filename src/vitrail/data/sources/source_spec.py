"""Parse the name of a data source: `folder:photos/`, `cifar10`, `hf:user/name` or a plain path."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vitrail.data.sources import remote
from vitrail.data.sources.catalog import CATALOG
from vitrail.errors import NotFoundError, did_you_mean
from vitrail.plugins import IN_MEMORY, plugin_names

KINDS = ("folder", "table", "shards", "stream", "hf", "builtin")
TABLE_EXTENSIONS = (".csv", ".tsv", ".parquet", ".pq")
MAX_ENTRIES_LISTED = 20
"""Subfolders listed, and files listed in each, to detect what a folder contains."""
HUB_URL = re.compile(r"(hf://datasets/|https?://(www\.)?(huggingface\.co|hf\.co)/datasets/)")
TAR_NAME = re.compile(r"\.(tar|tar\.gz|tgz)$", re.I)

EXAMPLES = {
    "folder": "photos/",
    "table": "labels.csv",
    "shards": "train-{00000..00063}.tar",
    "stream": "train-{00000..00063}.tar",
    "hf": "user/name",
    "builtin": "cifar10",
}


@dataclass(frozen=True)
class SourceSpec:
    """A parsed source name: one of KINDS, the name of a plugin or `memory`, and a path, URL or name."""

    kind: str
    location: str


def parse_source(text: str) -> SourceSpec:
    """Parse `KIND:LOCATION`, or detect the kind of a name or path without a prefix."""
    text = text.strip()
    kind, colon, location = text.partition(":")
    if colon and kind.lower() in KINDS:
        if not location.strip():
            raise NotFoundError(f"{text!r} has nothing after the colon; try {kind}:{EXAMPLES[kind.lower()]}.")
        return _with_kind(kind.lower(), os.path.expanduser(location.strip()))
    if text.startswith(IN_MEMORY):
        return SourceSpec("memory", location)
    if HUB_URL.match(text):
        return SourceSpec("hf", text)
    if name := canonical_name(text):
        return SourceSpec("builtin", name)
    if not os.path.exists(os.path.expanduser(text)) and kind in plugin_names("sources"):
        return SourceSpec(kind, location)
    return _detect(text)


def canonical_name(name: str) -> str | None:
    """The catalog's name of a dataset (CIFAR-10 -> cifar10), or None if it is not in the catalog."""
    letters = re.sub(r"[^a-z0-9]", "", name.lower())
    match = next((known for known in CATALOG if known.replace("-", "") == letters), None)
    return match if re.fullmatch(r"[\w\- ]+", name) else None


def _with_kind(kind: str, location: str) -> SourceSpec:
    if kind != "builtin":
        return SourceSpec(kind, location)
    if name := canonical_name(location):
        return SourceSpec(kind, name)
    raise NotFoundError(f"unknown built-in dataset {location!r}{did_you_mean(location, CATALOG)}")


def _detect(text: str) -> SourceSpec:
    """Detect the kind of a plain path by its extension or its contents."""
    path = os.path.expanduser(text)
    if TAR_NAME.search(path.split("?")[0]):
        return SourceSpec("shards", path)
    if remote.is_remote(text):
        raise NotFoundError(f"{text} is not the URL of a tar file; expected shards:, hf:user/name or a local path.")
    if path.lower().endswith(TABLE_EXTENSIONS):
        return SourceSpec("table", path)
    if os.path.isdir(path):
        return SourceSpec(_detect_folder_kind(Path(path)), path)
    if os.path.exists(path):
        raise NotFoundError(
            f"{path} is not a data source; expected class folders, {', '.join(TABLE_EXTENSIONS[:3])} or .tar."
        )
    kind, colon, _ = text.partition(":")
    if colon and len(kind) > 1 and "/" not in kind and "\\" not in kind:
        raise NotFoundError(f"unknown kind of data source {kind!r} in {text!r}{did_you_mean(kind, _known(KINDS))}")
    if "/" in text or "\\" in text:
        raise NotFoundError(f"no file or folder {path} (relative to {Path.cwd()}).")
    raise NotFoundError(
        f"unknown data source {text!r}: not a built-in dataset, and not a file or folder in {Path.cwd()}"
        f"{did_you_mean(text, _known(CATALOG))}"
    )


def _known(names: Iterable[str]) -> list[str]:
    return [*names, *plugin_names("sources")]


def _detect_folder_kind(path: Path) -> str:
    names = [n for n in os.listdir(path) if not n.startswith(".")]
    if any(TAR_NAME.search(n) for n in names):
        return "shards"
    for name in sorted(names)[:MAX_ENTRIES_LISTED]:
        if (path / name).is_dir():
            with os.scandir(path / name) as entries:
                names += [e.name for e in itertools.islice(entries, MAX_ENTRIES_LISTED)]
    return "table" if any(n.lower().endswith(".parquet") for n in names) else "folder"
