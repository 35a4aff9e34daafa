"""Occlusion, deletion and insertion, on networks with known outputs."""

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


class PatchBrightness(nn.Module):
    """Network whose logit of class 1 is 3 times the mean of one 4 x 4 patch of a 3 x 5 grid."""

    def __init__(self, row: int, column: int) -> None:
        super().__init__()
        self.row, self.column = row, column
        self.scale = nn.Parameter(torch.ones(()))
        self.batch_sizes: list[int] = []

        class Config:
            num_classes = 2

            @staticmethod
            def grid_of(size: tuple[int, int]) -> tuple[int, int]:
                return size[0] // 4, size[1] // 4

        self.config = Config

    def forward(self, images: Tensor) -> Tensor:
        self.batch_sizes.append(len(images))
        brightness = images[:, :, 4 * self.row : 4 * self.row + 4, 4 * self.column : 4 * self.column + 4].mean(
            (1, 2, 3)
        )
        return torch.stack([torch.zeros_like(brightness), 3 * brightness], 1) * self.scale


def image_with_bright_patch(row: int, column: int) -> Tensor:
    image = torch.zeros(1, 3, 12, 20)
    image[:, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = 1
    return image


@settings(max_examples=25)
@given(st.integers(0, 2), st.integers(0, 4), st.integers(1, 3), st.integers(1, 7))
def test_occlusion_finds_the_only_patch_that_matters(row: int, column: int, size: int, batch: int):
    net, image = PatchBrightness(row, column), image_with_bright_patch(row, column)
    got = occlusion(net, image, torch.tensor([1]), size=size, fill="zero", batch_size=batch)[0]
    assert got.shape == (3, 5)
    assert got[row, column] == got.max() > 0
    assert max(net.batch_sizes) <= batch
    if size == 1:
        drop = torch.sigmoid(torch.tensor(3.0)) - 0.5
        torch.testing.assert_close(got[row, column], drop)
        assert torch.equal(got.flatten().sort().values[:-1], torch.zeros(14))


def test_patch_gets_the_mean_drop_of_the_windows_that_cover_it():
    net, image = PatchBrightness(1, 2), image_with_bright_patch(1, 2)
    got = occlusion(net, image, torch.tensor([1]), size=2, stride=1, fill="zero")[0].double()
    drop = float(torch.sigmoid(torch.tensor(3.0)) - 0.5)
    sums, counts = np.zeros((3, 5)), np.zeros((3, 5))
    for top in range(2):
        for left in range(4):
            covers = top <= 1 <= top + 1 and left <= 2 <= left + 1
            sums[top : top + 2, left : left + 2] += drop * covers
            counts[top : top + 2, left : left + 2] += 1
    np.testing.assert_allclose(got.numpy(), sums / counts, atol=1e-7)


@settings(max_examples=60)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4))
def test_windows_cover_every_patch(rows: int, columns: int, size: int, stride: int):
    size = min(size, rows, columns)
    masks = windows((rows, columns), size, min(stride, size))
    assert masks.any(0).all()
    assert (masks.sum((1, 2)) == size**2).all()
    assert len({tuple(m.flatten().tolist()) for m in masks}) == len(masks)


def test_one_row_or_one_patch_can_be_occluded():
    for grid in ((1, 5), (3, 1), (1, 1)):
        net = PatchBrightness(0, 0)
        got = occlusion(net, torch.ones(1, 3, 4 * grid[0], 4 * grid[1]), torch.tensor([1]), stride=2, fill="zero")
        assert got.shape == (1, *grid)
        assert got[0, 0, 0] > 0


def test_multi_label_occlusion_uses_the_sigmoid_of_the_class():
    net, image = PatchBrightness(1, 2), image_with_bright_patch(1, 2)
    drop = torch.sigmoid(torch.tensor(3.0)) - 0.5  # the other class's logit is 0 in any case
    of_class_1 = occlusion(net, image, torch.tensor([1]), size=1, fill="zero", multi_label=True)
    torch.testing.assert_close(of_class_1[0, 1, 2], drop)
    of_class_0 = occlusion(net, image, torch.tensor([0]), size=1, fill="zero", multi_label=True)
    assert torch.equal(of_class_0, torch.zeros_like(of_class_0))
    curves = faithfulness(net, image[0], {"map": of_class_1[0]}, 0, multi_label=True)
    np.testing.assert_allclose(curves["map"].deletion.values, 0.5)


def test_uncovered_pixels_are_ignored():
    """35 pixels hold four patches of 8; the last three rows and columns are not used."""
    net = randomized(build(small(image_size=35, uncovered="ignore"))).eval()
    image = torch.randn(1, 3, 35, 35)
    assert covered_pixels(net, image).shape == (1, 3, 32, 32)
    got = occlusion(net, image, torch.tensor([2]), size=1)
    torch.testing.assert_close(got, occlusion(net, image[:, :, :32, :32], torch.tensor([2]), size=1))
    actual = faithfulness(net, image[0], {"map": got[0]}, 2, steps=1, orders=0)["map"]
    expected = faithfulness(net, image[0, :, :32, :32], {"map": got[0]}, 2, steps=1, orders=0)["map"]
    np.testing.assert_allclose(actual.deletion.values, expected.deletion.values, atol=1e-6)
    torch.testing.assert_close(attention_distance(net, image), attention_distance(net, image[:, :, :32, :32]))


def test_convolutional_networks_can_be_occluded():
    net = randomized(build(BiTConfig(image_size=32, num_classes=2, layers=(1, 1, 1, 1), width_factor=0.5))).eval()
    assert occlusion(net, torch.randn(1, 3, 32, 32), torch.tensor([0]), size=7, stride=7).shape == (1, 14, 14)


@pytest.mark.parametrize(("size", "stride"), [(0, 1), (5, 1), (2, 3), (2, 0)])
def test_invalid_windows_are_an_error(size: int, stride: int):
    net = build(small())
    with pytest.raises(ConfigError, match="expected a size of 1 to 4 patches"):
        occlusion(net, torch.randn(1, 3, 32, 32), torch.tensor([0]), size=size, stride=stride)


def test_blur_equals_scipys():
    image = torch.randn(1, 2, 15, 22, dtype=torch.float64)
    got = blurred(image, 2.0)[0].numpy()
    expected = np.stack([gaussian_filter(c, 2.0, mode="nearest", radius=6) for c in image[0].numpy()])
    np.testing.assert_allclose(got, expected, atol=1e-12)


def test_only_masked_patches_are_replaced():
    image = torch.randn(3, 12, 20)
    replacement = replacement_pixels(image[None], "mean")[0]
    mask = torch.zeros(1, 3, 5, dtype=torch.bool)
    mask[0, 1, 2] = True
    (got,) = mask_patches(image, replacement, mask)
    expected = image.clone()
    expected[:, 4:8, 8:12] = image.mean((1, 2))[:, None, None]
    assert torch.equal(got, expected)
    with pytest.raises(ConfigError, match="fill='black'"):
        replacement_pixels(image[None], "black")


def test_correct_map_scores_above_random_and_inverted_map_below():
    net, image = PatchBrightness(1, 2), image_with_bright_patch(1, 2)[0]
    right = torch.zeros(3, 5)
    right[1, 2] = 1
    results = faithfulness(
        net, image, {"right": right, "wrong": -right}, 1, steps=15, delete_with="zero", insert_into="zero", orders=8
    )
    with_patch, without_patch = float(torch.sigmoid(torch.tensor(3.0))), 0.5
    deletion, insertion = results["right"].deletion, results["right"].insertion
    np.testing.assert_allclose(deletion.fractions, np.arange(16) / 15)
    np.testing.assert_allclose(deletion.values, [with_patch, *[without_patch] * 15], atol=1e-6)
    np.testing.assert_allclose(insertion.values, [without_patch, *[with_patch] * 15], atol=1e-6)
    np.testing.assert_allclose(results["wrong"].deletion.values, [*[with_patch] * 15, without_patch], atol=1e-6)
    assert deletion.area == pytest.approx(without_patch + (with_patch - without_patch) / 30, abs=1e-6)
    assert results["right"].gain > results["random"].gain > results["wrong"].gain


@settings(max_examples=30)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=12))
def test_area_is_between_the_minimum_and_the_maximum(values: list[float]):
    curve = Curve(np.linspace(0, 1, len(values)), np.array(values))
    assert min(values) - 1e-12 <= curve.area <= max(values) + 1e-12


def test_curves_do_not_depend_on_the_batch_size_and_are_reproducible():
    net = randomized(build(small())).eval().double()
    image = torch.randn(3, 32, 32, dtype=torch.float64)
    maps = {"one": torch.rand(4, 4)}
    first, second = (faithfulness(net, image, maps, 2, steps=5, batch_size=batch) for batch in (3, 64))
    for name in ("one", "random"):
        np.testing.assert_allclose(first[name].deletion.values, second[name].deletion.values, atol=1e-6)
        np.testing.assert_allclose(first[name].insertion.values, second[name].insertion.values, atol=1e-6)


def test_maps_of_different_grids_are_an_error():
    net = build(small())
    with pytest.raises(ConfigError, match="expected one grid for all"):
        faithfulness(net, torch.randn(3, 32, 32), {"a": torch.rand(4, 4), "b": torch.rand(2, 2)}, 0)
