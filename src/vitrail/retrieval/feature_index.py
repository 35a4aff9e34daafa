"""FeatureIndex: the nearest neighbors of vectors among stored features, exact or by an index.

Collections below `EXACT_BELOW` rows are compared one by one: that takes milliseconds and has no error. Larger ones are
searched through an index of FAISS (`inverted_lists`), which is built beside the features on first use.

FAISS rather than USearch, by measurement (`python benchmarks/search.py --usearch`; more in docs/log.md). For 200,000
vectors of width 192, inverted lists were built in 12 CPU seconds (USearch 30), take 76 MiB (102), and answer 3,000
queries per CPU second at recall@10 0.994 (1,500 at 0.989); at 0.951 both answer 6,600. The exact search answers 340.

Memory of building, in bytes, for N vectors of D features and L = 4 sqrt(N) lists: 4 D (40 L + 500) for the sample and
the recall queries, twice while k-means runs, 8 N for choosing them, and 512 MiB for a shard of vectors. On disk:
N (2 D + 8). Searching reads what it needs of the mapped lists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import CheckpointError, ConfigError, DataError, FormatError, NotFoundError
from vitrail.retrieval import index_file, inverted_lists
from vitrail.retrieval.exact_search import Hits, exact_search
from vitrail.retrieval.feature_store import FeatureStore
from vitrail.retrieval.index_file import IndexRecord
from vitrail.retrieval.inverted_lists import InvertedLists
from vitrail.retrieval.recall import TARGET, RecallPoint, RecallSample, check_target, choose_probes, held_out
from vitrail.runtime import warn_once
from vitrail.storage.atomic_write import new_folder

# N rows, Q queries, D features

EXACT_BELOW = 50_000
"""Collections with fewer rows get no index."""
MIN_INDEXED = 100
SEED = 0


@dataclass(frozen=True)
class Match:
    """A neighbor of a query."""

    key: str
    """Name of the image in its data set."""
    split: str
    label: str | list[str] | None
    """Class name; several for multi-label data, None without a label."""
    similarity: float
    """Cosine of the features, from -1 to 1."""
    row: int
    """Number of the row in the features."""


class FeatureIndex:
    """Stored features that can be searched.

    `FeatureIndex.open("features.parquet")` uses the index beside the features, and builds it if there is none that
    fits; `FeatureIndex.build` builds it anew. `search` finds the rows that are nearest to some vectors.
    """

    def __init__(
        self, store: FeatureStore, lists: InvertedLists | None = None, point: RecallPoint | None = None
    ) -> None:
        """Without lists, the search is exact."""
        self.store, self._lists, self._point = store, lists, point
        self._in_memory: Tensor | None = None

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        recall: float = TARGET,
        exact: bool = False,
        started: Callable[[int], None] | None = None,
        advance: Callable[[int], None] | None = None,
    ) -> FeatureIndex:
        """Open the features of `vitrail embed`, a file or a folder of parts, for searching.

        recall  recall@10 that the search has to reach, by the measurement made when the index was built
        exact   compare every row, without an index

        If an index is built, `started(n)` is called with the number of rows to read, then `advance(n)` after n more.
        """
        check_target(recall)
        store = FeatureStore.open(path)
        if exact:
            return cls._exact(store)
        try:
            return cls._indexed(store, index_file.read_record(store), recall)
        except NotFoundError:
            if len(store) < EXACT_BELOW:
                return cls._exact(store)
        except (DataError, FormatError) as error:
            warn_once([f"{str(error).rstrip('.')}; it is not used"])
            if len(store) < EXACT_BELOW:
                return cls._exact(store)
        if not inverted_lists.is_available():
            warn_once(
                [f"searching all {len(store):,} rows, because FAISS is not installed: pip install 'vitrail[search]'"]
            )
            return cls._exact(store)
        try:
            return cls.build(path, recall=recall, started=started, advance=advance, only_if_missing=True)
        except CheckpointError as error:
            warn_once([f"{str(error).rstrip('.')}. Searching all {len(store):,} rows instead"])
            return cls._exact(store)

    @classmethod
    def build(
        cls,
        path: str | Path,
        *,
        lists: int | None = None,
        recall: float = TARGET,
        started: Callable[[int], None] | None = None,
        advance: Callable[[int], None] | None = None,
        only_if_missing: bool = False,
    ) -> FeatureIndex:
        """Build the index beside the features, replacing one that exists.

        lists            number of inverted lists; by default 4 times the square root of the number of rows
        only_if_missing  use an index that another process has built in the meantime
        """
        check_target(recall)
        store = FeatureStore.open(path)
        if len(store) < MIN_INDEXED:
            raise DataError(f"{store.path} has {len(store):,} rows, an index needs {MIN_INDEXED}; search without one.")
        lists = inverted_lists.choose_lists(len(store), len(store) - held_out(len(store)), lists)
        inverted_lists.import_faiss()
        if not inverted_lists.is_available():
            raise ConfigError("FAISS cannot map its lists on this system; search exactly with --exact.")
        with index_file.build_lock(store.path):
            index_file.remove_leftovers(store.path)
            if only_if_missing:
                try:
                    return cls._indexed(store, index_file.read_record(store), recall)
                except (NotFoundError, DataError, FormatError):
                    pass
            _build(store, lists, started, advance)
            return cls._indexed(store, index_file.read_record(store), recall)

    @classmethod
    def _exact(cls, store: FeatureStore) -> FeatureIndex:
        if not len(store):
            raise DataError(f"{store.path} has no rows; embed at least one image.")
        return cls(store)

    @classmethod
    def _indexed(cls, store: FeatureStore, record: IndexRecord, recall: float) -> FeatureIndex:
        store = store.with_counts([part.num_rows for part in record.parts])
        folder = index_file.index_folder(store.path)
        found = InvertedLists(index_file.shard_paths(folder, len(record.shards)))
        if (len(found), found.width) != (len(store), store.width):
            raise DataError(f"{folder} is damaged: its rows are not those of the features.")
        point = choose_probes(record.recall, recall)
        if point.recall < recall:
            warn_once([f"the index reaches recall@10 {point.recall:.4f} at most, not {recall:g}; try exact search"])
        return cls(store, found, point)

    def __len__(self) -> int:
        return len(self.store)

    @property
    def metadata(self) -> dict[str, Any]:
        """How the features were made: model, weights, preprocessing, layers, data."""
        return self.store.metadata

    @property
    def is_exact(self) -> bool:
        return self._lists is None

    @property
    def recall(self) -> float:
        """Recall@10, measured when the index was built; 1 for the exact search."""
        return 1.0 if self._point is None else self._point.recall

    def __str__(self) -> str:
        if self._lists is None or self._point is None:
            return f"{len(self):,} images, searched exactly"
        read = f"{self._point.probes:,} of {self._lists.lists:,} lists"
        return f"{len(self):,} images, {read} read for each query, recall@10 {self._point.recall:.3f}"

    def nearest(self, vectors: Tensor, top: int = 10) -> Hits:
        """Q D -> the rows with the largest cosine, and the cosines: up to `top` of each query."""
        if top < 1:
            raise ConfigError(f"top={top}: expected at least 1.")
        if vectors.ndim != 2 or vectors.shape[1] != self.store.width:
            raise DataError(
                f"got vectors of shape {tuple(vectors.shape)}, expected N x {self.store.width} as in {self.store.path}."
            )
        queries = vectors.detach().float().cpu()
        if self._lists is not None and self._point is not None:
            return self._lists.search(queries, top, self._point.probes)
        return exact_search(self._blocks(), queries, top)

    def search(self, vectors: Tensor, top: int = 10) -> list[list[Match]]:
        """Q D -> the `top` most similar images of each query, most similar first."""
        hits = self.nearest(vectors, top)
        rows = self.store.rows([row for row in hits.row.flatten().tolist() if row >= 0])
        return [
            [
                Match(rows[row].key, rows[row].split, rows[row].label, similarity, row)
                for similarity, row in zip(similarities, numbers, strict=True)
                if row >= 0
            ]
            for similarities, numbers in zip(hits.similarity.tolist(), hits.row.tolist(), strict=True)
        ]

    def _blocks(self) -> Any:
        """All vectors: kept in memory if they are few."""
        if len(self) >= EXACT_BELOW:
            return self.store.blocks()
        if self._in_memory is None:
            self._in_memory = torch.cat([block for _, block in self.store.blocks()])
        return [(0, self._in_memory)]


def _build(
    store: FeatureStore,
    lists: int,
    started: Callable[[int], None] | None,
    advance: Callable[[int], None] | None,
) -> None:
    """Sample, train, add, measure, write."""
    if started is not None:
        started(2 * len(store))

    def read() -> Any:
        for start, block in store.blocks():
            yield start, block
            if advance is not None:
                advance(len(block))

    parts = index_file.describe_parts(store)
    rng = np.random.default_rng(SEED)
    chosen = rng.permutation(len(store))[: held_out(len(store)) + lists * inverted_lists.VECTORS_PER_CENTROID]
    count = held_out(len(store))
    sample, rows = _rows_of(read(), chosen)
    queries = RecallSample(torch.from_numpy(rows[:count]), sample[:count])
    trained = inverted_lists.train(sample[count:], lists)
    del sample
    with new_folder(index_file.index_folder(store.path), overwrite=True) as folder:
        inverted_lists.write_lists(trained, queries.collect(read()), folder)
        paths = index_file.shard_paths(folder)
        try:
            built = InvertedLists(paths)
        except DataError as error:  # FAISS does not notice a disk that is full at the end of a file
            raise CheckpointError(f"FAISS could not write {folder} (a file is incomplete); check the disk.") from error
        points = queries.measure(built)
        index_file.check_unchanged(store, parts)
        shards = [index_file.describe_shard(*shard) for shard in zip(paths, built.list_bytes, strict=True)]
        record = IndexRecord(parts, lists, tuple(points), tuple(shards))
        index_file.write_record(folder, record)


def _rows_of(blocks: Any, chosen: Any) -> tuple[Tensor, Any]:
    """The vectors of the chosen rows, in the chosen order, and their numbers; one pass over all blocks."""
    ordered = np.sort(chosen)
    found = []
    for start, block in blocks:
        first, last = np.searchsorted(ordered, (start, start + len(block)))
        found.append(block[torch.from_numpy(ordered[first:last] - start)])
    return torch.cat(found)[torch.from_numpy(np.searchsorted(ordered, chosen))], chosen
