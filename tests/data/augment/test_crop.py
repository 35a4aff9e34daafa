"""Crops, shifts and mirror images, against torchvision's draws and torch's, Pillow's and NumPy's arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from conftest import import_peer
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy import stats
from torch import Tensor
from torch.nn.functional import interpolate

from vitrail import rng
from vitrail.data.augment.crop import CROP, crop_boxes, flip, resized_crop, sample_flips, sample_shifts, shift

UNLIKELY = 1e-4
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


def seeds(count: int, step: int = 0) -> rng.Seeds:
    return rng.sample_seeds(3, step, np.arange(count))


def boxes_of(size: tuple[int, int], count: int, scale=SCALE, ratio=RATIO) -> np.ndarray:
    return crop_boxes(seeds(count), np.tile(size, (count, 1)), scale, ratio)


def slow_box(key: np.uint64, height: int, width: int, scale, ratio) -> tuple[int, int, int, int]:
    """torchvision's loop, one photo at a time, fed with our draws; but no box is empty, as its own may be."""
    draws = [float(u) for u in rng.uniform_np(np.array([key]), CROP, 22)[0]]
    for area_draw, ratio_draw in zip(draws[:10], draws[10:20], strict=True):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * area_draw)
        shape = math.exp(math.log(ratio[0]) + (math.log(ratio[1]) - math.log(ratio[0])) * ratio_draw)
        w, h = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < w <= width and 0 < h <= height:
            return int(draws[20] * (height - h + 1)), int(draws[21] * (width - w + 1)), h, w
    if width / height < ratio[0]:
        w, h = width, max(1, round(width / ratio[0]))
    elif width / height > ratio[1]:
        w, h = max(1, round(height * ratio[1])), height
    else:
        w, h = width, height
    return (height - h) // 2, (width - w) // 2, h, w


@given(
    st.lists(st.tuples(st.integers(1, 900), st.integers(1, 900)), min_size=1, max_size=20),
    st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)),
    st.tuples(st.floats(0.5, 2), st.floats(0.5, 2)),
)
def test_crop_box_equals_torchvisions_loop_and_is_inside_the_image(sizes: list, scale: tuple, ratio: tuple):
    scale, ratio = tuple(sorted(scale)), tuple(sorted(ratio))
    params = crop_boxes(seeds(len(sizes)), sizes, scale, ratio)
    slow = [slow_box(key, *size, scale, ratio) for key, size in zip(seeds(len(sizes)), sizes, strict=True)]
    assert params.tolist() == [list(box) for box in slow]
    for (top, left, h, w), (height, width) in zip(params, sizes, strict=True):
        assert 0 <= top <= top + h <= height
        assert 0 <= left <= left + w <= width
        assert min(h, w) > 0


@pytest.mark.peer
@pytest.mark.parametrize("size", [(256, 341), (32, 32), (400, 150)])
def test_crop_boxes_are_distributed_as_torchvisions(size: tuple[int, int]):
    peer = import_peer("torchvision.transforms").RandomResizedCrop
    ours = boxes_of(size, 4000)
    theirs = np.array([peer.get_params(torch.empty(1, *size), SCALE, RATIO) for _ in range(4000)])
    for measure in (
        lambda b: b[:, 2] * b[:, 3],
        lambda b: b[:, 3] / b[:, 2],
        lambda b: b[:, 0] + b[:, 2] / 2,
        lambda b: b[:, 1] + b[:, 3] / 2,
    ):
        jitter = np.random.rand(2, 4000) * 1e-6  # of whole numbers many are alike
        assert stats.ks_2samp(measure(ours) + jitter[0], measure(theirs) + jitter[1]).pvalue > UNLIKELY


def test_image_of_extreme_aspect_ratio_is_center_cropped():
    assert {tuple(box) for box in boxes_of((20, 2000), 500)} == {(0, 986, 20, 27)}


def test_crop_box_depends_only_on_its_seed():
    together = crop_boxes(seeds(50), np.tile((60, 80), (50, 1)), SCALE, RATIO)
    alone = np.concatenate([crop_boxes(seeds(50)[i : i + 1], [(60, 80)], SCALE, RATIO) for i in range(50)])
    np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(40, 56), (16, 16), (7, 91), (64, 80)])
def test_resized_crop_equals_torchs_resize_of_the_part(images: Tensor, interpolation, size: tuple[int, int]):
    boxes = boxes_of((40, 56), len(images))
    ours = resized_crop(images, torch.from_numpy(boxes), size, interpolation)
    for photo, (top, left, h, w), got in zip(images, boxes, ours, strict=True):
        part = photo[None, :, top : top + h, left : left + w]
        expected = interpolate(part, size, mode=interpolation, antialias=True, align_corners=False)[0]
        torch.testing.assert_close(got, expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_resized_crop_equals_pillows_up_to_rounding(photos: Tensor, interpolation):
    boxes = boxes_of((40, 56), len(photos))
    ours = resized_crop(photos, torch.from_numpy(boxes), (32, 32), interpolation)
    assert ours.dtype == torch.float32
    for photo, (top, left, h, w), got in zip(photos, boxes, ours, strict=True):
        image = Image.fromarray(photo.permute(1, 2, 0).numpy()).crop((left, top, left + w, top + h))
        expected = np.asarray(image.resize((32, 32), Image.Resampling[interpolation.upper()]), np.float32)
        assert np.abs(got.clamp(0, 255).permute(1, 2, 0).numpy() - expected).max() < 1.6  # two roundings


@pytest.mark.parametrize("pad", [1, 4])
def test_shift_is_a_crop_of_the_reflection_padded_image(photos: Tensor, pad: int):
    by = sample_shifts(seeds(len(photos)), pad)
    ours = shift(photos, torch.from_numpy(by)).numpy()
    for photo, (down, right), got in zip(photos.numpy(), by, ours, strict=True):
        wide = np.pad(photo, ((0, 0), (pad, pad), (pad, pad)), mode="reflect")
        expected = wide[:, pad - down : pad - down + 40, pad - right : pad - right + 56]
        np.testing.assert_array_equal(got, expected)


def test_shifts_are_uniform_in_both_directions():
    by = sample_shifts(seeds(20_000), 4)
    counts = np.histogram2d(by[:, 0], by[:, 1], bins=9, range=[[-4.5, 4.5]] * 2)[0]
    assert counts.sum() == 20_000
    assert stats.chisquare(counts.ravel()).pvalue > UNLIKELY


def test_flips_have_the_requested_probability(images: Tensor):
    assert not sample_flips(seeds(1000), 0.0).any()
    assert sample_flips(seeds(1000), 1.0).all()
    assert stats.binomtest(int(sample_flips(seeds(20_000), 0.3).sum()), 20_000, 0.3).pvalue > UNLIKELY
    np.testing.assert_array_equal(flip(images).numpy(), images.numpy()[..., ::-1])
