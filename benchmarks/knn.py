"""Time of the exact nearest-neighbor search, compared with the matrix product it contains and with two plain searches.

    python benchmarks/knn.py [--bank 50000] [--queries 10000] [--width 384] [--k 20] [--threads 2] [--rounds 7]

The product is computed in blocks into one buffer and discarded, with the fastest of several block sizes. Both are timed
in turns, and medians are compared. Minimum times are printed too, because other work on the machine only adds time.
The plain searches are scikit-learn's and the product with torch.topk; neither keeps the order of ties.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from vitrail.evaluation.knn import nearest_neighbors
from vitrail.runtime.malloc import tune_malloc

SIZES = ((1024, 1024), (2048, 2048), (5120, 1024), (8192, 1024))
"""Bank entries and queries per block."""


def product(bank: Tensor, queries: Tensor, size: tuple[int, int]) -> None:
    """Compute all similarities and discard them."""
    buffer = torch.empty(size[0] * size[1])
    for some in queries.split(size[1]):
        columns = some.T
        for part in bank.split(size[0]):
            torch.mm(part, columns, out=buffer[: len(part) * len(some)].view(len(part), len(some)))


def topk_search(bank: Tensor, queries: Tensor, k: int) -> None:
    """The product in blocks, and torch.topk of each."""
    for some in queries.split(1024):
        best, index = torch.empty(len(some), 0), torch.empty(len(some), 0, dtype=torch.int64)
        for start in range(0, len(bank), 5120):
            values, found = (some @ bank[start : start + 5120].T).topk(k, 1)
            best, order = torch.cat([best, values], 1).topk(k, 1)
            index = torch.cat([index, found + start], 1).gather(1, order)


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (
        ("bank", 50_000),
        ("queries", 10_000),
        ("width", 384),
        ("k", 20),
        ("threads", 2),
        ("rounds", 7),
    ):
        parser.add_argument(f"--{name}", type=int, default=usual)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    tune_malloc()
    rng = torch.Generator().manual_seed(0)
    bank, queries = (
        F.normalize(torch.randn(rows, chosen.width, generator=rng), dim=1) for rows in (chosen.bank, chosen.queries)
    )
    size = min(SIZES, key=lambda s: min(seconds(lambda: product(bank, queries, s)) for _ in range(2)))
    peer = NearestNeighbors(n_neighbors=chosen.k, algorithm="brute").fit(bank.numpy())
    plain, exact, topk, sklearn = [], [], [], []
    for _ in range(chosen.rounds):
        plain.append(seconds(lambda: product(bank, queries, size)))
        exact.append(seconds(lambda: nearest_neighbors(bank, queries, chosen.k)))
        topk.append(seconds(lambda: topk_search(bank, queries, chosen.k)))
        sklearn.append(seconds(lambda: peer.kneighbors(queries.numpy())))
    work = 2 * chosen.bank * chosen.queries * chosen.width / 1e9
    print(f"{chosen.bank:,} x {chosen.width} bank, {chosen.queries:,} queries, k={chosen.k}, {chosen.threads} threads")
    for name, times in (
        (f"product in blocks of {size[0]} x {size[1]}", plain),
        ("nearest neighbors", exact),
        ("product and torch.topk", topk),
        ("scikit-learn, brute force", sklearn),
    ):
        median, least = statistics.median(times), min(times)
        print(f"{name:36} median {median:.3f} s, least {least:.3f} s ({work / least:.0f} GFLOP/s)")
    rounds = statistics.median(e / p for e, p in zip(exact, plain, strict=True))
    medians = statistics.median(exact) / statistics.median(plain)
    for name, times in (("torch.topk", topk), ("scikit-learn", sklearn)):
        print(f"{name} / nearest neighbors: {statistics.median(t / e for t, e in zip(times, exact, strict=True)):.2f}")
    least = min(exact) / min(plain)
    print(f"ratio to the product: of medians {medians:.2f}, of the least {least:.2f}, median of rounds {rounds:.2f}")


if __name__ == "__main__":
    main()
