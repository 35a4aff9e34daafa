"""Nearest neighbors: the right ones, in the right order, whatever the blocks; and DINO's vote."""

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
from vitrail.evaluate import knn
from vitrail.evaluate.knn import BlockSizes, Neighbors, class_votes, nearest_neighbors, predicted_classes


def features(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def by_hand(bank: torch.Tensor, queries: torch.Tensor, k: int) -> np.ndarray:
    """Every cosine in float64, sorted; of equals the lower number."""
    a, b = (x.double().numpy() for x in (queries, bank))
    a, b = (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12) for x in (a, b))
    cosines = np.round(a @ b.T, 12)  # so that equal vectors are equal
    return np.argsort(-cosines, axis=1, kind="stable")[:, :k]


@pytest.mark.parametrize("k", [1, 5, 20, 100])
def test_neighbors_are_scikit_learns(k: int):
    bank, queries = features(3000, 48), features(130, 48, seed=1)
    near = nearest_neighbors(bank, queries, k, blocks=BlockSizes(700, 37))
    peer = NearestNeighbors(n_neighbors=k, metric="cosine", algorithm="brute").fit(bank.double().numpy())
    distances, indices = peer.kneighbors(queries.double().numpy())
    assert (near.index.numpy() == indices).all()
    assert near.similarity.numpy() == pytest.approx(1 - distances, abs=1e-6)


@given(
    rows=st.integers(1, 400),
    blocks=st.tuples(st.integers(1, 500), st.integers(1, 50)),
    k=st.integers(1, 5),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_blocks_of_any_size_give_the_same_bits(rows: int, blocks: tuple[int, int], k: int, seed: int):
    bank, queries = features(rows, 24, seed), features(23, 24, seed + 1)
    k = min(k, rows)
    one, other = nearest_neighbors(bank, queries, k), nearest_neighbors(bank, queries, k, blocks=BlockSizes(*blocks))
    assert torch.equal(one.index, other.index)
    assert torch.equal(one.similarity, other.similarity)
    assert (one.index.numpy() == by_hand(bank, queries, k)).all()


@given(st.lists(st.integers(0, 5), min_size=8, max_size=600), st.integers(1, 8), st.integers(1, 300))
@settings(max_examples=60)
def test_of_equal_entries_the_lower_number_comes_first(which: list[int], k: int, block: int):
    kinds = features(6, 16)
    bank, queries = kinds[which], kinds
    near = nearest_neighbors(bank, queries, k, blocks=BlockSizes(block, 4))
    assert (near.index.numpy() == by_hand(bank, queries, k)).all()


def test_entries_that_are_all_the_same_come_in_order():
    bank = torch.ones(5000, 8) * 0.3
    near = nearest_neighbors(bank, torch.ones(3, 8), 7, blocks=BlockSizes(448, 2))
    assert near.index.tolist() == [list(range(7))] * 3


def test_rows_of_zeros_are_like_nothing():
    bank = torch.cat([torch.zeros(4, 8), torch.eye(8)])
    near = nearest_neighbors(bank, torch.eye(8)[:1], 2)
    assert near.index.tolist() == [[4, 0]]
    assert near.similarity.tolist() == [[1.0, 0.0]]


def test_length_does_not_matter():
    bank, queries = features(300, 16), features(9, 16, seed=1)
    scales = torch.rand(300, 1, generator=torch.Generator().manual_seed(2)) * 100 + 0.01
    assert torch.equal(
        nearest_neighbors(bank, queries, 5).index, nearest_neighbors(bank * scales, queries * 7, 5).index
    )


def test_no_queries_have_no_neighbors():
    assert nearest_neighbors(features(9, 4), features(0, 4), 3).index.shape == (0, 3)


def test_progress_counts_every_query():
    seen: list[int] = []
    nearest_neighbors(features(50, 4), features(23, 4), 3, blocks=BlockSizes(64, 10), advance=seen.append)
    assert sum(seen) == 23
    assert max(seen) <= 10


@pytest.mark.parametrize("k", [0, 11])
def test_more_neighbors_than_there_are_is_one_sentence(k: int):
    with pytest.raises(ConfigError, match=rf"k={k} neighbors in a bank of 10 entries; expected 1 to 10\."):
        nearest_neighbors(features(10, 4), features(2, 4), k)


def test_features_of_two_widths_are_refused():
    with pytest.raises(DataError, match="the bank has 4 features and the queries 5"):
        nearest_neighbors(features(10, 4), features(2, 5), 1)


def test_broken_features_are_refused():
    with pytest.raises(DataError, match="NaN or infinite"):
        nearest_neighbors(torch.full((3, 4), torch.nan), features(2, 4), 1)


def test_the_vote_is_dinos():
    """Its evaluation code, transcribed: a one-hot of each neighbor, times exp(similarity / T), summed."""
    bank, queries, k, classes = features(200, 12), features(40, 12, seed=1), 20, 7
    targets = torch.from_numpy(np.random.default_rng(0).integers(0, classes, 200))
    near = nearest_neighbors(bank, queries, k)
    expected = np.zeros((40, classes))
    for q in range(40):
        for place in range(k):
            weight = np.exp(np.float64(near.similarity[q, place]) / 0.07)
            expected[q, targets[near.index[q, place]]] += weight
    got = class_votes(near, targets, classes, k)
    assert got.numpy() == pytest.approx(expected, rel=1e-12)
    assert predicted_classes(got).tolist() == expected.argmax(1).tolist()


def test_one_search_serves_smaller_numbers_of_neighbors():
    bank, queries = features(200, 12), features(40, 12, seed=1)
    targets = torch.arange(200) % 3
    many, few = nearest_neighbors(bank, queries, 100), nearest_neighbors(bank, queries, 5)
    assert torch.equal(class_votes(many, targets, 3, 5), class_votes(few, targets, 3, 5))


def test_a_uniform_vote_counts_heads_and_ties_go_to_the_lower_class():
    near = Neighbors(torch.tensor([[0.9, 0.5, 0.4, 0.3]]), torch.tensor([[2, 1, 0, 3]]))
    targets = torch.tensor([1, 1, 0, 0])
    assert class_votes(near, targets, 3, 4, vote="uniform").tolist() == [[2, 2, 0]]
    assert predicted_classes(class_votes(near, targets, 3, 4, vote="uniform")).tolist() == [0]
    assert predicted_classes(class_votes(near, targets, 3, 3, vote="uniform")).tolist() == [1]
    assert predicted_classes(class_votes(near, targets, 3, 3)).tolist() == [0]


def test_a_vote_of_more_than_were_looked_for_is_refused():
    near = nearest_neighbors(features(20, 4), features(2, 4), 3)
    with pytest.raises(ConfigError, match="only the nearest 3 were searched for"):
        class_votes(near, torch.zeros(20, dtype=torch.int64), 1, 4)


def test_many_near_duplicates_do_not_pile_up():
    """Everything reaches the floor: what waits is compared and cut as it comes."""
    bank = torch.ones(4000, 8) + 1e-7 * features(4000, 8)
    queries = torch.ones(5, 8)
    near = nearest_neighbors(bank, queries, 2, blocks=BlockSizes(256, 5))
    again = nearest_neighbors(bank, queries, 2, blocks=BlockSizes(4000, 1))
    assert torch.equal(near.index, again.index)


def test_the_usual_numbers_of_neighbors_are_in_order():
    assert list(knn.KS) == sorted(knn.KS)


def test_threads_are_what_they_were_after_a_failure(monkeypatch: pytest.MonkeyPatch):
    def broken(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(knn, "_search", broken)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with pytest.raises(MemoryError):
            nearest_neighbors(features(9, 4), features(7, 4), 2)
        with ThreadPoolExecutor(1) as later:
            assert later.submit(torch.get_num_threads).result() == torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("allowed", ["ieee", "tf32"])
def test_a_gpu_multiplies_whole_float32_whatever_is_allowed_outside(monkeypatch: pytest.MonkeyPatch, allowed: str):
    matmul, seen = torch.backends.cuda.matmul, list[str]()

    @contextmanager
    def workers(threads: int) -> Iterator[None]:
        seen.append(matmul.fp32_precision)
        raise MemoryError
        yield

    class Elsewhere(torch.Tensor):
        device = torch.device("cuda")

    monkeypatch.setattr(knn, "_thread_pool", workers)
    monkeypatch.setattr(knn, "_move_bank", lambda bank, queries: bank)
    monkeypatch.setattr(knn, "normalize_rows", lambda rows: rows)
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = allowed
        with pytest.raises(MemoryError):
            nearest_neighbors(features(9, 4), features(7, 4).as_subclass(Elsewhere), 2)
        assert (seen, matmul.fp32_precision) == (["ieee"], allowed)
    finally:
        matmul.fp32_precision = before


def test_pairs_are_compared_in_float64_where_there_is_one():
    assert knn.comparison_dtype(torch.device("mps")) == torch.float32
    assert knn.comparison_dtype(torch.device("cuda")) == torch.float64


@pytest.mark.parametrize(("free", "moved"), [(2 * 36 * 4, True), (2 * 36 * 4 - 1, False)])
def test_a_bank_goes_to_the_gpu_at_once_where_half_the_room_will_do(
    monkeypatch: pytest.MonkeyPatch, free: int, moved: bool
):
    class Elsewhere:
        device = torch.device("cuda")

    bank = features(9, 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10**9))
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: "moved")
    assert (knn._move_bank(bank, Elsewhere()) == "moved") is moved


def test_threads_are_what_they_were_and_change_nothing():
    bank, queries, before = features(500, 16), features(40, 16, seed=1), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(nearest_neighbors(bank, queries, 5, blocks=BlockSizes(640, 16)))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0].similarity, other.similarity) for other in found)
    assert all(torch.equal(found[0].index, other.index) for other in found)
