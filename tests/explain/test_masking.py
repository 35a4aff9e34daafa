"""Occlusion, deletion and insertion, on networks whose answers are known beforehand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compare import randomized
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.ndimage import gaussian_filter
from small_models import small
from torch import Tensor, nn

from vitrail.config import BiTConfig
from vitrail.errors import ConfigError
from vitrail.explain import Curve, attention_distance, faithfulness, occlusion
from vitrail.explain.masking import blurred, covered_pixels, mask_patches, replacement_pixels
from vitrail.explain.occlusion import windows
from vitrail.models import build


class Bright(nn.Module):
    """Class 1 is likelier the more light there is in one patch of 4 x 4; a grid of 3 x 5."""

    def __init__(self, row: int, column: int) -> None:
        super().__init__()
        self.row, self.column = row, column
        self.scale = nn.Parameter(torch.ones(()))
        self.sizes: list[int] = []

        class Config:
            num_classes = 2

            @staticmethod
            def grid_of(size: tuple[int, int]) -> tuple[int, int]:
                return size[0] // 4, size[1] // 4

        self.config = Config

    def forward(self, images: Tensor) -> Tensor:
        self.sizes.append(len(images))
        light = images[:, :, 4 * self.row : 4 * self.row + 4, 4 * self.column : 4 * self.column + 4].mean((1, 2, 3))
        return torch.stack([torch.zeros_like(light), 3 * light], 1) * self.scale


def light_in(row: int, column: int) -> Tensor:
    image = torch.zeros(1, 3, 12, 20)
    image[:, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = 1
    return image


@settings(max_examples=25)
@given(st.integers(0, 2), st.integers(0, 4), st.integers(1, 3), st.integers(1, 7))
def test_occlusion_finds_the_only_patch_that_matters(row: int, column: int, size: int, batch: int):
    net, image = Bright(row, column), light_in(row, column)
    got = occlusion(net, image, torch.tensor([1]), size=size, fill="zero", batch_size=batch)[0]
    assert got.shape == (3, 5)
    assert got[row, column] == got.max() > 0
    assert max(net.sizes) <= batch
    if size == 1:
        lost = torch.sigmoid(torch.tensor(3.0)) - 0.5
        torch.testing.assert_close(got[row, column], lost)
        assert torch.equal(got.flatten().sort().values[:-1], torch.zeros(14))


def test_a_patch_gets_the_mean_loss_of_the_squares_that_cover_it():
    net, image = Bright(1, 2), light_in(1, 2)
    got = occlusion(net, image, torch.tensor([1]), size=2, stride=1, fill="zero")[0].double()
    lost = float(torch.sigmoid(torch.tensor(3.0)) - 0.5)
    sums, counts = np.zeros((3, 5)), np.zeros((3, 5))
    for top in range(2):
        for left in range(4):
            covers = top <= 1 <= top + 1 and left <= 2 <= left + 1
            sums[top : top + 2, left : left + 2] += lost * covers
            counts[top : top + 2, left : left + 2] += 1
    np.testing.assert_allclose(got.numpy(), sums / counts, atol=1e-7)


@settings(max_examples=60)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4))
def test_every_patch_is_under_some_window(rows: int, columns: int, size: int, stride: int):
    size = min(size, rows, columns)
    masks = windows((rows, columns), size, min(stride, size))
    assert masks.any(0).all()
    assert (masks.sum((1, 2)) == size**2).all()
    assert len({tuple(m.flatten().tolist()) for m in masks}) == len(masks)


def test_one_row_or_one_patch_can_be_occluded():
    for grid in ((1, 5), (3, 1), (1, 1)):
        net = Bright(0, 0)
        got = occlusion(net, torch.ones(1, 3, 4 * grid[0], 4 * grid[1]), torch.tensor([1]), stride=2, fill="zero")
        assert got.shape == (1, *grid)
        assert got[0, 0, 0] > 0


def test_classes_that_are_no_alternatives_have_a_probability_of_their_own():
    net, image = Bright(1, 2), light_in(1, 2)
    lost = torch.sigmoid(torch.tensor(3.0)) - 0.5  # the other class's logit is 0 in any case
    alone = occlusion(net, image, torch.tensor([1]), size=1, fill="zero", multi_label=True)
    torch.testing.assert_close(alone[0, 1, 2], lost)
    other = occlusion(net, image, torch.tensor([0]), size=1, fill="zero", multi_label=True)
    assert torch.equal(other, torch.zeros_like(other))
    curves = faithfulness(net, image[0], {"map": alone[0]}, 0, multi_label=True)
    np.testing.assert_allclose(curves["map"].deletion.values, 0.5)


def test_patches_lie_on_what_they_cover():
    """35 pixels hold four patches of 8; the last three rows and columns are never seen."""
    net = randomized(build(small(image_size=35, uncovered="ignore"))).eval()
    image = torch.randn(1, 3, 35, 35)
    assert covered_pixels(net, image).shape == (1, 3, 32, 32)
    got = occlusion(net, image, torch.tensor([2]), size=1)
    torch.testing.assert_close(got, occlusion(net, image[:, :, :32, :32], torch.tensor([2]), size=1))
    hiding_all = faithfulness(net, image[0], {"map": got[0]}, 2, steps=1, orders=0)["map"]
    expected = faithfulness(net, image[0, :, :32, :32], {"map": got[0]}, 2, steps=1, orders=0)["map"]
    np.testing.assert_allclose(hiding_all.deletion.values, expected.deletion.values, atol=1e-6)
    torch.testing.assert_close(attention_distance(net, image), attention_distance(net, image[:, :, :32, :32]))


def test_convolutional_networks_can_be_occluded_too():
    net = randomized(build(BiTConfig(image_size=32, num_classes=2, layers=(1, 1, 1, 1), width_factor=0.5))).eval()
    assert occlusion(net, torch.randn(1, 3, 32, 32), torch.tensor([0]), size=7, stride=7).shape == (1, 14, 14)


@pytest.mark.parametrize(("size", "stride"), [(0, 1), (5, 1), (2, 3), (2, 0)])
def test_impossible_windows_are_refused(size: int, stride: int):
    net = build(small())
    with pytest.raises(ConfigError, match="expected a square of 1 to 4 patches"):
        occlusion(net, torch.randn(1, 3, 32, 32), torch.tensor([0]), size=size, stride=stride)


def test_a_blur_is_scipys():
    image = torch.randn(1, 2, 15, 22, dtype=torch.float64)
    got = blurred(image, 2.0)[0].numpy()
    expected = np.stack([gaussian_filter(c, 2.0, mode="nearest", radius=6) for c in image[0].numpy()])
    np.testing.assert_allclose(got, expected, atol=1e-12)


def test_hidden_patches_show_the_filling_and_nothing_else_changes():
    image = torch.randn(3, 12, 20)
    instead = replacement_pixels(image[None], "mean")[0]
    mask = torch.zeros(1, 3, 5, dtype=torch.bool)
    mask[0, 1, 2] = True
    (got,) = mask_patches(image, instead, mask)
    expected = image.clone()
    expected[:, 4:8, 8:12] = image.mean((1, 2))[:, None, None]
    assert torch.equal(got, expected)
    with pytest.raises(ConfigError, match="fill='black'"):
        replacement_pixels(image[None], "black")


def test_the_right_explanation_has_the_steepest_curves_and_the_wrong_one_the_flattest():
    net, image = Bright(1, 2), light_in(1, 2)[0]
    right = torch.zeros(3, 5)
    right[1, 2] = 1
    found = faithfulness(
        net, image, {"right": right, "wrong": -right}, 1, steps=15, delete_with="zero", insert_into="zero", orders=8
    )
    sure, unsure = float(torch.sigmoid(torch.tensor(3.0))), 0.5
    deletion, insertion = found["right"].deletion, found["right"].insertion
    np.testing.assert_allclose(deletion.fractions, np.arange(16) / 15)
    np.testing.assert_allclose(deletion.values, [sure, *[unsure] * 15], atol=1e-6)
    np.testing.assert_allclose(insertion.values, [unsure, *[sure] * 15], atol=1e-6)
    np.testing.assert_allclose(found["wrong"].deletion.values, [*[sure] * 15, unsure], atol=1e-6)
    assert deletion.area == pytest.approx(unsure + (sure - unsure) / 30, abs=1e-6)
    assert found["right"].gain > found["random"].gain > found["wrong"].gain


@settings(max_examples=30)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=12))
def test_the_area_is_between_the_least_and_the_most(values: list[float]):
    curve = Curve(np.linspace(0, 1, len(values)), np.array(values))
    assert min(values) - 1e-12 <= curve.area <= max(values) + 1e-12


def test_curves_do_not_depend_on_the_batch_and_are_the_same_each_time():
    net = randomized(build(small())).eval().double()
    image = torch.randn(3, 32, 32, dtype=torch.float64)
    maps = {"one": torch.rand(4, 4)}
    first, second = (faithfulness(net, image, maps, 2, steps=5, batch_size=batch) for batch in (3, 64))
    for name in ("one", "random"):
        np.testing.assert_allclose(first[name].deletion.values, second[name].deletion.values, atol=1e-6)
        np.testing.assert_allclose(first[name].insertion.values, second[name].insertion.values, atol=1e-6)


def test_explanations_of_different_grids_are_refused():
    net = build(small())
    with pytest.raises(ConfigError, match="expected one grid for all"):
        faithfulness(net, torch.randn(3, 32, 32), {"a": torch.rand(4, 4), "b": torch.rand(2, 2)}, 0)
