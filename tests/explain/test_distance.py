"""Mean attention distance: equal to a slow reference, and to known values of simple heads."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from compare import randomized
from explain.test_attention import CONFIGS, random_images
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.errors import DataError
from vitrail.explain import attention_distance, uniform_distance
from vitrail.explain.distance import mean_distances, patch_distances
from vitrail.models import build

grids = st.tuples(st.integers(1, 6), st.integers(1, 6))
sides = st.integers(1, 16)


def reference_distance(attention: np.ndarray, grid: tuple[int, int], side: tuple[float, float], special: int) -> float:
    """Mean distance of one head of one image (attention T T), one pair of patches at a time."""
    total = 0.0
    count = grid[0] * grid[1]
    for q in range(count):
        weights = attention[special + q, special:]
        distance = 0.0
        for k in range(count):
            down = (q // grid[1] - k // grid[1]) * side[0]
            across = (q % grid[1] - k % grid[1]) * side[1]
            distance += weights[k] * math.hypot(down, across)
        total += distance / weights.sum()
    return total / count


@settings(max_examples=40)
@given(grids, sides, sides, st.integers(0, 3), st.integers(0, 99))
def test_mean_distances_equal_the_reference(grid, down, across, special, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = special + grid[0] * grid[1]
    attention = torch.randn(2, 3, tokens, tokens, generator=generator, dtype=torch.float64).softmax(-1)
    distances = patch_distances(grid, (grid[0] * down, grid[1] * across))
    got = mean_distances(attention, distances, special)
    for b in range(2):
        for h in range(3):
            assert float(got[b, h]) == pytest.approx(
                reference_distance(attention[b, h].numpy(), grid, (down, across), special)
            )


@settings(max_examples=30)
@given(grids, sides, st.integers(0, 3))
def test_identity_attention_has_distance_zero(grid, side, special):
    tokens = special + grid[0] * grid[1]
    attention = torch.eye(tokens, dtype=torch.float64).expand(1, 2, -1, -1)
    distances = patch_distances(grid, (grid[0] * side, grid[1] * side))
    assert torch.equal(mean_distances(attention, distances, special), torch.zeros(1, 2, dtype=torch.float64))


@settings(max_examples=30)
@given(grids, sides, sides, st.integers(0, 3), st.floats(0.01, 1))
def test_uniform_attention_has_the_mean_distance_of_all_pairs(grid, down, across, special, share):
    """Attention to prefix tokens does not change it."""
    size, count = (grid[0] * down, grid[1] * across), grid[0] * grid[1]
    attention = torch.full((1, 1, special + count, special + count), share, dtype=torch.float64)
    attention[..., :special] = 1 - share
    pairs = [
        math.hypot((a // grid[1] - b // grid[1]) * down, (a % grid[1] - b % grid[1]) * across)
        for a in range(count)
        for b in range(count)
    ]
    expected = sum(pairs) / count**2
    assert float(mean_distances(attention, patch_distances(grid, size), special)) == pytest.approx(expected)
    assert uniform_distance(grid, size) == pytest.approx(expected)


def test_patch_without_attention_to_patches_is_excluded():
    attention = torch.zeros(1, 1, 3, 3)
    attention[0, 0, 0, 0] = attention[0, 0, 1, 0] = 1  # the first patch attends to the class token only
    attention[0, 0, 2, 1] = 1
    assert float(mean_distances(attention, patch_distances((1, 2), (8, 16)), 1)) == 8.0


@pytest.mark.parametrize("name", CONFIGS)
def test_distances_of_every_kind_of_network_are_in_pixels(name: str):
    config = CONFIGS[name]
    net = randomized(build(config)).eval()
    images = random_images(config, 3)
    got = attention_distance(net, images)
    assert got.shape == (config.depth, config.num_heads)
    assert (got > 0).all()
    assert (got <= math.hypot(*config.image_size)).all()
    other = attention_distance(net, images.split(2))
    torch.testing.assert_close(other, got, rtol=1e-5, atol=1e-5)  # the batch size has no effect


def test_distance_of_no_images_is_an_error():
    net = build(CONFIGS["token"])
    with pytest.raises(DataError, match="no image"):
        attention_distance(net, iter(()))
