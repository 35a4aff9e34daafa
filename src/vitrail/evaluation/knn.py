"""Exact k nearest neighbors by cosine similarity, computed in blocks, and DINO's vote (arXiv 2104.14294).

Nearly all the time is spent in one matrix product, whose result is never sorted. Instead, bank entries are grouped, the
maximum of each group is kept, and the k-th largest maximum is a lower bound (floor) on the k-th largest similarity.
Only groups that reach the floor are searched, one or two for each query. Memory holds one block of similarities and
the candidates that reached the floor, so a bank can have millions of entries.

The last bits of a matrix product depend on the block size. So every candidate within rounding error of the floor is
recomputed pair by pair with the same arithmetic. The result is the same for any block size, and ties go to the lower
bank index.

Time of plain code relative to this module (2 shared cores, width 384, k=20):
scikit-learn's brute force 2.0 at 50,000 x 10,000 and 2.5 at 5,000 x 1,000, with other neighbors in 0.1 % of the rows;
blocked product and torch.topk 1.5 at 50,000 x 1,024 but 0.75 at 5,000 x 1,000, with ties in any order, and with exact
re-ranking 2.6 and 2.4; the same search without groups 1.09 and 1.15. See `python benchmarks/knn.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import ConfigError, DataError
from vitrail.runtime.malloc import tune_malloc

# Q queries, N bank entries, D features, K classes; a block has B entries and S queries

KS = (1, 5, 10, 20, 100)
"""Common numbers of neighbors."""
TEMPERATURE = 0.07
GROUP_SIZE = 8
"""Rows per group; groups are grouped again at the next level."""
NO_ENTRY = -4.0
"""Similarity of a missing entry: less than any cosine."""
PAIRS_PER_CHUNK = 256
"""Pairs compared at a time, so that they stay in a core's cache."""
GPU_CHUNK_VALUES = 2**24
"""Feature values of the pairs compared at a time on a GPU."""

Vote = Literal["weighted", "uniform"]


@dataclass(frozen=True)
class BlockSizes:
    """Number of bank entries and queries per block."""

    bank: int = 5120
    queries: int = 1024


BLOCK_SIZES = {"cpu": BlockSizes(), "cuda": BlockSizes(65536, 4096)}


@dataclass(frozen=True)
class Neighbors:
    """The nearest bank entries of each query, nearest first."""

    similarity: Tensor
    """Q k: cosines."""
    index: Tensor
    """Q k: indices into the bank."""


def nearest_neighbors(
    bank: Tensor,
    queries: Tensor,
    k: int,
    *,
    blocks: BlockSizes | None = None,
    advance: Callable[[int], None] | None = None,
) -> Neighbors:
    """N D bank and Q D queries -> the k bank entries with the largest cosine for each query.

    The search runs on the queries' device. A bank on another device is moved there, at once or, if GPU memory is short,
    block by block. `advance(n)` is called after each n queries.
    """
    check_k(k, len(bank))
    if bank.shape[1] != queries.shape[1]:
        raise DataError(
            f"the bank has {bank.shape[1]} features and the queries {queries.shape[1]}; expected features of the same "
            "model, layer and pooling."
        )
    blocks = blocks or BLOCK_SIZES.get(queries.device.type, BlockSizes())
    if queries.device.type == "cpu":
        tune_malloc()
    bank, queries = normalize_rows(bank), normalize_rows(queries)
    bank = _move_bank(bank, queries)
    if not len(queries):
        return Neighbors(queries.new_empty(0, k), torch.empty(0, k, dtype=torch.int64, device=queries.device))
    threads = torch.get_num_threads() if queries.device.type == "cpu" else 1
    rounds = -(-len(queries) // (threads * blocks.queries))
    size = -(-len(queries) // (threads * rounds))  # equal work for all threads
    found = []
    with _no_tf32(queries.device), _thread_pool(threads) as workers:
        for result in workers.map(lambda part: _search(bank, part, k, blocks.bank), queries.split(size)):
            found.append(result)
            if advance is not None:
                advance(len(result[0]))
    similarity, index = zip(*found, strict=True)
    return Neighbors(torch.cat(similarity), torch.cat(index))


def check_k(k: int, entries: int) -> None:
    if not 1 <= k <= entries:
        raise ConfigError(f"k={k} neighbors in a bank of {entries:,} entries; expected 1 to {entries:,}.")


def _move_bank(bank: Tensor, queries: Tensor) -> Tensor:
    """Move the bank to the queries' GPU if it fits in half of the free memory."""
    if queries.device.type != "cuda" or bank.device.type == "cuda":
        return bank
    return bank.to(queries.device) if bank.nbytes <= torch.cuda.mem_get_info(queries.device)[0] // 2 else bank


def normalize_rows(features: Tensor) -> Tensor:
    """Scale rows to length one; rows of zeros stay zero."""
    features = features.float()
    lengths = torch.linalg.vector_norm(features, dim=1, keepdim=True)
    if not lengths.isfinite().all():
        raise DataError("some features are NaN or infinite and cannot be compared; check the weights.")
    return features / lengths.clamp(min=1e-12)


@contextmanager
def _thread_pool(threads: int) -> Iterator[ThreadPoolExecutor]:
    """A pool whose threads each use one intra-op thread, so that small operations do not wait for each other."""
    try:
        with ThreadPoolExecutor(threads, initializer=lambda: torch.set_num_threads(1) if threads > 1 else None) as pool:
            yield pool
    finally:
        if threads > 1:
            torch.set_num_threads(threads)  # set_num_threads(1) also applies to threads that start later


@contextmanager
def _no_tf32(device: torch.device) -> Iterator[None]:
    """Disable TF32 matrix products on a GPU, because they round by more than the slack."""
    if device.type != "cuda":
        yield
        return
    matmul = torch.backends.cuda.matmul  # allow_tf32 raises an error when read after fp32_precision was set
    before, matmul.fp32_precision = matmul.fp32_precision, "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


@dataclass
class _Candidates:
    """Pairs of a query and a bank entry that may be among the k nearest."""

    query: Tensor
    entry: Tensor
    similarity: Tensor

    def select(self, rows: Tensor) -> _Candidates:
        """The candidates at these indices."""
        parts = (self.query, self.entry, self.similarity)
        return _Candidates(*(part.index_select(0, rows) for part in parts))

    def __len__(self) -> int:
        return len(self.query)


def _search(bank: Tensor, queries: Tensor, k: int, block: int) -> tuple[Tensor, Tensor]:
    """The nearest entries of one block of queries: similarities and indices, S k each."""
    slack = 2 * bank.shape[1] * 2.0**-24  # twice the rounding error of a dot product of unit vectors
    block = -(-max(min(block, len(bank)), 2 * k * GROUP_SIZE**2) // GROUP_SIZE**2) * GROUP_SIZE**2
    count, columns = len(queries), queries.T
    buffer, small = queries.new_empty(block, count), queries.new_empty(block // GROUP_SIZE, count)
    highest = queries.new_full((k, count), NO_ENTRY)  # the k largest group maxima so far, for each query
    best: list[_Candidates] = []
    waiting = 0
    for start in range(0, len(bank), block):
        part = bank[start : start + block].to(queries.device, non_blocking=True)
        torch.mm(part, columns, out=buffer[: len(part)])
        buffer[len(part) :] = NO_ENTRY
        levels = [buffer, _group_maxima(buffer, small), _group_maxima(small)]
        # After the first block, larger groups give a good enough floor and are faster to sort.
        tops = levels[-1] if start == 0 or len(levels[-1]) % 2 else levels[-1].view(2, -1, count).amax(0)
        highest = _k_largest(torch.cat([highest, tops]), k)
        floor = (highest.amin(0) - slack).clamp(min=NO_ENTRY / 2)
        best.append(_entries_above(levels, floor, start))
        waiting += len(best[-1])
        if waiting > 64 * k * count + block:  # many entries are almost equal
            best = [_exact_nearest(_concatenate(best), bank, queries, k, slack)]
            waiting = len(best[0])
    last = _concatenate(best)
    last = _exact_nearest(last.select(_nonzero(last.similarity >= floor[last.query])), bank, queries, k, slack)
    return last.similarity.view(count, k), last.entry.view(count, k)


def _group_maxima(rows: Tensor, out: Tensor | None = None) -> Tensor:
    """R S -> R/GROUP_SIZE S: the maximum of each group of rows, which are R/GROUP_SIZE apart for speed."""
    return torch.amax(rows.view(GROUP_SIZE, -1, rows.shape[1]), 0, out=out)


def _k_largest(values: Tensor, k: int) -> Tensor:
    """The k largest values of each column, unsorted."""
    if values.device.type != "cpu":
        return values.topk(k, 0, sorted=False).values
    rows = np.partition(values.T.numpy(), len(values) - k, axis=1)[:, -k:]  # four times as fast as torch.topk
    return torch.from_numpy(rows).T


def _entries_above(levels: Sequence[Tensor], floor: Tensor, start: int) -> _Candidates:
    """Entries of a block that reach their query's floor, found by descending from the largest groups."""
    row, query = _nonzero_2d(levels[-1] >= floor)
    values = levels[-1]
    for level in reversed(levels[:-1]):
        groups = len(level) // GROUP_SIZE
        values = _take_columns(level.view(GROUP_SIZE, -1), row * level.shape[1] + query)  # GROUP_SIZE pairs
        member, pair = _nonzero_2d(values >= floor[query])
        row, query, values = member * groups + row[pair], query[pair], values[member, pair]
    return _Candidates(query, row + start, values)


def _take_columns(rows: Tensor, columns: Tensor) -> Tensor:
    """Select columns; NumPy is nearly twice as fast as torch."""
    if rows.device.type != "cpu":
        return rows[:, columns]
    return torch.from_numpy(rows.numpy().take(columns.numpy(), axis=1))


def _nonzero_2d(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column indices of the true elements; NumPy is four times as fast as torch."""
    if mask.device.type != "cpu":
        row, column = mask.nonzero(as_tuple=True)
        return row, column
    flat = torch.from_numpy(np.flatnonzero(mask.numpy()))
    row = flat.div(max(mask.shape[1], 1), rounding_mode="floor")
    return row, flat - row * mask.shape[1]


def _nonzero(mask: Tensor) -> Tensor:
    """Indices of the true elements."""
    return torch.from_numpy(np.flatnonzero(mask.numpy())) if mask.device.type == "cpu" else mask.nonzero()[:, 0]


def _concatenate(parts: Sequence[_Candidates]) -> _Candidates:
    return _Candidates(*(torch.cat([getattr(p, name) for p in parts]) for name in ("query", "entry", "similarity")))


def _exact_nearest(candidates: _Candidates, bank: Tensor, queries: Tensor, k: int, slack: float) -> _Candidates:
    """The k nearest candidates of each query (or all, if fewer), nearest first, by exact pairwise cosines."""
    candidates = candidates.select(_argsort(candidates.query * len(bank) + candidates.entry))
    candidates = candidates.select(_nonzero(_near_kth(candidates, len(queries), k, slack)))
    candidates.similarity = _pairwise_cosines(candidates, bank, queries)
    candidates = candidates.select(_argsort((candidates.query << 32) - _sortable_bits(candidates.similarity)))
    return candidates.select(_nonzero(_position_in_query(candidates, len(queries)) < k))


def _position_in_query(candidates: _Candidates, count: int) -> Tensor:
    """The position of each candidate among those of its query; candidates are sorted by query."""
    counts = torch.bincount(candidates.query, minlength=count)
    return torch.arange(len(candidates), device=counts.device) - (counts.cumsum(0) - counts)[candidates.query]


def _sortable_bits(values: Tensor) -> Tensor:
    """float32 -> int32 with the same order; -0 and 0 are equal."""
    bits = (values + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _argsort(keys: Tensor) -> Tensor:
    """Stable argsort, ascending."""
    if keys.device.type != "cpu":
        return keys.argsort(stable=True)
    return torch.from_numpy(np.argsort(keys.numpy(), kind="stable"))


def _near_kth(candidates: _Candidates, count: int, k: int, slack: float) -> Tensor:
    """Which candidates, sorted by query, are within `slack` of their query's k-th largest similarity."""
    counts = torch.bincount(candidates.query, minlength=count)
    width = max(int(counts.max()), k)
    rows = candidates.similarity.new_full((width, count), NO_ENTRY)
    rows[_position_in_query(candidates, count), candidates.query] = candidates.similarity
    return candidates.similarity >= (_k_largest(rows, k).amin(0) - slack)[candidates.query]


def _pairwise_cosines(candidates: _Candidates, bank: Tensor, queries: Tensor) -> Tensor:
    """Cosines, each computed with the same arithmetic regardless of its position."""
    on_cpu = queries.device.type == "cpu"
    size = PAIRS_PER_CHUNK if on_cpu else max(GPU_CHUNK_VALUES // queries.shape[1], PAIRS_PER_CHUNK)
    pairs = list(zip(candidates.query.split(size), candidates.entry.split(size), strict=True))
    if on_cpu:  # np.einsum multiplies and sums without a temporary array
        a, b = bank.numpy(), queries.numpy()
        sums = [np.einsum("pd,pd->p", a.take(entry, axis=0), b.take(query, axis=0)) for query, entry in pairs]
        return torch.from_numpy(np.concatenate(sums))
    parts = []
    for query, entry in pairs:
        near = bank.index_select(0, entry.to(bank.device)).to(queries.device, comparison_dtype(queries.device))
        parts.append(near.mul_(queries.index_select(0, query)).sum(1).float())
    return torch.cat(parts)


def comparison_dtype(device: torch.device) -> torch.dtype:
    """float64, or float32 on MPS, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def class_votes(
    neighbors: Neighbors,
    targets: Tensor,
    num_classes: int,
    k: int,
    *,
    vote: Vote = "weighted",
    temperature: float = TEMPERATURE,
) -> Tensor:
    """Q K: the votes for each class from the k nearest neighbors.

    weighted: a neighbor counts exp(cosine / temperature), as in DINO; uniform: each neighbor counts one.
    """
    if not 1 <= k <= neighbors.index.shape[1]:
        raise ConfigError(f"k={k}: only the nearest {neighbors.index.shape[1]} were searched for.")
    similarity, index = neighbors.similarity[:, :k].cpu().double(), neighbors.index[:, :k].cpu()
    weights = (similarity / temperature).exp() if vote == "weighted" else torch.ones_like(similarity)
    votes = torch.zeros(len(index), num_classes, dtype=torch.float64)
    return votes.scatter_add_(1, targets.cpu()[index], weights)


def predicted_classes(votes: Tensor) -> Tensor:
    """Q: the class with the most votes; ties go to the lower class index."""
    return votes.argmax(1)
