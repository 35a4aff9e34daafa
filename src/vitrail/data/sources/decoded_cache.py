"""A digest of a dataset's content, and a cache of decoded datasets that are slow to decode."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path

import numpy as np

from vitrail.data.sources import data_cache
from vitrail.data.sources.catalog import DatasetInfo
from vitrail.data.sources.layouts import LabeledPixels
from vitrail.storage.atomic_write import atomic_file

METADATA_FILE = "content.json"
DECODED = "decoded"


def content_digest(splits: dict[str, LabeledPixels]) -> str:
    """SHA-256 of all pixels and labels, independent of the order of the images and of their encoding.

    It covers, for each split (train before test), the name, the shape, and the sorted SHA-256 of
    every image: its label (two bytes, little-endian), then its pixels (H W C).
    """
    hasher = hashlib.sha256()
    for split in sorted(splits, reverse=True):
        pixels, targets = splits[split]
        hasher.update(f"{split} {pixels.shape}".encode())
        labels = targets.astype("<u2").tobytes()
        rows = np.ascontiguousarray(pixels).reshape(len(pixels), -1)
        digests = [hashlib.sha256(labels[2 * i : 2 * i + 2] + row.data).digest() for i, row in enumerate(rows)]
        for digest in sorted(digests):
            hasher.update(digest)
    return hasher.hexdigest()


def decoded_dir(dataset: DatasetInfo) -> Path:
    return data_cache.cache_dir() / dataset.name / DECODED


def store(dataset: DatasetInfo, splits: dict[str, LabeledPixels], digest: str, origin: Path, verified: bool) -> None:
    """Write a decoded copy to the cache, unless the cache is not writable."""
    folder = decoded_dir(dataset)
    metadata = {"digest": digest, "origin": str(origin), "verified": verified}
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / METADATA_FILE).unlink(missing_ok=True)  # written last: its presence marks a complete copy
        for split, (pixels, targets) in splits.items():
            for kind, array in (("pixels", pixels), ("targets", targets)):
                with atomic_file(folder / f"{split}-{kind}.npy") as temporary, temporary.open("wb") as file:
                    np.save(file, array)
        with atomic_file(folder / METADATA_FILE) as temporary:
            temporary.write_text(json.dumps(metadata))


def load(dataset: DatasetInfo, origin: Path | None = None) -> tuple[dict[str, LabeledPixels], bool] | None:
    """The memory-mapped decoded copy, and whether its content was verified; None if there is no valid copy.

    origin: for a dataset without a published digest, the folder that the copy must have been made from.
    """
    folder = decoded_dir(dataset)
    try:
        metadata = json.loads((folder / METADATA_FILE).read_text())
        if dataset.digest and metadata["digest"] != dataset.digest:
            return None
        if not dataset.digest and origin not in (None, folder) and metadata["origin"] != str(origin):
            return None
        splits = {
            split: (np.load(folder / f"{split}-pixels.npy", mmap_mode="r"), np.load(folder / f"{split}-targets.npy"))
            for split in ("train", "test")
        }
        return splits, bool(metadata["verified"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
