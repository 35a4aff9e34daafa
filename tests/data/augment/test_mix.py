"""Mixup and CutMix: partners, shares, boxes, labels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from vitrail import rng
from vitrail.data.augment.mix import (
    MixupCutMix,
    beta_quantile,
    mix_groups,
    mix_images,
    mix_partners,
    mix_targets,
    one_hot,
)
from vitrail.data.augment.params import DeviceParams, HostParams, to_device

UNLIKELY = 1e-4
SIZE = (40, 56)


def seeds(count: int, step: int = 0) -> rng.Seeds:
    return rng.sample_seeds(5, step, np.arange(count))


def on_cpu(params: HostParams) -> DeviceParams:
    return to_device({"mix": params}, torch.device("cpu"), static_shapes=False)["mix"]


def partners(batch: int, size: int, *, seed: int = 0, step: int = 0, repeats: int = 1) -> np.ndarray:
    return mix_partners(seed, step, np.arange(batch), batch_size=batch, group_size=size, repeats=repeats)


@given(st.integers(2, 300), st.integers(2, 20), st.integers(0, 10**6), st.integers(1, 4))
def test_partners_are_one_cycle_through_each_group(batch: int, size: int, step: int, repeats: int):
    found, group = partners(batch, size, step=step, repeats=repeats), mix_groups(np.arange(batch), batch, size)
    for number in range(group[-1] + 1):
        members = np.flatnonzero(group == number)
        assert members.tolist() == list(range(members[0], members[-1] + 1))
        assert len(members) == size or (number == group[-1] and min(batch, size) <= len(members) < 2 * size)
        at, seen = int(members[0]), []
        for _ in members:
            seen.append(at)
            at = int(found[at])
        assert at == members[0]
        assert sorted(seen) == members.tolist()


def test_single_image_is_its_own_partner():
    assert partners(1, 8).tolist() == [0]


@given(st.integers(1, 8), st.integers(1, 4), st.integers(2, 9), st.integers(0, 1000), st.integers(1, 3))
def test_partners_do_not_depend_on_the_number_of_processes(world: int, groups: int, size: int, step: int, repeats: int):
    batch, prob = world * groups * size, groups * size
    alone = partners(batch, size, step=step, repeats=repeats)
    for rank in range(world):
        slots = np.arange(rank * prob, (rank + 1) * prob)
        mine = mix_partners(0, step, slots, batch_size=batch, group_size=size, repeats=repeats)
        np.testing.assert_array_equal(slots[mine], alone[slots])


def test_partners_change_with_step_and_seed_and_are_uniform_in_the_group():
    assert not np.array_equal(partners(64, 8, step=1), partners(64, 8, step=2))
    assert not np.array_equal(partners(64, 8, step=1), partners(64, 8, seed=1, step=1))
    np.testing.assert_array_equal(partners(64, 8, step=1), partners(64, 8, step=1))
    met = np.bincount([partners(24, 8, step=step)[12] for step in range(2000)], minlength=24)
    assert met[12] == met[:8].sum() == met[16:].sum() == 0
    assert stats.chisquare(np.delete(met[8:16], 4)).pvalue > UNLIKELY


@pytest.mark.parametrize("repeats", [2, 3, 4])
def test_repeated_image_is_not_mixed_with_its_copies(repeats: int):
    for step in range(50):
        found, image = partners(64, 8, step=step, repeats=repeats), (step * 64 + np.arange(64)) // repeats
        assert not (image[found] == image).any()


@pytest.mark.parametrize("alpha", [0.2, 0.8, 1.0, 4.0])
def test_mixing_weights_are_beta_distributed(alpha: float):
    params = MixupCutMix(alpha, 0.0, 1.0, SIZE).draw(seeds(20_000))
    assert stats.kstest(params["lam"].astype(np.float64), stats.beta(alpha, alpha).cdf).pvalue > UNLIKELY
    assert not params["cut"].any()
    ends = beta_quantile(np.array([0.0, 1 - 2**-24]), alpha)
    assert np.all((ends >= 0) & (ends <= 1))


def test_mixup_and_cutmix_have_the_requested_probabilities():
    params = MixupCutMix(0.8, 1.0, 0.7, SIZE).draw(seeds(20_000))
    cut = params["cut"] > 0
    blended = ~cut & (params["lam"] < 1)
    for kind in (cut, blended):
        assert stats.binomtest(int(kind.sum()), 20_000, 0.35).pvalue > UNLIKELY
    assert np.all(params["lam"][~cut & ~blended] == 1)
    alone = MixupCutMix(0.0, 1.0, 1.0, SIZE).draw(seeds(2000))
    assert np.all(alone["cut"] == 1)


def test_cutmix_boxes_are_distributed_as_in_the_paper():
    params = MixupCutMix(0.0, 1.0, 1.0, SIZE).draw(seeds(5000))
    draws = rng.uniform_np(seeds(5000), rng.stream_id("mix"), 5).astype(np.float64)
    for (top, left, height, width), draw, lam in zip(params["boxes"], draws, params["lam"], strict=True):
        side = np.sqrt(1 - draw[2])  # Beta(1, 1) is uniform
        cut_h, cut_w = int(40 * side), int(56 * side)
        y, x = int(draw[3] * 40), int(draw[4] * 56)
        assert top == np.clip(y - cut_h // 2, 0, 40)
        assert left == np.clip(x - cut_w // 2, 0, 56)
        assert top + height == np.clip(y + cut_h // 2, 0, 40)
        assert left + width == np.clip(x + cut_w // 2, 0, 56)
        assert lam == np.float32(1 - height * width / (40 * 56))


def test_images_are_mixed_by_their_weights(images: Tensor):
    params = MixupCutMix(0.8, 1.0, 0.8, SIZE).draw(seeds(16))
    partners = images.roll(1, 0)
    ours = mix_images(images, partners, torch.ones(16, dtype=torch.bool), on_cpu(params))
    kinds = set()
    for number in range(16):
        lam, expected = params["lam"][number], images[number].clone()
        if params["cut"][number]:
            top, left, height, width = params["boxes"][number]
            part = np.s_[:, top : top + height, left : left + width]
            expected[part] = partners[number][part]
            kinds.add("cut")
        elif lam < 1:
            expected = images[number] * lam + partners[number] * (1 - lam)
            kinds.add("blend")
        else:
            kinds.add("none")
        torch.testing.assert_close(ours[number], expected, rtol=0, atol=1e-6)
    assert kinds == {"cut", "blend", "none"}


def test_label_weight_equals_the_fraction_of_pixels():
    params = MixupCutMix(0.0, 1.0, 1.0, SIZE).draw(seeds(200))
    images, readable = torch.ones(200, 1, 40, 56), torch.ones(200, dtype=torch.bool)
    kept = mix_images(images, 0 * images, readable, on_cpu(params)).mean((1, 2, 3))
    labels = mix_targets(
        one_hot(torch.zeros(200, dtype=torch.long), 2), one_hot(torch.ones(200), 2), readable, on_cpu(params)
    )
    torch.testing.assert_close(labels[:, 0], kept, rtol=0, atol=1e-6)
    torch.testing.assert_close(labels.sum(1), torch.ones(200), rtol=0, atol=1e-6)


def test_unreadable_partner_is_not_mixed_in(images: Tensor):
    params = on_cpu(MixupCutMix(0.8, 1.0, 1.0, SIZE).draw(seeds(16)))
    dead = torch.zeros(16, dtype=torch.bool)
    targets = one_hot(torch.arange(16), 16)
    assert torch.equal(mix_images(images, torch.rand_like(images), dead, params), images)
    assert torch.equal(mix_targets(targets, targets.roll(1, 0), dead, params), targets)


def test_one_hot_row_of_an_unlabeled_image_is_zero():
    assert one_hot(torch.tensor([2, -1]), 3).tolist() == [[0, 0, 1], [0, 0, 0]]
