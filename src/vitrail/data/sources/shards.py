"""Images in tar files, in WebDataset's layout: `0017.jpg` and beside it `0017.cls`, `.json` or `.txt`.

Every sample can be reached by its number, on this machine or over HTTP(S) and S3, through an index
that is made once (index.py). Class names come from a `classes.json` beside the shards.
"""

from __future__ import annotations

import glob
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from vitrail.config import DataConfig
from vitrail.data.sources import remote, tar
from vitrail.data.sources.base import IMAGE_EXTENSIONS, Sample, SourceSplits, Targets
from vitrail.data.sources.label_encoding import LABEL_SEPARATOR, encode_labels, find_name, parse_class_names
from vitrail.data.sources.packed_strings import PackedStrings
from vitrail.data.sources.shard_index import LabelValue, ShardIndex, load_indexes
from vitrail.data.sources.table import LABEL_COLUMNS, split_from_name
from vitrail.errors import DataError, ImageError, NotFound, nearest

CLASS_NAMES_FILE = "classes.json"
TAR_EXTENSIONS = (".tar", ".tar.gz", ".tgz")
BRACES = re.compile(r"\{([^{}]*)\}")


class ShardSource:
    """Images inside tar files; the key is the shard's name and the sample's."""

    pixels = None

    def __init__(
        self,
        name: str,
        indexes: Sequence[ShardIndex],
        config: DataConfig,
        names: Sequence[str] | None,
        multi_label: bool | None,
    ) -> None:
        self.name = name
        self.files = tuple(index.file for index in indexes)
        places, keys, values = [], [], []
        counts: list[int] = []
        self.skipped = 0
        for index, shown in zip(indexes, short_names([i.shard for i in indexes]), strict=True):
            seen: dict[str, int] = {}
            for entry in index.samples:
                kind = tar.find_image(entry.files, IMAGE_EXTENSIONS, config.image_column)
                if kind is None:
                    self.skipped += 1
                    continue
                again = seen[entry.key] = seen.get(entry.key, 0) + 1
                keys.append(f"{shown}/{entry.key}" + (f"#{again}" if again > 1 else ""))
                places.append(entry.files[kind])
                values.append(find_label(entry.key, entry.texts, config.label_column))
            counts.append(len(places) - sum(counts))
        if not places:
            wanted = f"with a file .{config.image_column}" if config.image_column else "with an image"
            raise DataError(f"{indexes[0].shard} holds no sample {wanted}; wanted 0001.jpg, 0001.cls, 0002.jpg, ...")
        self._keys = PackedStrings(keys)
        self._ranges = np.array(places, np.int64)  # N 2: where it begins, and its size
        self._ends = np.cumsum(counts)
        labeled = encode_labels(to_arrow(values), names, f"{name}'s labels", multi_label)
        self.targets: Targets = labeled.targets
        self.labels, self.multi_label = labeled.labels, labeled.multi_label

    def __len__(self) -> int:
        return len(self._ranges)

    def __getitem__(self, index: int) -> Sample:
        index = range(len(self))[index]
        file = self.files[int(np.searchsorted(self._ends, index, side="right"))]
        start, size = self._ranges[index].tolist()
        data = _read_range(file, start, size)
        if len(data) < size:
            raise ImageError(f"{self.key(index)} is cut off: {file} has changed since it was indexed.")
        target = self.targets[index]
        return Sample(
            self.key(index), data, tuple(np.flatnonzero(target).tolist()) if self.multi_label else int(target)
        )

    def key(self, index: int) -> str:
        return self._keys[index]

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(n for n in np.diff(self._ends, prepend=0).tolist() if n)


def open_shards(spec: str, config: DataConfig) -> SourceSplits:
    """The parts of a set of shards: by their names, where those say train-, val- or test-."""
    parts = group_by_split(find_shards(spec))
    names = config.class_names or read_class_names(parts["train"][0])
    name = display_name(spec)
    sources: dict[str, ShardSource] = {}
    several: bool | None = None
    for part, shards in parts.items():
        mine = f"{name}/{part}" if len(parts) > 1 else name
        sources[part] = ShardSource(mine, load_indexes(shards), config, names, several)
        names, several = sources[part].labels, sources[part].multi_label
    notes = [f"{s.skipped:,} samples of {s.name} left out: no image in them" for s in sources.values() if s.skipped]
    for source in sources.values():
        if not source.multi_label and (none := int(np.count_nonzero(source.targets < 0))):
            notes.append(f"{none:,} of {len(source):,} images of {source.name} have no label")
    return SourceSplits(sources["train"], sources.get("validation"), sources.get("test"), tuple(notes))


def find_shards(spec: str) -> list[str]:
    """The shards that `train-{000..063}.tar`, `data/*.tar`, a folder or a file's name stands for."""
    found: list[str] = []
    for each in expand_braces(spec):
        if remote.is_remote(each):
            found += remote.glob(each) if "*" in each else [each]
        elif "*" in each:
            found += sorted(glob.glob(each))
        elif os.path.isdir(each):
            found += sorted(os.path.join(each, n) for n in os.listdir(each) if _is_tar(n))
        elif os.path.exists(each):
            found.append(each)
        else:
            folder = os.path.dirname(each) or "."
            near = [n for n in os.listdir(folder) if _is_tar(n)] if os.path.isdir(folder) else []
            raise NotFound(f"there is no shard {each}" + (nearest(os.path.basename(each), near) if near else "."))
    if not found:
        raise NotFound(f"no shards for {spec!r}; wanted tar files: shards:train-{{00000..00063}}.tar, or their folder.")
    return found


def expand_braces(pattern: str) -> Iterator[str]:
    """`{08..11}` and `{a,b}`, as shells read them."""
    match = BRACES.search(pattern)
    if match is None:
        yield pattern
        return
    first, dots, last = match[1].partition("..")
    if dots and first.isdigit() and last.isdigit():
        step = 1 if int(first) <= int(last) else -1
        words = [str(i).zfill(len(first)) for i in range(int(first), int(last) + step, step)]
    elif "," in match[1]:
        words = match[1].split(",")
    else:
        raise DataError(f"{match[0]!r} in {pattern!r} is no range; wanted {{00000..00063}} or {{a,b}}.")
    for word, rest in itertools.product(words, expand_braces(pattern[match.end() :])):
        yield f"{pattern[: match.start()]}{word}{rest}"


def group_by_split(shards: Sequence[str]) -> dict[str, list[str]]:
    """Part -> its shards; all of them are learned from where none is called train-."""
    found: dict[str, list[str]] = {}
    for shard in shards:
        found.setdefault(split_from_name(shard.rpartition("/")[2]), []).append(shard)
    if "train" not in found:
        return {
            "train": found.get("") or list(shards),
            **({k: v for k, v in found.items() if k} if "" in found else {}),
        }
    return {part: found[part] for part in ("train", "validation", "test") if part in found}


def read_class_names(shard: str) -> tuple[str, ...] | None:
    """What `classes.json` beside a shard says."""
    folder, slash, _ = shard.rpartition("/")
    path = f"{folder}{slash}{CLASS_NAMES_FILE}"
    try:
        text = remote.fetch(path) if remote.is_remote(path) else Path(path).read_bytes()
    except (FileNotFoundError, NotFound):
        return None
    try:
        return parse_class_names(json.loads(text), path)
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is no JSON: {error}.") from None


def find_label(key: str, texts: dict[str, Any], given: str | None) -> LabelValue:
    """A sample's label: in the file or the JSON entry asked for, else where labels usually are."""
    entries = texts["json"] if isinstance(texts.get("json"), dict) else {}
    if given is not None:
        return texts[given] if given in texts and given != "json" else entries.get(given)
    for kind in ("cls", "label", "labels"):
        if kind in texts:
            return texts[kind]
    if name := find_name(list(entries), LABEL_COLUMNS, None, "entry", key):
        return entries[name]
    for kind in ("json", "txt"):
        if not isinstance(texts.get(kind), dict | None):
            return texts[kind]
    return key.rpartition("/")[0].rpartition("/")[2] or None  # the folder it is in


def to_arrow(values: Iterable[LabelValue]) -> Any:
    """Labels of any kinds as one Arrow array: of words, or of lists of words."""
    words = [[_to_text(v) for v in value] if isinstance(value, list) else _to_text(value) for value in values]
    if any(isinstance(word, list) for word in words):
        lists = [w if isinstance(w, list) else [] if w is None else w.split(LABEL_SEPARATOR) for w in words]
        return pa.array(lists, pa.list_(pa.string()))
    return pa.array(words, pa.string())


def display_name(spec: str) -> str:
    """What people call it: the last part of its name that is no pattern."""
    parts = [p for p in re.split(r"[/\\]", re.sub(r"\.(tar(\.gz)?|tgz)$", "", spec)) if p]
    last = BRACES.sub("", parts[-1] if parts else spec).replace("*", "").strip("-_. ")
    return last or (parts[-2] if len(parts) > 1 else spec)


def short_names(shards: Sequence[str]) -> list[str]:
    """File names without .tar, with as much of their folders as tells them apart."""
    plain = [re.sub(r"\.(tar(\.gz)?|tgz)$", "", s.split("?")[0]) for s in shards]
    for depth in range(1, max(s.count("/") for s in plain) + 2):
        names = ["/".join(s.split("/")[-depth:]) for s in plain]
        if len(set(names)) == len(names):
            return names
    return plain


def _to_text(value: Any) -> str | None:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return None if value is None else str(value)


def _is_tar(name: str) -> bool:
    return name.lower().endswith(TAR_EXTENSIONS) and not name.startswith(".")


def _read_range(file: str, start: int, size: int) -> bytes:
    if remote.is_remote(file):
        return remote.fetch(file, start, start + size)
    try:
        with open(file, "rb", buffering=0) as opened:
            opened.seek(start)
            return opened.read(size)
    except OSError as error:
        raise ImageError(f"{file} cannot be read: {error.strerror or error}.") from error
