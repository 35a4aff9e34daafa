"""k nearest neighbors by cosine, exactly, in blocks; and how they vote (DINO, arXiv 2104.14294).

Nearly all the time goes into one matrix product. What it gives is never sorted: the largest value of
each group of bank entries is kept, and the k-th largest of those is a floor under the k-th nearest
entry. Only groups that reach the floor are looked into, a score or two for each query. A million
features fit: a block of similarities and what reached the floor is all that is held.

A product's last bits depend on the sizes of the blocks. So whatever comes within its rounding of the
floor is compared anew, each pair by the same arithmetic: the answer is the same for blocks of any
size, and of equals the entry with the lower number comes first.
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

# Q queries and N bank entries of D features, K classes; S B similarities of a block, G groups in it

KS = (1, 5, 10, 20, 100)
"""Numbers of neighbors that are worth trying together."""
TEMPERATURE = 0.07
GROUP_SIZE = 8
"""So many similarities, or groups of them, are one group of the next level."""
NO_ENTRY = -4.0
"""Stands where there is no entry: less than any cosine."""
PAIRS_PER_CHUNK = 256
"""Pairs compared at a time: they stay in a core's cache."""
GPU_CHUNK_VALUES = 2**24
"""Numbers of such pairs at a time on a GPU."""

Vote = Literal["weighted", "uniform"]


@dataclass(frozen=True)
class BlockSizes:
    """How much is computed at once."""

    bank: int = 5120
    queries: int = 1024


BLOCK_SIZES = {"cpu": BlockSizes(), "cuda": BlockSizes(65536, 4096)}


@dataclass(frozen=True)
class Neighbors:
    """The nearest bank entries of each query, nearest first."""

    similarity: Tensor
    """Q k: cosines."""
    index: Tensor
    """Q k: numbers in the bank."""


def nearest_neighbors(
    bank: Tensor,
    queries: Tensor,
    k: int,
    *,
    blocks: BlockSizes | None = None,
    advance: Callable[[int], None] | None = None,
) -> Neighbors:
    """N D and Q D features -> the k bank entries of largest cosine for each query.

    They are compared where the queries lie. A bank that is elsewhere is moved there, at once or, where
    a GPU has too little room, block by block. `advance` hears of queries that are done.
    """
    check_k(k, len(bank))
    if bank.shape[1] != queries.shape[1]:
        raise DataError(
            f"the bank's features have {bank.shape[1]} numbers and the queries' {queries.shape[1]}; wanted those of "
            "one model, layer and pooling."
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
    size = -(-len(queries) // (threads * rounds))  # all threads have the same to do
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
        raise ConfigError(f"k={k} neighbors of a bank of {entries:,} entries; wanted 1 to {entries:,}.")


def _move_bank(bank: Tensor, queries: Tensor) -> Tensor:
    """The bank where the queries are, if half of a GPU's free memory holds it; else where it is."""
    if queries.device.type != "cuda" or bank.device.type == "cuda":
        return bank
    return bank.to(queries.device) if bank.nbytes <= torch.cuda.mem_get_info(queries.device)[0] // 2 else bank


def normalize_rows(features: Tensor) -> Tensor:
    """Rows of length one; a row of zeros stays what it is."""
    features = features.float()
    lengths = torch.linalg.vector_norm(features, dim=1, keepdim=True)
    if not lengths.isfinite().all():
        raise DataError("some features are NaN or infinite and cannot be compared; look for broken weights.")
    return features / lengths.clamp(min=1e-12)


@contextmanager
def _thread_pool(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that each compute alone: nothing is shared, and small steps need not wait for each other."""
    try:
        with ThreadPoolExecutor(threads, initializer=lambda: torch.set_num_threads(1) if threads > 1 else None) as pool:
            yield pool
    finally:
        if threads > 1:
            torch.set_num_threads(threads)  # threads that start later would else have what these had


@contextmanager
def _no_tf32(device: torch.device) -> Iterator[None]:
    """Inside, a GPU multiplies float32 as it is, whatever was allowed outside: TF32 rounds by more than the slack."""
    if device.type != "cuda":
        yield
        return
    matmul = torch.backends.cuda.matmul  # not allow_tf32, which cannot be read where both have been used
    before, matmul.fp32_precision = matmul.fp32_precision, "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


@dataclass
class _Candidates:
    """Pairs of a query and a bank entry that may be among the nearest."""

    query: Tensor
    entry: Tensor
    similarity: Tensor

    def select(self, rows: Tensor) -> _Candidates:
        """Those of some rows."""
        parts = (self.query, self.entry, self.similarity)
        return _Candidates(*(part.index_select(0, rows) for part in parts))

    def __len__(self) -> int:
        return len(self.query)


def _search(bank: Tensor, queries: Tensor, k: int, block: int) -> tuple[Tensor, Tensor]:
    """The nearest entries of a few queries."""
    slack = 2 * bank.shape[1] * 2.0**-24  # twice what rounding can do to a product of unit vectors
    block = -(-max(min(block, len(bank)), 2 * k * GROUP_SIZE**2) // GROUP_SIZE**2) * GROUP_SIZE**2
    count, columns = len(queries), queries.T
    buffer, few = queries.new_empty(block, count), queries.new_empty(block // GROUP_SIZE, count)
    highest = queries.new_full((k, count), NO_ENTRY)  # of groups, each query's largest k so far
    best: list[_Candidates] = []
    waiting = 0
    for start in range(0, len(bank), block):
        part = bank[start : start + block].to(queries.device, non_blocking=True)
        torch.mm(part, columns, out=buffer[: len(part)])
        buffer[len(part) :] = NO_ENTRY
        levels = [buffer, _group_maxima(buffer, few), _group_maxima(few)]
        # Where a floor is known already, groups of twice the size do: they are sorted sooner.
        tops = levels[-1] if start == 0 or len(levels[-1]) % 2 else levels[-1].view(2, -1, count).amax(0)
        highest = _k_largest(torch.cat([highest, tops]), k)
        floor = (highest.amin(0) - slack).clamp(min=NO_ENTRY / 2)
        best.append(_entries_above(levels, floor, start))
        waiting += len(best[-1])
        if waiting > 64 * k * count + block:  # many are nearly the same
            best = [_exact_nearest(_concatenate(best), bank, queries, k, slack)]
            waiting = len(best[0])
    last = _concatenate(best)
    last = _exact_nearest(last.select(_nonzero(last.similarity >= floor[last.query])), bank, queries, k, slack)
    return last.similarity.view(count, k), last.entry.view(count, k)


def _group_maxima(rows: Tensor, out: Tensor | None = None) -> Tensor:
    """R S -> R/GROUP_SIZE S: the largest of each group of rows, which lie R/GROUP_SIZE apart so that this is quick."""
    return torch.amax(rows.view(GROUP_SIZE, -1, rows.shape[1]), 0, out=out)


def _k_largest(values: Tensor, k: int) -> Tensor:
    """The k largest of each column, in no order."""
    if values.device.type != "cpu":
        return values.topk(k, 0, sorted=False).values
    rows = np.partition(values.T.numpy(), len(values) - k, axis=1)[:, -k:]  # four times as fast as topk
    return torch.from_numpy(rows).T


def _entries_above(levels: Sequence[Tensor], floor: Tensor, start: int) -> _Candidates:
    """Entries of a block that reach their query's floor, looked for from the largest groups down."""
    row, query = _nonzero_2d(levels[-1] >= floor)
    values = levels[-1]
    for level in reversed(levels[:-1]):
        groups = len(level) // GROUP_SIZE
        values = _take_columns(level.view(GROUP_SIZE, -1), row * level.shape[1] + query)  # GROUP_SIZE pairs
        place, pair = _nonzero_2d(values >= floor[query])
        row, query, values = place * groups + row[pair], query[pair], values[place, pair]
    return _Candidates(query, row + start, values)


def _take_columns(rows: Tensor, columns: Tensor) -> Tensor:
    """Some columns of all rows; NumPy is nearly twice as fast at it as torch."""
    if rows.device.type != "cpu":
        return rows[:, columns]
    return torch.from_numpy(rows.numpy().take(columns.numpy(), axis=1))


def _nonzero_2d(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of what is true; NumPy finds it four times as fast as torch."""
    if mask.device.type != "cpu":
        row, column = mask.nonzero(as_tuple=True)
        return row, column
    flat = torch.from_numpy(np.flatnonzero(mask.numpy()))
    row = flat.div(max(mask.shape[1], 1), rounding_mode="floor")
    return row, flat - row * mask.shape[1]


def _nonzero(mask: Tensor) -> Tensor:
    """Where it is true."""
    return torch.from_numpy(np.flatnonzero(mask.numpy())) if mask.device.type == "cpu" else mask.nonzero()[:, 0]


def _concatenate(parts: Sequence[_Candidates]) -> _Candidates:
    return _Candidates(*(torch.cat([getattr(p, name) for p in parts]) for name in ("query", "entry", "similarity")))


def _exact_nearest(found: _Candidates, bank: Tensor, queries: Tensor, k: int, slack: float) -> _Candidates:
    """Of each query the nearest k or all it has, nearest first, compared pair by pair; of equals the lower number."""
    found = found.select(_argsort(found.query * len(bank) + found.entry))
    found = found.select(_nonzero(_near_kth(found, len(queries), k, slack)))
    found.similarity = _pairwise_cosines(found, bank, queries)
    found = found.select(_argsort((found.query << 32) - _sortable_bits(found.similarity)))
    counts = torch.bincount(found.query, minlength=len(queries))
    place = torch.arange(len(found), device=counts.device) - (counts.cumsum(0) - counts)[found.query]
    return found.select(_nonzero(place < k))


def _sortable_bits(values: Tensor) -> Tensor:
    """float32 -> whole numbers of 32 bits in the same order; both zeros are one."""
    bits = (values + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _argsort(keys: Tensor) -> Tensor:
    """Places of the keys from the least up, of equals in their order."""
    if keys.device.type != "cpu":
        return keys.argsort(stable=True)
    return torch.from_numpy(np.argsort(keys.numpy(), kind="stable"))


def _near_kth(found: _Candidates, count: int, k: int, slack: float) -> Tensor:
    """Which of the candidates, sorted by query, come near enough to their query's k-th."""
    counts = torch.bincount(found.query, minlength=count)
    width = max(int(counts.max()), k)
    place = torch.arange(len(found), device=counts.device) - (counts.cumsum(0) - counts)[found.query]
    rows = found.similarity.new_full((width, count), NO_ENTRY)
    rows[place, found.query] = found.similarity
    return found.similarity >= (_k_largest(rows, k).amin(0) - slack)[found.query]


def _pairwise_cosines(found: _Candidates, bank: Tensor, queries: Tensor) -> Tensor:
    """Cosines, each computed in the same way wherever its pair stands."""
    size = (
        PAIRS_PER_CHUNK if queries.device.type == "cpu" else max(GPU_CHUNK_VALUES // queries.shape[1], PAIRS_PER_CHUNK)
    )
    pairs = list(zip(found.query.split(size), found.entry.split(size), strict=True))
    if queries.device.type == "cpu":  # NumPy multiplies and adds in one go
        known, asked = bank.numpy(), queries.numpy()
        sums = [np.einsum("pd,pd->p", known.take(entry, axis=0), asked.take(query, axis=0)) for query, entry in pairs]
        return torch.from_numpy(np.concatenate(sums))
    parts = []
    for query, entry in pairs:
        near = bank.index_select(0, entry.to(bank.device)).to(queries.device, comparison_dtype(queries.device))
        parts.append(near.mul_(queries.index_select(0, query)).sum(1).float())
    return torch.cat(parts)


def comparison_dtype(device: torch.device) -> torch.dtype:
    """float64; Apple's GPUs have none."""
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
    """Q K: what each class gets from the nearest k.

    weighted: a neighbor counts exp(cosine / temperature), as in DINO; uniform: each counts one.
    """
    if not 1 <= k <= neighbors.index.shape[1]:
        raise ConfigError(f"k={k}: the nearest {neighbors.index.shape[1]} were looked for.")
    similarity, index = neighbors.similarity[:, :k].cpu().double(), neighbors.index[:, :k].cpu()
    weights = (similarity / temperature).exp() if vote == "weighted" else torch.ones_like(similarity)
    shares = torch.zeros(len(index), num_classes, dtype=torch.float64)
    return shares.scatter_add_(1, targets.cpu()[index], weights)


def predicted_classes(shares: Tensor) -> Tensor:
    """Q: the class with the most votes, of equals the one with the lower number."""
    return shares.argmax(1)
