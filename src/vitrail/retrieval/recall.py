"""How many of the exact nearest neighbors an approximate search finds, measured on vectors of the collection itself.

A random sample of the vectors, which the index's training did not see, are the queries. Their exact neighbors are found
while the index is built. A query's own row does not count. Neighbors with the same similarity as the 10th exact one
count as well, since copies of an image cannot be told apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.retrieval.exact_search import Hits, nearer

# M sampled queries, B vectors of a block, D features

AT = 10
"""Neighbors that recall is measured on: recall@10."""
QUERIES = 500
"""At most; a tenth of a small collection."""
CANDIDATES = 64
"""Exact neighbors kept for each query, for ties with the 10th."""
TIE = 1e-6
SATURATED = 4
"""Recall is measured with more probes until this many measurements are equal."""
TARGET = 0.95
"""Default recall@10 that the number of probes is chosen for."""


@dataclass(frozen=True)
class RecallPoint:
    """Recall with a number of probes."""

    probes: int
    recall: float


class ApproximateSearch(Protocol):
    """What recall is measured of: `InvertedLists`."""

    @property
    def lists(self) -> int: ...

    def search(self, queries: Tensor, k: int, probes: int) -> Hits: ...


class RecallSample:
    """Queries whose exact neighbors are collected block by block."""

    def __init__(self, rows: Tensor, vectors: Tensor) -> None:
        self.rows, self.vectors = rows, vectors  # M; M D
        self.exact = Hits(vectors.new_empty(len(rows), 0), torch.empty(len(rows), 0, dtype=torch.int64))

    def collect(self, blocks: Iterator[tuple[int, Tensor]]) -> Iterator[tuple[int, Tensor]]:
        """Pass blocks on, and keep the exact neighbors among them."""
        for start, block in blocks:
            self.exact = nearer(self.exact, block, start, self.vectors, CANDIDATES + 1)
            yield start, block

    def measure(self, index: ApproximateSearch) -> list[RecallPoint]:
        """Recall with growing numbers of probes, until it grows no more or every list is read."""
        points: list[RecallPoint] = []
        for probes in _growing(index.lists):
            points.append(RecallPoint(probes, self.recall(index.search(self.vectors, AT + 1, probes))))
            recent = [point.recall for point in points[-SATURATED:]]
            if recent[-1] == 1 or (len(recent) == SATURATED and recent[-1] > 0.9 and max(recent) == recent[0]):
                break
        return points

    def recall(self, found: Hits) -> float:
        """The fraction of the 10 nearest other rows that were found."""
        kept = total = 0
        for own, similar, rows, candidates in zip(
            self.rows.tolist(), self.exact.similarity, self.exact.row, found.row.tolist(), strict=True
        ):
            others = rows != own
            similar, rows = similar[others], rows[others]
            expected = min(AT, len(rows))
            if not expected:
                continue
            accepted = set(rows[similar >= similar[expected - 1] - TIE].tolist())
            total += expected
            kept += min(len(accepted & set([row for row in candidates if row != own][:AT])), expected)
        return kept / total if total else 1.0


def held_out(count: int) -> int:
    """How many of `count` vectors are the queries that recall is measured with."""
    return min(QUERIES, count // 10)


def _growing(most: int) -> Iterator[int]:
    """1, 2, 3, 4, 5, 6, 8, 10, ...: a quarter more each time, up to `most`."""
    probes = 1
    while probes < most:
        yield probes
        probes = max(probes + 1, probes * 5 // 4)
    yield most


def choose_probes(points: Sequence[RecallPoint], target: float) -> RecallPoint:
    """The fewest probes that reach a recall; those with the highest recall if none does."""
    check_target(target)
    return next((p for p in points if p.recall >= target), max(points, key=lambda p: p.recall))


def check_target(target: float) -> None:
    if not 0 < target <= 1:
        raise ConfigError(f"recall={target}: expected more than 0 and at most 1, such as 0.95.")
