"""Approximate nearest neighbors with FAISS: inverted lists in a memory-mapped file.

k-means on a sample divides the vectors into lists. A query is compared with the centroids, and then with the vectors
of the nearest lists only (`probes`). Vectors are stored in float16. Building reads the vectors once for the sample
and once to add them, and keeps the sample and one shard of vectors in memory. Searches map the shards' files, so
that neither step needs memory for all vectors.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import CheckpointError, ConfigError, DataError, VitrailError, first_line
from vitrail.evaluation.knn import normalize_rows
from vitrail.retrieval.exact_search import Hits

# N vectors in all, B vectors of a block, D features, Q queries

SHARD = "shard-{:05d}.bin"
"""File name of a shard: the centroids, the sizes of the lists, and the lists of some of the vectors."""
CODES = "SQfp16"
"""FAISS's name for vectors in float16. With int8, recall@10 did not exceed 0.87 (docs/log.md)."""
VECTORS_PER_CENTROID = 40
"""Size of the sample that k-means learns from; FAISS warns below 39."""
SHARD_BYTES = 2**29
"""Vectors of a shard, in float16 with their row numbers; in memory while they are added."""
ID_BYTES = 8
MAX_LISTS = 65536


def is_available() -> bool:
    """Whether FAISS is installed. On Windows it cannot map lists and is not used."""
    return importlib.util.find_spec("faiss") is not None and sys.platform != "win32"


def import_faiss() -> Any:
    try:
        return importlib.import_module("faiss")
    except ImportError as error:
        raise ConfigError("an index needs FAISS, which is not installed; try pip install 'vitrail[search]'.") from error


def choose_lists(count: int, trainable: int, lists: int | None = None) -> int:
    """The number of lists for `count` vectors of which `trainable` can be learned from; `lists` is checked.

    By default 4 times the square root of the count, so that centroids and lists cost about as much.
    """
    most = trainable // VECTORS_PER_CENTROID
    if lists is None:
        return max(min(round(4 * math.sqrt(count)), most, MAX_LISTS), 1)
    if not 1 <= lists <= most:
        raise ConfigError(
            f"lists={lists} for {count:,} vectors; expected 1 to {most:,}: each is learned from {VECTORS_PER_CENTROID}."
        )
    return lists


def train(sample: Tensor, lists: int) -> Any:
    """An empty FAISS index whose centroids are learned from a sample, B D."""
    faiss = import_faiss()
    index = faiss.index_factory(sample.shape[1], f"IVF{lists},{CODES}", faiss.METRIC_INNER_PRODUCT)
    with _threads(faiss):
        index.train(normalize_rows(sample).numpy())
    return index


def write_lists(index: Any, blocks: Iterable[tuple[int, Tensor]], folder: Path) -> None:
    """Add blocks of (first row, B D) to a trained index and write it to `folder`, as one or more shards.

    CheckpointError if the disk is full.
    """
    faiss = import_faiss()
    shards = 0
    with _threads(faiss), _explained(folder, CheckpointError):
        for start, block in blocks:
            index.add_with_ids(normalize_rows(block).numpy(), np.arange(start, start + len(block), dtype=np.int64))
            if index.ntotal * (index.code_size + ID_BYTES) >= SHARD_BYTES:
                faiss.write_index(index, str(folder / SHARD.format(shards)))
                index.reset()
                shards += 1
        if index.ntotal:
            faiss.write_index(index, str(folder / SHARD.format(shards)))


class InvertedLists:
    """The shards of an index, with their lists mapped into memory. Thread-safe."""

    def __init__(self, shards: Sequence[Path]) -> None:
        faiss = self._faiss = import_faiss()
        with _explained(shards[0].parent):
            self._shards = [faiss.read_index(str(shard), faiss.IO_FLAG_MMAP) for shard in shards]
        self.list_bytes = [shard.ntotal * (shard.code_size + ID_BYTES) for shard in self._shards]
        """Bytes of the lists of each shard."""
        self._index, *others = self._shards
        if others:
            total = sum(shard.ntotal for shard in self._shards)
            lists = faiss.InvertedListsPtrVector()
            for shard in self._shards:
                lists.push_back(shard.invlists)
            self._joined = faiss.HStackInvertedLists(lists.size(), lists.data())
            self._first = self._index.invlists  # kept, since the index no longer owns it
            self._index.own_invlists = False
            self._index.replace_invlists(self._joined, False)
            self._index.ntotal = total
            for shard in others:
                shard.quantizer.reset()  # each has the same centroids

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
def _explained(folder: Path, kind: type[VitrailError] = DataError) -> Iterator[None]:
    """FAISS's errors in one sentence."""
    try:
        yield
    except RuntimeError as error:
        reason = first_line(error).rpartition("Error: ")[2]
        what = "write" if kind is CheckpointError else "read"
        raise kind(f"FAISS could not {what} {folder} ({reason}); check the disk.") from error
