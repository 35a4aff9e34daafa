"""The exact nearest neighbors among any number of vectors: block after block, with the best so far of each query.

Memory holds one block, its similarities and k neighbors of each query. The result does not depend on the blocks, and
ties go to the lower row (`evaluation/knn.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.evaluation.knn import nearest_neighbors

# Q queries, B vectors of a block, D features


@dataclass(frozen=True)
class Hits:
    """The nearest rows of each query, nearest first. Missing ones, at the end, have row -1."""

    similarity: Tensor
    """Q k: cosines."""
    row: Tensor
    """Q k: numbers of the rows."""


def exact_search(
    blocks: Iterable[tuple[int, Tensor]],
    queries: Tensor,
    k: int,
    advance: Callable[[int], None] = lambda count: None,
) -> Hits:
    """The `k` rows with the largest cosine among blocks of (first row, B D); fewer if there are fewer rows.

    `advance(n)` is called after each n rows.
    """
    best = Hits(queries.new_empty(len(queries), 0), torch.empty(len(queries), 0, dtype=torch.int64))
    for start, block in blocks:
        best = nearer(best, block, start, queries, k)
        advance(len(block))
    return best


def nearer(best: Hits, block: Tensor, start: int, queries: Tensor, k: int) -> Hits:
    """The `k` nearest of those found so far and of a further block, whose first row is `start`."""
    found = nearest_neighbors(block, queries, min(k, len(block)))
    similarity = torch.cat([best.similarity, found.similarity], dim=1)
    row = torch.cat([best.row, found.index + start], dim=1)
    order = similarity.argsort(dim=1, descending=True, stable=True)[:, :k]  # stable: ties go to the lower row
    return Hits(similarity.gather(1, order), row.gather(1, order))
