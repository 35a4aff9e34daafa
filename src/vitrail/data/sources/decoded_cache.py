"""What a data set holds, as one number, and a decoded copy of it where decoding takes long."""

from __future__ import annotations

import contextlib
import hashlib
import json
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from vitrail.data.sources import data_cache
from vitrail.data.sources.catalog import DatasetInfo
from vitrail.data.sources.layouts import LabeledPixels

METADATA_FILE = "content.json"
DECODED = "decoded"


def content_digest(parts: dict[str, LabeledPixels]) -> str:
    """SHA-256 over every image's pixels and label, whatever the order of the images and their encoding.

    Of each image the SHA-256 of its label (two bytes, the smaller first) and its pixels (H W C);
    of each part, train before test, its name, its shape and the sorted digests of its images.
    """
    whole = hashlib.sha256()
    for part in sorted(parts, reverse=True):
        pixels, targets = parts[part]
        whole.update(f"{part} {pixels.shape}".encode())
        labels = targets.astype("<u2").tobytes()
        rows = np.ascontiguousarray(pixels).reshape(len(pixels), -1)
        each = [hashlib.sha256(labels[2 * i : 2 * i + 2] + row.data).digest() for i, row in enumerate(rows)]
        for one in sorted(each):
            whole.update(one)
    return whole.hexdigest()


def decoded_dir(entry: DatasetInfo) -> Path:
    return data_cache.cache_dir() / entry.name / DECODED


def store(entry: DatasetInfo, parts: dict[str, LabeledPixels], found: str, origin: Path, sure: bool) -> None:
    """Put a decoded copy into the cache; where that cannot be written, do without."""
    home = decoded_dir(entry)
    facts = {"digest": found, "from": str(origin), "sure": sure}
    with contextlib.suppress(OSError):
        home.mkdir(parents=True, exist_ok=True)
        (home / METADATA_FILE).unlink(missing_ok=True)  # until all of it is there, none of it counts
        for part, (pixels, targets) in parts.items():
            for kind, array in (("pixels", pixels), ("targets", targets)):
                data_cache.write_atomic(home / f"{part}-{kind}.npy", partial(_save, array))
        data_cache.write_atomic(home / METADATA_FILE, lambda file: file.write(json.dumps(facts).encode()))


def load(entry: DatasetInfo, origin: Path | None = None) -> tuple[dict[str, LabeledPixels], bool] | None:
    """The decoded copy, mapped into memory, and whether it was verified; None where there is none of that."""
    home = decoded_dir(entry)
    try:
        facts = json.loads((home / METADATA_FILE).read_text())
        if entry.digest and facts["digest"] != entry.digest:
            return None
        if not entry.digest and origin not in (None, home) and facts["from"] != str(origin):
            return None
        parts = {
            part: (np.load(home / f"{part}-pixels.npy", mmap_mode="r"), np.load(home / f"{part}-targets.npy"))
            for part in ("train", "test")
        }
        return parts, bool(facts["sure"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _save(array: np.ndarray[Any, Any], file: IO[bytes]) -> None:
    np.save(file, array)
