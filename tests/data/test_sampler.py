"""The sampler: every epoch is a permutation, independent of how positions are requested."""

from __future__ import annotations

import pickle
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data import sampler as sampler_module
from vitrail.data.sampler import Sampler, permute_each
from vitrail.errors import ConfigError, DataError
from vitrail.rng import sample_seeds

sizes = st.integers(1, 200)
seeds = st.integers(0, 2**40)
block_sizes = st.lists(st.integers(0, 12), min_size=1, max_size=30).filter(sum).map(tuple)


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "WINDOW_IMAGES", 1)
    sampler_module._block_layout.cache_clear()


def all_modes(size: int, seed: int) -> list[Sampler]:
    blocks = (size // 3, size - size // 3 - size // 5, size // 5)
    return [
        Sampler(size, seed=seed),
        Sampler(size, seed=seed, repeats=3),
        Sampler(size, seed=seed, blocks=blocks),
        Sampler(np.arange(size) % 4, seed=seed, mode="balanced"),
    ]


@given(size=sizes, seed=seeds, epoch=st.integers(0, 10**6))
def test_every_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    assert sorted(Sampler(size, seed=seed).indices(epoch * size, size)) == list(range(size))


@settings(max_examples=30)
@given(size=sizes, seed=seeds, first=st.integers(0, 1000), cuts=st.lists(st.integers(0, 200), max_size=4))
def test_positions_do_not_depend_on_how_they_are_requested(size: int, seed: int, first: int, cuts: list[int]) -> None:
    bounds = sorted([0, 200, *cuts])
    for sampler in all_modes(size, seed):
        whole = sampler.indices(first, 200)
        parts = [sampler.indices(first + a, b - a) for a, b in pairwise(bounds)]
        assert np.array_equal(np.concatenate(parts), whole)
        assert np.array_equal(pickle.loads(pickle.dumps(sampler)).indices(first, 200), whole)


def test_epochs_and_seeds_differ() -> None:
    size = 1000
    drawn = [Sampler(size, seed=seed).indices(epoch * size, size) for seed in (0, 1) for epoch in (0, 1)]
    for i, a in enumerate(drawn):
        for b in drawn[:i]:
            assert (a == b).sum() < 10  # one in a thousand would be chance


def test_positions_are_uniform() -> None:
    first = np.concatenate([Sampler(10, seed=0).indices(10 * epoch, 1) for epoch in range(4000)])
    counts = np.bincount(first, minlength=10)
    assert ((counts - 400) ** 2 / 400).sum() < 28  # chi-squared, 9 degrees of freedom: one in a thousand


@given(size=sizes, repeats=st.integers(1, 5), seed=seeds)
def test_repeats_follow_each_other(size: int, repeats: int, seed: int) -> None:
    once = Sampler(size, seed=seed).indices(0, 50)
    assert np.array_equal(Sampler(size, seed=seed, repeats=repeats).indices(0, 50 * repeats), once.repeat(repeats))


def test_a_batch_that_straddles_epochs_is_full() -> None:
    sampler = Sampler(7, seed=3)
    batch = sampler.indices(5, 20)
    assert np.array_equal(batch, np.concatenate([sampler.indices(7 * e, 7) for e in range(4)])[5:25])


# Balanced


@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(sum), seed=seeds, turn=st.integers(0, 500))
def test_balanced_has_every_class_once_a_round(counts: list[int], seed: int, turn: int) -> None:
    targets = np.repeat(np.arange(len(counts)), counts)
    sampler = Sampler(targets, seed=seed, mode="balanced")
    present = [kind for kind, count in enumerate(counts) if count]
    drawn = targets[sampler.indices(turn * len(present), 3 * len(present))].reshape(3, -1)
    assert all(sorted(row) == present for row in drawn)


def test_balanced_shows_each_image_of_a_class_equally_often() -> None:
    targets = np.array([0] * 3 + [1] * 30 + [2] * 7)
    drawn = Sampler(targets, seed=5, mode="balanced").indices(0, 3 * 210)
    assert Counter(Counter(drawn.tolist()).values()) == {70: 3, 7: 30, 30: 7}


def test_balanced_excludes_unlabeled_images() -> None:
    targets = np.array([-1, 0, -1, 1, 1])
    drawn = Sampler(targets, seed=0, mode="balanced").indices(0, 100)
    assert set(drawn) == {1, 3, 4}


def test_balanced_rounds_are_shuffled() -> None:
    targets = np.arange(50) % 10
    drawn = targets[Sampler(targets, seed=0, mode="balanced").indices(0, 1000)].reshape(100, 10)
    assert len({tuple(row) for row in drawn}) > 95


# Blocks


@given(blocks=block_sizes, seed=seeds, epoch=st.integers(0, 50))
def test_blocks_are_a_permutation_too(blocks: tuple[int, ...], seed: int, epoch: int) -> None:
    size = sum(blocks)
    drawn = Sampler(size, seed=seed, blocks=blocks).indices(epoch * size, size)
    assert sorted(drawn) == list(range(size))


@pytest.mark.usefixtures("small_windows")
def test_small_windows_of_blocks_are_a_permutation_too() -> None:
    blocks = tuple(range(1, 40))
    drawn = Sampler(sum(blocks), seed=1, blocks=blocks).indices(0, sum(blocks))
    assert sorted(drawn) == list(range(sum(blocks)))


@pytest.mark.usefixtures("small_windows")
def test_few_blocks_are_read_at_any_time() -> None:
    blocks = (100,) * 64
    sampler = Sampler(6400, seed=0, blocks=blocks)
    shards = sampler.indices(0, 6400) // 100
    for first in range(0, 6400, 50):
        assert len(set(shards[first : first + 200])) <= 2 * sampler_module.WINDOW_BLOCKS
    assert len(set(shards[:100])) == sampler_module.WINDOW_BLOCKS  # and within a window they are mixed
    assert len(set(shards[:400])) == sampler_module.WINDOW_BLOCKS


@pytest.mark.usefixtures("small_windows")
def test_windows_hold_other_blocks_in_other_epochs() -> None:
    sampler = Sampler(640, seed=0, blocks=(10,) * 64)
    together = [frozenset((sampler.indices(640 * e, 40) // 10).tolist()) for e in range(20)]
    assert len(set(together)) > 15


# One permutation for each position


@given(size=sizes, key=seeds)
def test_permute_each_is_a_permutation_for_each_seed(size: int, key: int) -> None:
    places, keys = np.arange(size), np.full(size, sample_seeds(key, 0, [0])[0])
    assert sorted(permute_each(places, np.full(size, size), keys)) == list(range(size))


def test_permute_each_accepts_mixed_sizes() -> None:
    expected = np.repeat([1, 2, 3, 64, 65, 1000], 50)
    at = np.arange(300) % expected
    got = permute_each(at, expected, sample_seeds(0, 0, np.arange(300)))
    assert ((got >= 0) & (got < expected)).all()
    alone = [permute_each(at[i : i + 1], expected[i : i + 1], sample_seeds(0, 0, [i]))[0] for i in range(300)]
    assert np.array_equal(got, alone)


# Errors


def test_no_images_is_an_error() -> None:
    with pytest.raises(DataError, match="there are no training images"):
        Sampler(0, seed=0)
    with pytest.raises(DataError, match="no image has one"):
        Sampler(np.array([-1, -1]), seed=0, mode="balanced")
    with pytest.raises(DataError, match="hold 5 images, expected 6"):
        Sampler(6, seed=0, blocks=(2, 3))


def test_balanced_needs_one_label_per_image() -> None:
    with pytest.raises(ConfigError, match="one label for each image"):
        Sampler(5, seed=0, mode="balanced")
    with pytest.raises(ConfigError, match="one label for each image"):
        Sampler(np.zeros((5, 3), bool), seed=0, mode="balanced")  # type: ignore[arg-type]
