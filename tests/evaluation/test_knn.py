"""Nearest neighbors against scikit-learn and a reference at any block size, and DINO's weighted vote."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.neighbors import NearestNeighbors

from vitrail.errors import ConfigError, DataError
from vitrail.evaluation import knn
from vitrail.evaluation.knn import BlockSizes, Neighbors, class_votes, nearest_neighbors, predicted_classes


def features(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def reference_neighbors(bank: torch.Tensor, queries: torch.Tensor, k: int) -> np.ndarray:
    """All cosine similarities in float64, sorted; ties go to the lower index."""
    a, b = (x.double().numpy() for x in (queries, bank))
    a, b = (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12) for x in (a, b))
    cosines = np.round(a @ b.T, 12)  # so that equal vectors are equal
    return np.argsort(-cosines, axis=1, kind="stable")[:, :k]


@pytest.mark.parametrize("k", [1, 5, 20, 100])
def test_neighbors_equal_scikit_learns(k: int):
    bank, queries = features(3000, 48), features(130, 48, seed=1)
    neighbors = nearest_neighbors(bank, queries, k, blocks=BlockSizes(700, 37))
    peer = NearestNeighbors(n_neighbors=k, metric="cosine", algorithm="brute").fit(bank.double().numpy())
    distances, indices = peer.kneighbors(queries.double().numpy())
    assert (neighbors.index.numpy() == indices).all()
    assert neighbors.similarity.numpy() == pytest.approx(1 - distances, abs=1e-6)


@given(
    rows=st.integers(1, 400),
    blocks=st.tuples(st.integers(1, 500), st.integers(1, 50)),
    k=st.integers(1, 5),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_block_size_does_not_change_a_single_bit(rows: int, blocks: tuple[int, int], k: int, seed: int):
    bank, queries = features(rows, 24, seed), features(23, 24, seed + 1)
    k = min(k, rows)
    unblocked, blocked = (
        nearest_neighbors(bank, queries, k),
        nearest_neighbors(bank, queries, k, blocks=BlockSizes(*blocks)),
    )
    assert torch.equal(unblocked.index, blocked.index)
    assert torch.equal(unblocked.similarity, blocked.similarity)
    assert (unblocked.index.numpy() == reference_neighbors(bank, queries, k)).all()


@given(st.lists(st.integers(0, 5), min_size=8, max_size=600), st.integers(1, 8), st.integers(1, 300))
@settings(max_examples=60)
def test_ties_go_to_the_lower_index(choices: list[int], k: int, block: int):
    vectors = features(6, 16)
    bank, queries = vectors[choices], vectors
    neighbors = nearest_neighbors(bank, queries, k, blocks=BlockSizes(block, 4))
    assert (neighbors.index.numpy() == reference_neighbors(bank, queries, k)).all()


def test_identical_entries_are_returned_in_index_order():
    bank = torch.ones(5000, 8) * 0.3
    neighbors = nearest_neighbors(bank, torch.ones(3, 8), 7, blocks=BlockSizes(448, 2))
    assert neighbors.index.tolist() == [list(range(7))] * 3


def test_zero_rows_have_similarity_zero():
    bank = torch.cat([torch.zeros(4, 8), torch.eye(8)])
    neighbors = nearest_neighbors(bank, torch.eye(8)[:1], 2)
    assert neighbors.index.tolist() == [[4, 0]]
    assert neighbors.similarity.tolist() == [[1.0, 0.0]]


def test_vector_length_does_not_change_the_neighbors():
    bank, queries = features(300, 16), features(9, 16, seed=1)
    scales = torch.rand(300, 1, generator=torch.Generator().manual_seed(2)) * 100 + 0.01
    assert torch.equal(
        nearest_neighbors(bank, queries, 5).index, nearest_neighbors(bank * scales, queries * 7, 5).index
    )


def test_zero_queries_give_an_empty_result():
    assert nearest_neighbors(features(9, 4), features(0, 4), 3).index.shape == (0, 3)


def test_progress_counts_every_query():
    counts: list[int] = []
    nearest_neighbors(features(50, 4), features(23, 4), 3, blocks=BlockSizes(64, 10), advance=counts.append)
    assert sum(counts) == 23
    assert max(counts) <= 10


@pytest.mark.parametrize("k", [0, 11])
def test_k_outside_the_size_of_the_bank_is_refused(k: int):
    with pytest.raises(ConfigError, match=rf"k={k} neighbors in a bank of 10 entries; expected 1 to 10\."):
        nearest_neighbors(features(10, 4), features(2, 4), k)


def test_features_of_different_widths_are_refused():
    with pytest.raises(DataError, match="the bank has 4 features and the queries 5"):
        nearest_neighbors(features(10, 4), features(2, 5), 1)


def test_nan_features_are_refused():
    with pytest.raises(DataError, match="NaN or infinite"):
        nearest_neighbors(torch.full((3, 4), torch.nan), features(2, 4), 1)


def test_weighted_vote_equals_dinos():
    """As in DINO's evaluation code: the sum over neighbors of one-hot class times exp(similarity / T)."""
    bank, queries, k, classes = features(200, 12), features(40, 12, seed=1), 20, 7
    targets = torch.from_numpy(np.random.default_rng(0).integers(0, classes, 200))
    neighbors = nearest_neighbors(bank, queries, k)
    expected = np.zeros((40, classes))
    for q in range(40):
        for rank in range(k):
            weight = np.exp(np.float64(neighbors.similarity[q, rank]) / 0.07)
            expected[q, targets[neighbors.index[q, rank]]] += weight
    got = class_votes(neighbors, targets, classes, k)
    assert got.numpy() == pytest.approx(expected, rel=1e-12)
    assert predicted_classes(got).tolist() == expected.argmax(1).tolist()


def test_one_search_gives_the_votes_for_any_smaller_k():
    bank, queries = features(200, 12), features(40, 12, seed=1)
    targets = torch.arange(200) % 3
    many, few = nearest_neighbors(bank, queries, 100), nearest_neighbors(bank, queries, 5)
    assert torch.equal(class_votes(many, targets, 3, 5), class_votes(few, targets, 3, 5))


def test_uniform_vote_counts_neighbors_and_ties_go_to_the_lower_class():
    neighbors = Neighbors(torch.tensor([[0.9, 0.5, 0.4, 0.3]]), torch.tensor([[2, 1, 0, 3]]))
    targets = torch.tensor([1, 1, 0, 0])
    assert class_votes(neighbors, targets, 3, 4, vote="uniform").tolist() == [[2, 2, 0]]
    assert predicted_classes(class_votes(neighbors, targets, 3, 4, vote="uniform")).tolist() == [0]
    assert predicted_classes(class_votes(neighbors, targets, 3, 3, vote="uniform")).tolist() == [1]
    assert predicted_classes(class_votes(neighbors, targets, 3, 3)).tolist() == [0]


def test_vote_with_more_neighbors_than_searched_is_refused():
    neighbors = nearest_neighbors(features(20, 4), features(2, 4), 3)
    with pytest.raises(ConfigError, match="only the nearest 3 were searched for"):
        class_votes(neighbors, torch.zeros(20, dtype=torch.int64), 1, 4)


def test_near_duplicates_are_ranked_the_same_at_any_block_size():
    """All entries reach the floor, so candidates must be compared and reduced block by block."""
    bank = torch.ones(4000, 8) + 1e-7 * features(4000, 8)
    queries = torch.ones(5, 8)
    neighbors = nearest_neighbors(bank, queries, 2, blocks=BlockSizes(256, 5))
    other_blocks = nearest_neighbors(bank, queries, 2, blocks=BlockSizes(4000, 1))
    assert torch.equal(neighbors.index, other_blocks.index)


def test_default_numbers_of_neighbors_are_sorted():
    assert list(knn.KS) == sorted(knn.KS)


def test_thread_count_is_restored_after_a_failure(monkeypatch: pytest.MonkeyPatch):
    def broken(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(knn, "_search", broken)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with pytest.raises(MemoryError):
            nearest_neighbors(features(9, 4), features(7, 4), 2)
        with ThreadPoolExecutor(1) as executor:
            assert executor.submit(torch.get_num_threads).result() == torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("allowed", ["ieee", "tf32"])
def test_gpu_search_uses_full_float32_whatever_the_global_setting(monkeypatch: pytest.MonkeyPatch, allowed: str):
    matmul, precisions = torch.backends.cuda.matmul, list[str]()

    @contextmanager
    def workers(threads: int) -> Iterator[None]:
        precisions.append(matmul.fp32_precision)
        raise MemoryError
        yield

    class CudaTensor(torch.Tensor):
        device = torch.device("cuda")

    monkeypatch.setattr(knn, "_thread_pool", workers)
    monkeypatch.setattr(knn, "_move_bank", lambda bank, queries: bank)
    monkeypatch.setattr(knn, "normalize_rows", lambda rows: rows)
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = allowed
        with pytest.raises(MemoryError):
            nearest_neighbors(features(9, 4), features(7, 4).as_subclass(CudaTensor), 2)
        assert (precisions, matmul.fp32_precision) == (["ieee"], allowed)
    finally:
        matmul.fp32_precision = before


def test_pairs_are_compared_in_float64_where_supported():
    assert knn.comparison_dtype(torch.device("mps")) == torch.float32
    assert knn.comparison_dtype(torch.device("cuda")) == torch.float64


@pytest.mark.parametrize(("free", "moved"), [(2 * 36 * 4, True), (2 * 36 * 4 - 1, False)])
def test_bank_is_moved_to_the_gpu_if_it_fits_in_half_of_the_free_memory(
    monkeypatch: pytest.MonkeyPatch, free: int, moved: bool
):
    class CudaQueries:
        device = torch.device("cuda")

    bank = features(9, 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10**9))
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: "moved")
    assert (knn._move_bank(bank, CudaQueries()) == "moved") is moved


def test_thread_count_is_restored_and_does_not_change_the_result():
    bank, queries, before = features(500, 16), features(40, 16, seed=1), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(nearest_neighbors(bank, queries, 5, blocks=BlockSizes(640, 16)))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0].similarity, other.similarity) for other in results)
    assert all(torch.equal(results[0].index, other.index) for other in results)
