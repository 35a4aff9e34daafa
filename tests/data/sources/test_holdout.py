"""Held-out images: stable as the data grows, every class in both splits, groups not split."""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.data.sources.holdout import group_names, hash_names, hold_out, hold_out_stratified, select_range
from vitrail.errors import ConfigError

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0/"), min_size=1, max_size=8)


@st.composite
def images(draw, classes: int = 4):
    """Distinct keys with class indices; small classes are the difficult case."""
    keys = draw(st.lists(NAMES, min_size=1, max_size=40, unique_by=lambda key: hash_names([key])[0]))
    targets = draw(st.lists(st.integers(0, classes - 1), min_size=len(keys), max_size=len(keys)))
    return keys, np.array(targets, np.int64)


SHARES = st.floats(0.01, 0.9)


def by_class(targets, mask):
    """Class -> (number in training, number held out)."""
    return {c: (int((~mask & (targets == c)).sum()), int((mask & (targets == c)).sum())) for c in set(targets.tolist())}


@given(images(), SHARES)
def test_every_class_of_two_images_is_in_both_splits_and_a_single_image_is_used_for_training(data, share):
    keys, targets = data
    mask, notes = hold_out(keys, targets, share)
    sides = by_class(targets, mask)
    for learned, held in sides.values():
        assert learned >= 1
        assert held >= 1 or learned == 1
    lone = [c for c, (learned, held) in sides.items() if learned + held == 1]
    assert bool(lone) == any("only one image" in note for note in notes)


@given(images(), NAMES, st.integers(0, 3), SHARES)
def test_an_image_that_is_added_moves_no_other(data, name, number, share):
    keys, targets = data
    if hash_names([name])[0] in hash_names(keys):
        return
    before, _ = hold_out(keys, targets, share)
    after, _ = hold_out([*keys, name], np.append(targets, number), share)
    moved = np.flatnonzero(before != after[:-1])
    limit = int(share * 2**64)
    by_hash = hash_names(keys) < np.uint64(min(limit, 2**64 - 1))
    mine = by_hash[targets == number]
    if mine.any() and not mine.all():  # the hash alone put this class in both splits
        assert len(moved) == 0
    else:  # another image may have been moved
        assert len(moved) <= 1
        assert all(targets[moved] == number)


@given(images(), SHARES, st.randoms())
def test_the_order_of_images_does_not_matter(data, share, rng):
    keys, targets = data
    order = list(range(len(keys)))
    rng.shuffle(order)
    mask, _ = hold_out(keys, targets, share)
    other, _ = hold_out([keys[i] for i in order], targets[order], share)
    assert np.array_equal(mask[order], other)


@given(images(), st.data(), SHARES)
def test_groups_are_never_split_and_every_class_is_in_training(data, more, share):
    keys, targets = data
    groups = more.draw(st.lists(st.sampled_from("abcdefgh"), min_size=len(keys), max_size=len(keys)))
    mask, notes = hold_out(keys, targets, share, groups=groups)
    sides = defaultdict(set)
    for group, held in zip(groups, mask, strict=True):
        sides[group].add(bool(held))
    assert all(len(side) == 1 for side in sides.values())
    for number, (learned, held) in by_class(targets, mask).items():
        assert learned >= 1
        homes = {g for g, t in zip(groups, targets, strict=True) if t == number}
        assert held or len(homes) == 1 or any("without splitting a group" in note for note in notes)


@given(images(), st.data(), SHARES)
def test_every_class_of_multi_label_data_is_in_training(data, more, share):
    keys, _ = data
    rows = st.lists(st.booleans(), min_size=3, max_size=3)
    targets = np.array(more.draw(st.lists(rows, min_size=len(keys), max_size=len(keys))))
    mask, _ = hold_out(keys, targets, share)
    assert all(targets[~mask][:, k].any() for k in range(3) if targets[:, k].any())


def test_the_held_out_fraction_is_as_requested():
    keys = [f"cat/{i}.jpg" for i in range(20_000)]
    mask, notes = hold_out(keys, np.zeros(len(keys), np.int64), 0.1)
    assert 0.094 < mask.mean() < 0.106  # three standard deviations
    assert notes == []


def test_the_hash_is_reproducible():
    [found] = hash_names(["cat/1.jpg"])
    assert int(found) == int.from_bytes(hashlib.blake2b(b"cat/1.jpg", digest_size=8).digest(), "little")


def test_composed_and_decomposed_accents_have_the_same_hash():
    assert hash_names(["caf\u00e9.jpg"])[0] == hash_names(["cafe\u0301.jpg"])[0]


def test_a_name_that_is_not_valid_unicode_is_hashed():
    assert len(hash_names(["caf\udce9.jpg"])) == 1


def test_the_smallest_hash_is_held_out_if_the_fraction_holds_none_out():
    keys = [f"{i}.jpg" for i in range(5)]
    mask, _ = hold_out(keys, np.zeros(5, np.int64), 1e-9)
    assert np.flatnonzero(mask).tolist() == [int(np.argmin(hash_names(keys)))]


def test_unlabeled_images_follow_their_hash_alone():
    keys = [f"{i}.jpg" for i in range(1000)]
    mask, notes = hold_out(keys, np.full(1000, -1), 0.25)
    assert np.array_equal(mask, hash_names(keys) < np.uint64(2**62))
    assert notes == []


def test_a_note_names_the_classes_that_have_one_image():
    _, notes = hold_out(["a", "b", "c", "d"], np.array([0, 0, 1, 2]), 0.5, ["cat", "dog", "emu"])
    assert notes[0] == "the classes dog, emu have only one image, which is used for training"


def test_a_note_names_the_classes_that_the_hash_put_on_one_side():
    keys, targets = [f"{i}.jpg" for i in range(45)], np.repeat([0, 1, 2], [5, 20, 20])
    by_hash = hash_names(keys) < np.uint64(int(0.1 * 2**64))
    helped = [n for n in range(3) if by_hash[targets == n].all() or not by_hash[targets == n].any()]
    assert helped == [0]
    _, notes = hold_out(keys, targets, 0.1, ["cat", "dog", "emu"])
    assert notes == [
        "the hash put all images of the class cat into one split, so one image was moved to the other; "
        "it may move back when more are added"
    ]


def test_stratified_takes_the_exact_share_of_each_class():
    targets = np.repeat(np.arange(3), [100, 50, 1])
    keys = [str(i) for i in range(151)]
    mask = hold_out_stratified(keys, targets, 0.1)
    assert by_class(targets, mask) == {0: (90, 10), 1: (45, 5), 2: (1, 0)}
    smallest = np.argsort(hash_names(keys[:100]))[:10]
    assert set(np.flatnonzero(mask[:100])) == set(smallest.tolist())


@given(images(), SHARES)
def test_a_part_has_the_exact_share_of_each_class_but_at_least_one_image(data, share):
    keys, targets = data
    chosen = select_range(keys, targets, 0.0, share)
    assert np.array_equal(chosen, np.unique(chosen))
    for number in set(targets.tolist()):
        assert (targets[chosen] == number).sum() == max(round(share * (targets == number).sum()), 1)


@given(images(), SHARES, SHARES)
def test_a_larger_share_contains_a_smaller_one(data, one, other):
    keys, targets = data
    small, large = (set(select_range(keys, targets, 0.0, share).tolist()) for share in sorted((one, other)))
    assert small <= large


@given(images(), st.lists(SHARES, max_size=3))
def test_adjacent_ranges_are_disjoint_and_together_all_images_unless_a_class_has_too_few(data, inner):
    keys, targets = data
    edges = [0.0, *sorted(set(inner)), 1.0]
    parts = [select_range(keys, targets, low, high) for low, high in itertools.pairwise(edges)]
    for number in set(targets.tolist()):
        members = np.flatnonzero(targets == number)
        counts = np.diff([round(edge * len(members)) for edge in edges])
        chosen = np.concatenate([part[targets[part] == number] for part in parts])
        assert set(chosen.tolist()) <= set(members.tolist())
        if (counts > 0).all():
            assert sorted(chosen.tolist()) == members.tolist()


@given(images(), SHARES, st.randoms())
def test_the_images_of_a_part_do_not_depend_on_their_order(data, share, rng):
    keys, targets = data
    order = list(range(len(keys)))
    rng.shuffle(order)
    chosen = {keys[i] for i in select_range(keys, targets, 0.0, share)}
    shuffled = [keys[i] for i in order]
    assert {shuffled[i] for i in select_range(shuffled, targets[order], 0.0, share)} == chosen


def test_no_images_have_an_empty_part():
    assert select_range([], np.zeros(0, np.int64), 0.0, 0.5).tolist() == []


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"patient\d+", ["\0patient1", "\0patient1", "\0patient2", "x.png"]),
        (r"patient(\d+)", ["\0001", "\0001", "\0002", "x.png"]),
    ],
)
def test_a_pattern_names_groups_by_its_match_or_its_first_group(pattern, expected):
    assert group_names(["patient1/a.png", "b/patient1.png", "patient2.png", "x.png"], pattern) == expected


def test_a_pattern_that_matches_nothing_or_is_invalid_is_refused():
    with pytest.raises(
        ConfigError, match=r"matches no image's path; expected a regular expression for paths such as 'cat1'"
    ):
        group_names(["cat1"], r"dog\d")
    with pytest.raises(ConfigError, match=r"groups='\(' is not a valid regular expression"):
        group_names(["cat1"], "(")
