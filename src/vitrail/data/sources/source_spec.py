"""What a name of data means: `folder:photos/`, `cifar10`, `hf:user/name`, or a plain path."""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import dataclass
from pathlib import Path

from vitrail.data.sources import remote
from vitrail.data.sources.catalog import CATALOG
from vitrail.errors import NotFound, nearest

KINDS = ("folder", "table", "shards", "stream", "hf", "builtin")
TABLE_EXTENSIONS = (".csv", ".tsv", ".parquet", ".pq")
MAX_ENTRIES_LISTED = 20
"""So many folders are looked into, at so many files each, to tell what a folder is."""
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
    """A kind of source, and what it is given."""

    kind: str
    location: str


def parse_source(text: str) -> SourceSpec:
    """The kind, written or recognized."""
    text = text.strip()
    kind, colon, rest = text.partition(":")
    if colon and kind.lower() in KINDS:
        if not rest.strip():
            raise NotFound(f"{text!r} names nothing after the colon; wanted such as {kind}:{EXAMPLES[kind.lower()]}.")
        return _checked(kind.lower(), os.path.expanduser(rest.strip()))
    if HUB_URL.match(text):
        return SourceSpec("hf", text)
    if name := canonical_name(text):
        return SourceSpec("builtin", name)
    return _recognized(text)


def canonical_name(name: str) -> str | None:
    """The catalog's spelling of a data set's name: CIFAR-10, fashion_mnist; None where it has none."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    found = next((known for known in CATALOG if known.replace("-", "") == plain), None)
    return found if re.fullmatch(r"[\w\- ]+", name) else None


def _checked(kind: str, what: str) -> SourceSpec:
    if kind != "builtin":
        return SourceSpec(kind, what)
    if name := canonical_name(what):
        return SourceSpec(kind, name)
    raise NotFound(f"no data set {what!r} is built in{nearest(what, CATALOG)}")


def _recognized(text: str) -> SourceSpec:
    """A plain path, by what lies there."""
    path = os.path.expanduser(text)
    if TAR_NAME.search(path.split("?")[0]):
        return SourceSpec("shards", path)
    if remote.is_remote(text):
        raise NotFound(f"{text} is an address of no tar file; wanted shards:, hf:user/name or a path on this machine.")
    if path.lower().endswith(TABLE_EXTENSIONS):
        return SourceSpec("table", path)
    if os.path.isdir(path):
        return SourceSpec(_kind_of_folder(Path(path)), path)
    if os.path.exists(path):
        raise NotFound(
            f"{path} is no data; wanted a folder of class folders, {', '.join(TABLE_EXTENSIONS[:3])} or .tar."
        )
    kind, colon, _ = text.partition(":")
    if colon and len(kind) > 1 and "/" not in kind and "\\" not in kind:
        raise NotFound(f"no kind of data {kind!r} (in {text!r}){nearest(kind, KINDS)}")
    if "/" in text or "\\" in text:
        raise NotFound(f"there is no file or folder {path} (looked from {Path.cwd()}).")
    raise NotFound(f"no data {text!r}: neither built in nor a file or folder in {Path.cwd()}{nearest(text, CATALOG)}")


def _kind_of_folder(path: Path) -> str:
    names = [n for n in os.listdir(path) if not n.startswith(".")]
    if any(TAR_NAME.search(n) for n in names):
        return "shards"
    for name in sorted(names)[:MAX_ENTRIES_LISTED]:
        if (path / name).is_dir():
            with os.scandir(path / name) as entries:
                names += [e.name for e in itertools.islice(entries, MAX_ENTRIES_LISTED)]
    return "table" if any(n.lower().endswith(".parquet") for n in names) else "folder"
