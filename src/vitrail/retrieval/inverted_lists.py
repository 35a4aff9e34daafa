"""Approximate nearest neighbors with FAISS: inverted lists in a memory-mapped file.

k-means on a sample divides the vectors into lists. A query is compared with the centroids, and then with the vectors
of the nearest lists only (`probes`). Vectors are stored in float16. Building reads the vectors once for
the sample and once to add them, and keeps the sample and one shard of codes in memory. Shards are files, merged into
one file of lists that searches map, so that neither step needs memory for all vectors.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import ConfigError, DataError, first_line
from vitrail.evaluation.knn import normalize_rows
from vitrail.retrieval.exact_search import Hits

# N vectors in all, B vectors of a block, D features, Q queries

STRUCTURE, LISTS = "index.bin", "lists.bin"
"""Files: centroids and offsets, a few MiB that are read; and the lists, which are mapped."""
CODES = "SQfp16"
"""FAISS's name for vectors in float16. With int8, recall@10 did not exceed 0.87 (docs/log.md)."""
VECTORS_PER_CENTROID = 40
"""Size of the sample that k-means learns from; FAISS warns below 39."""
SHARD_BYTES = 2**28
"""Codes in memory while adding."""
MAX_LISTS = 65536


def is_available() -> bool:
    """Whether FAISS is installed. On Windows it cannot map lists and is not used."""
    return importlib.util.find_spec("faiss") is not None and hasattr(import_faiss(), "OnDiskInvertedLists")


def import_faiss() -> Any:
    try:
        return importlib.import_module("faiss")
    except ImportError as error:
        raise ConfigError("an index needs FAISS, which is not installed; try pip install 'vitrail[search]'.") from error


def default_lists(count: int) -> int:
    """Number of lists for this many vectors: 4 times the square root, so that centroids and lists cost about as much.

    Fewer if the vectors could not train as many.
    """
    return max(min(round(4 * math.sqrt(count)), count // VECTORS_PER_CENTROID, MAX_LISTS), 1)


def check_lists(lists: int, count: int) -> None:
    most = max(count // VECTORS_PER_CENTROID, 1)
    if not 1 <= lists <= most:
        raise ConfigError(
            f"lists={lists} for {count:,} vectors; expected 1 to {most:,}, {VECTORS_PER_CENTROID} vectors each."
        )


def train(sample: Tensor, lists: int) -> Any:
    """An empty FAISS index whose centroids are learned from a sample, B D."""
    faiss = import_faiss()
    index = faiss.index_factory(sample.shape[1], f"IVF{lists},{CODES}", faiss.METRIC_INNER_PRODUCT)
    with _threads(faiss):
        index.train(normalize_rows(sample).numpy())
    return index


def write_lists(index: Any, blocks: Iterable[tuple[int, Tensor]], folder: Path) -> None:
    """Add blocks of (first row, B D) to a trained index and write it to `folder`, in twice its space."""
    faiss = import_faiss()
    merge = importlib.import_module("faiss.contrib.ondisk").merge_ondisk
    shards: list[Path] = []

    def write_shard() -> None:
        shards.append(folder / f"shard-{len(shards)}.bin")
        faiss.write_index(index, str(shards[-1]))
        index.reset()

    with _threads(faiss), _explained(folder):
        for start, block in blocks:
            index.add_with_ids(normalize_rows(block).numpy(), np.arange(start, start + len(block), dtype=np.int64))
            if index.ntotal * (index.code_size + 8) >= SHARD_BYTES:
                write_shard()
        if index.ntotal or not shards:
            write_shard()
        merge(index, [str(shard) for shard in shards], str(folder / LISTS))
        faiss.write_index(index, str(folder / STRUCTURE))
    for shard in shards:
        shard.unlink()


class InvertedLists:
    """An index on disk, with its lists mapped into memory. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._faiss = import_faiss()
        flags = self._faiss.IO_FLAG_READ_ONLY | self._faiss.IO_FLAG_ONDISK_SAME_DIR
        with _explained(folder):
            self._index = self._faiss.read_index(str(folder / STRUCTURE), flags)

    def __len__(self) -> int:
        return int(self._index.ntotal)

    @property
    def lists(self) -> int:
        return int(self._index.nlist)

    @property
    def width(self) -> int:
        return int(self._index.d)

    def search(self, queries: Tensor, k: int, probes: int) -> Hits:
        """The `k` nearest rows in the `probes` nearest lists of each query; more lists if those have fewer rows."""
        k, probes = min(k, len(self)), min(probes, self.lists)
        vectors = normalize_rows(queries).numpy()
        with _threads(self._faiss):
            similarity, row = self._index.search(vectors, k, params=self._parameters(probes))
            while probes < self.lists and (short := np.flatnonzero(row[:, -1] < 0)).size:
                probes = min(2 * probes, self.lists)
                similarity[short], row[short] = self._index.search(vectors[short], k, params=self._parameters(probes))
        if row.size and not -1 <= row.min() <= row.max() < len(self):
            raise DataError("the index is damaged: it has rows that do not exist; build it again with --build.")
        return Hits(torch.from_numpy(similarity).clamp(-1, 1), torch.from_numpy(row))

    def _parameters(self, probes: int) -> Any:
        return self._faiss.SearchParametersIVF(nprobe=probes)


@contextmanager
def _threads(faiss: Any) -> Iterator[None]:
    """Use as many threads as torch does."""
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(torch.get_num_threads())
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """FAISS's errors in one sentence; a full disk stays an OSError where FAISS says so."""
    try:
        yield
    except RuntimeError as error:
        reason = first_line(error).rpartition("Error: ")[2]
        raise DataError(f"FAISS could not read or write {folder} ({reason}); check the disk.") from error
