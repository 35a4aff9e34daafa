"""Images in tar files with the WebDataset layout: `0017.jpg` next to `0017.cls`, `.json` or `.txt`.

An index that is built once (shard_index.py) gives random access to the samples, on local disks and
over HTTP(S) and S3. Class names come from a `classes.json` next to the shards.
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
from vitrail.errors import DataError, ImageError, NotFoundError, did_you_mean

CLASS_NAMES_FILE = "classes.json"
TAR_EXTENSIONS = (".tar", ".tar.gz", ".tgz")
BRACES = re.compile(r"\{([^{}]*)\}")


class ShardSource:
    """Images inside tar files; the key is the name of the shard and of the sample."""

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
        ranges, keys, values = [], [], []
        counts: list[int] = []
        self.skipped = 0
        for index, shard_name in zip(indexes, short_names([i.shard for i in indexes]), strict=True):
            seen: dict[str, int] = {}
            for sample in index.samples:
                extension = tar.find_image(sample.files, IMAGE_EXTENSIONS, config.image_column)
                if extension is None:
                    self.skipped += 1
                    continue
                occurrence = seen[sample.key] = seen.get(sample.key, 0) + 1
                keys.append(f"{shard_name}/{sample.key}" + (f"#{occurrence}" if occurrence > 1 else ""))
                ranges.append(sample.files[extension])
                values.append(find_label(sample.key, sample.texts, config.label_column))
            counts.append(len(ranges) - sum(counts))
        if not ranges:
            expected = f"with a .{config.image_column} file" if config.image_column else "with an image"
            raise DataError(f"{indexes[0].shard} has no sample {expected}; expected 0001.jpg, 0001.cls, 0002.jpg, ...")
        self._keys = PackedStrings(keys)
        self._ranges = np.array(ranges, np.int64)  # N 2: offset and size in bytes
        self._ends = np.cumsum(counts)
        encoded = encode_labels(to_arrow(values), names, f"{name}'s labels", multi_label)
        self.targets: Targets = encoded.targets
        self.labels, self.multi_label = encoded.labels, encoded.multi_label

    def __len__(self) -> int:
        return len(self._ranges)

    def __getitem__(self, index: int) -> Sample:
        index = range(len(self))[index]
        file = self.files[int(np.searchsorted(self._ends, index, side="right"))]
        start, size = self._ranges[index].tolist()
        data = _read_range(file, start, size)
        if len(data) < size:
            raise ImageError(f"{self.key(index)} is truncated: {file} has changed since it was indexed.")
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
    """Open the splits of a set of shards; file names that begin with train, val or test assign shards to splits."""
    files = group_by_split(find_shards(spec))
    names = config.class_names or read_class_names(files["train"][0])
    name = display_name(spec)
    sources: dict[str, ShardSource] = {}
    multi_label: bool | None = None
    for split, shards in files.items():
        split_name = f"{name}/{split}" if len(files) > 1 else name
        sources[split] = ShardSource(split_name, load_indexes(shards), config, names, multi_label)
        names, multi_label = sources[split].labels, sources[split].multi_label
    notes = [f"skipped {s.skipped:,} samples of {s.name} without an image" for s in sources.values() if s.skipped]
    for source in sources.values():
        if not source.multi_label and (unlabeled := int(np.count_nonzero(source.targets < 0))):
            notes.append(f"{unlabeled:,} of {len(source):,} images of {source.name} have no label")
    return SourceSplits(sources["train"], sources.get("validation"), sources.get("test"), tuple(notes))


def find_shards(spec: str) -> list[str]:
    """The shards that a file, a folder or a pattern names: `train-{000..063}.tar`, `data/*.tar`."""
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
            raise NotFoundError(f"no shard {each}" + (did_you_mean(os.path.basename(each), near) if near else "."))
    if not found:
        raise NotFoundError(
            f"no shards match {spec!r}; try shards:train-{{00000..00063}}.tar, or the folder of the shards."
        )
    return found


def expand_braces(pattern: str) -> Iterator[str]:
    """Expand `{08..11}` and `{a,b}` as a shell does."""
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
        raise DataError(f"{match[0]!r} in {pattern!r} is not a range; expected {{00000..00063}} or {{a,b}}.")
    for word, rest in itertools.product(words, expand_braces(pattern[match.end() :])):
        yield f"{pattern[: match.start()]}{word}{rest}"


def group_by_split(shards: Sequence[str]) -> dict[str, list[str]]:
    """Split -> its shards; without shards named train, those without a split name are the training split."""
    found: dict[str, list[str]] = {}
    for shard in shards:
        found.setdefault(split_from_name(shard.rpartition("/")[2]), []).append(shard)
    if "train" not in found:
        return {
            "train": found.get("") or list(shards),
            **({k: v for k, v in found.items() if k} if "" in found else {}),
        }
    return {split: found[split] for split in ("train", "validation", "test") if split in found}


def read_class_names(shard: str) -> tuple[str, ...] | None:
    """Class names from the `classes.json` next to a shard; None if there is none."""
    folder, slash, _ = shard.rpartition("/")
    path = f"{folder}{slash}{CLASS_NAMES_FILE}"
    try:
        text = remote.fetch(path) if remote.is_remote(path) else Path(path).read_bytes()
    except (FileNotFoundError, NotFoundError):
        return None
    try:
        return parse_class_names(json.loads(text), path)
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is not valid JSON: {error}.") from None


def find_label(key: str, texts: dict[str, Any], given: str | None) -> LabelValue:
    """A sample's label: from the file or the JSON key that is given, else from the usual places."""
    fields = texts["json"] if isinstance(texts.get("json"), dict) else {}
    if given is not None:
        return texts[given] if given in texts and given != "json" else fields.get(given)
    for kind in ("cls", "label", "labels"):
        if kind in texts:
            return texts[kind]
    if name := find_name(list(fields), LABEL_COLUMNS, None, "entry", key):
        return fields[name]
    for kind in ("json", "txt"):
        if not isinstance(texts.get(kind), dict | None):
            return texts[kind]
    return key.rpartition("/")[0].rpartition("/")[2] or None  # the folder of the sample


def to_arrow(values: Iterable[LabelValue]) -> Any:
    """Labels as one Arrow array of strings, or of lists of strings if any label is a list."""
    words = [[_to_text(v) for v in value] if isinstance(value, list) else _to_text(value) for value in values]
    if any(isinstance(word, list) for word in words):
        lists = [w if isinstance(w, list) else [] if w is None else w.split(LABEL_SEPARATOR) for w in words]
        return pa.array(lists, pa.list_(pa.string()))
    return pa.array(words, pa.string())


def display_name(spec: str) -> str:
    """Display name: the last part of the path, without patterns and extension."""
    parts = [p for p in re.split(r"[/\\]", re.sub(r"\.(tar(\.gz)?|tgz)$", "", spec)) if p]
    last = BRACES.sub("", parts[-1] if parts else spec).replace("*", "").strip("-_. ")
    return last or (parts[-2] if len(parts) > 1 else spec)


def short_names(shards: Sequence[str]) -> list[str]:
    """File names without .tar, prefixed with as many folders as needed to make them unique."""
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
        raise ImageError(f"cannot read {file}: {error.strerror or error}.") from error
