"""Turned, slanted and moved images, against Pillow's and SciPy's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from torch import Tensor

from vitrail.data.augment.affine import Matrices, affine, identity, rotation, shear, translation

SIZE = (40, 56)
FILL = torch.tensor([0.5, 0.25, 0.75])[:, None, None]

some = np.linspace(-1, 1, 16)
none = np.zeros(16)
MATRICES: dict[str, Matrices] = {
    "rotate": rotation(30 * some, SIZE),
    "shear x": shear(0.3 * some, none),
    "shear y": shear(none, 0.3 * some),
    "translate x": translation(0.45 * 56 * some, none),
    "translate y": translation(none, 0.45 * 40 * some),
}


def as_tensor(matrices: Matrices) -> Tensor:
    return torch.from_numpy(matrices.astype(np.float32))


@pytest.mark.parametrize("name", MATRICES)
def test_affine_equals_scipys_interpolation(images: Tensor, name: str):
    ours = affine(images, as_tensor(MATRICES[name]), FILL)
    y, x = np.mgrid[:40, :56] + 0.5
    for photo, matrix, got in zip(images, MATRICES[name], ours, strict=True):
        at = np.einsum("ij,jhw->ihw", matrix, np.stack([x, y, np.ones_like(x)])) - 0.5
        for channel in range(3):
            pixels, fill = photo[channel].double().numpy(), float(FILL[channel])
            expected = ndimage.map_coordinates(pixels, at[::-1], order=1, mode="grid-constant", cval=fill)
            np.testing.assert_allclose(got[channel].numpy(), expected, rtol=0, atol=3e-5)


@pytest.mark.parametrize("name", MATRICES)
def test_affine_equals_pillows_transform_inside_the_image(photos: Tensor, name: str):
    ours = affine(photos / 255, as_tensor(MATRICES[name]), FILL)
    for photo, matrix, got in zip(photos, MATRICES[name], ours, strict=True):
        image = Image.fromarray(photo.permute(1, 2, 0).numpy())
        expected = image.transform(image.size, Image.Transform.AFFINE, matrix.ravel(), Image.Resampling.BILINEAR)
        marked = Image.new("L", image.size, 255).transform(image.size, Image.Transform.AFFINE, matrix.ravel())
        inside = ndimage.binary_erosion(np.asarray(marked) > 0, iterations=2)
        assert inside.sum() > 300
        gap = np.abs(got.permute(1, 2, 0).numpy() - np.asarray(expected) / 255.0)[inside]
        assert gap.max() < 1.1 / 255  # Pillow cuts off what is between two levels


def test_rotation_is_counterclockwise_as_pillows(photos: Tensor):
    degrees = np.full(16, 20.0)
    ours = affine(photos / 255, as_tensor(rotation(degrees, SIZE)), torch.zeros(3, 1, 1))
    expected = np.asarray(Image.fromarray(photos[0].permute(1, 2, 0).numpy()).rotate(20, Image.Resampling.BILINEAR))
    middle = np.s_[12:28, 18:38]
    assert np.abs(ours[0].permute(1, 2, 0).numpy() - expected / 255.0)[middle].max() < 1.1 / 255


def test_identity_changes_nothing(images: Tensor):
    torch.testing.assert_close(affine(images, as_tensor(identity(16)), FILL), images, rtol=0, atol=1e-5)


def test_pixels_from_outside_have_the_fill_color(images: Tensor):
    moved = affine(images, as_tensor(translation(np.full(16, 100.0), none)), FILL)
    torch.testing.assert_close(moved, FILL.expand_as(moved), rtol=0, atol=1e-6)


def test_an_image_has_the_same_bits_in_any_batch(images: Tensor):
    matrices = as_tensor(MATRICES["rotate"])
    together = affine(images, matrices, FILL)
    for size in (1, 3, 4):
        parts = [affine(images[i : i + size], matrices[i : i + size], FILL) for i in range(0, 16, size)]
        assert torch.equal(torch.cat(parts), together)
