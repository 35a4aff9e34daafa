"""Changes of color, against Pillow's and torchvision's own, and their bits in batches of any size.

Pillow computes in 256 levels and mostly cuts off what is between them: where it is the reference,
one level is allowed, or none where the definition itself is in levels.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from conftest import import_peer
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from scipy import ndimage
from torch import Tensor

from vitrail.data.augment import color
from vitrail.data.augment.three_augment import gaussian_weights

LEVEL = 1 / 255


def to_pillow(image: Tensor) -> Image.Image:
    pixels = (image * 255).round().to(torch.uint8)
    return Image.fromarray(pixels[0].numpy() if len(pixels) == 1 else pixels.permute(1, 2, 0).numpy())


def from_pillow(image: Image.Image) -> Tensor:
    pixels = torch.from_numpy(np.array(image))
    return (pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)) / 255


def amounts(count: int, low: float, high: float) -> Tensor:
    return torch.linspace(low, high, count)


def farthest(ours: Tensor, images: Tensor, reference: Callable[[Image.Image, float], Image.Image], numbers) -> float:
    expected = torch.stack(
        [from_pillow(reference(to_pillow(i), float(n))) for i, n in zip(images, numbers, strict=True)]
    )
    return float((ours - expected).abs().max())


ENHANCED = [
    (color.brightness, ImageEnhance.Brightness, "adjust_brightness"),
    (color.contrast, ImageEnhance.Contrast, "adjust_contrast"),
    (color.saturation, ImageEnhance.Color, "adjust_saturation"),
    (color.sharpness, ImageEnhance.Sharpness, "adjust_sharpness"),
]


@pytest.mark.parametrize(("change", "enhance"), [(change, enhance) for change, enhance, _ in ENHANCED])
def test_enhancements_equal_pillows(images: Tensor, change, enhance):
    factors = amounts(len(images), 0.1, 1.9)
    # Against the mean gray: Pillow rounds that too. Sharper: what is softer is rounded first.
    allowed = {color.contrast: 1.5, color.sharpness: 2, color.saturation: 1.5}.get(change, 1) * LEVEL + 1e-5
    assert farthest(change(images, factors), images, lambda i, f: enhance(i).enhance(f), factors) < allowed


@pytest.mark.peer
@pytest.mark.parametrize(("change", "name"), [(change, name) for change, _, name in ENHANCED])
def test_enhancements_equal_torchvisions_without_rounding(images: Tensor, change, name: str):
    peer = getattr(import_peer("torchvision.transforms.v2.functional"), name)
    factors = amounts(len(images), 0.0, 2.0)
    expected = torch.stack([peer(image, float(factor)) for image, factor in zip(images, factors, strict=True)])
    torch.testing.assert_close(change(images, factors), expected, rtol=0, atol=2e-4)  # its gray has .2989 of red


@pytest.mark.peer
def test_hue_equals_torchvisions(images: Tensor):
    peer = import_peer("torchvision.transforms.v2.functional").adjust_hue
    turns = amounts(len(images), -0.5, 0.5)
    expected = torch.stack([peer(image, float(turn)) for image, turn in zip(images, turns, strict=True)])
    torch.testing.assert_close(color.hue(images, turns), expected, rtol=0, atol=1e-5)


def test_hue_rotates_pure_colors():
    red, green, blue, white = torch.eye(3)[0], torch.eye(3)[1], torch.eye(3)[2], torch.ones(3)
    images = torch.stack([red, green, blue, white])[:, :, None, None]
    turned = color.hue(images, torch.full((4,), 1 / 3))[..., 0, 0]
    torch.testing.assert_close(turned, torch.stack([green, blue, red, white]), rtol=0, atol=1e-6)


def test_full_hue_rotation_is_the_identity(images: Tensor):
    half = torch.full((len(images),), 0.5)
    torch.testing.assert_close(color.hue(color.hue(images, half), half), images, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "reference", "numbers"),
    [
        (color.solarize, lambda i, t: ImageOps.solarize(i, int(t)), amounts(16, 0, 256).round()),
        (color.posterize, lambda i, b: ImageOps.posterize(i, int(b)), torch.arange(16.0) % 8 + 1),
        (lambda i, n: color.equalize(i), lambda i, n: ImageOps.equalize(i), torch.zeros(16)),
        (color.solarize, lambda i, n: ImageOps.invert(i), torch.zeros(16)),
        (lambda i, n: color.grayscale(i), lambda i, n: ImageOps.grayscale(i).convert("RGB"), torch.zeros(16)),
        (lambda i, n: color.auto_contrast(i), lambda i, n: ImageOps.autocontrast(i), torch.zeros(16)),
    ],
    ids=["solarize", "posterize", "equalize", "invert", "gray", "auto-contrast"],
)
def test_level_operations_equal_pillows(images: Tensor, change, reference, numbers: Tensor, request):
    cut_off = LEVEL if request.node.callspec.id in ("gray", "auto-contrast") else 0
    assert farthest(change(images, numbers), images, reference, numbers) < cut_off + 1e-5


def test_posterize_to_zero_bits_is_black(images: Tensor):
    assert not color.posterize(images, torch.zeros(len(images))).any()


@pytest.mark.peer
def test_solarize_add_equals_timms(images: Tensor):
    peer = import_peer("timm.data.auto_augment").solarize_add
    levels = torch.arange(16.0) * 7
    assert farthest(color.solarize_add(images, levels), images, lambda i, n: peer(i, int(n)), levels) < 1e-5


def test_equalize_leaves_images_of_one_level_or_few_pixels_unchanged():
    flat = torch.full((1, 3, 30, 30), 77 / 255)
    torch.testing.assert_close(color.equalize(flat), flat, rtol=0, atol=1e-6)
    small = (torch.arange(48.0) / 255).view(1, 3, 4, 4)  # fewer pixels than levels
    torch.testing.assert_close(color.equalize(small), small, rtol=0, atol=1e-6)


def test_auto_contrast_leaves_constant_channels_unchanged():
    flat = torch.full((1, 3, 5, 5), 0.3)
    torch.testing.assert_close(color.auto_contrast(flat), flat, rtol=0, atol=0)


def test_blur_is_a_truncated_gaussian(images: Tensor):
    deviations = np.linspace(0.1, 2, len(images))
    ours = color.blur(images, torch.from_numpy(gaussian_weights(deviations, 6))).numpy()
    for image, deviation, got in zip(images.numpy(), deviations, ours, strict=True):
        expected = ndimage.gaussian_filter(image.astype(np.float64), deviation, axes=(1, 2), mode="nearest", radius=6)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)


def test_blur_is_close_to_pillows_box_approximation(images: Tensor):
    deviations = np.linspace(0.1, 2, len(images))
    ours = color.blur(images, torch.from_numpy(gaussian_weights(deviations, 6)))
    expected = torch.stack(
        [
            from_pillow(to_pillow(i).filter(ImageFilter.GaussianBlur(float(d))))
            for i, d in zip(images, deviations, strict=True)
        ]
    )
    assert (ours - expected).abs().mean() < 0.5 * LEVEL
    assert (ours - expected).abs().max() < 8 * LEVEL


def test_color_operations_leave_gray_images_unchanged(images: Tensor):
    one = images[:, :1]
    for change in (color.saturation, color.hue):
        torch.testing.assert_close(change(one, torch.full((16,), 0.4)), one, rtol=0, atol=0)
    torch.testing.assert_close(color.grayscale(one), one, rtol=0, atol=0)
    factors = amounts(16, 0.1, 1.9)
    enhance = lambda i, f: ImageEnhance.Contrast(i).enhance(f)  # noqa: E731
    assert farthest(color.contrast(one, factors), one, enhance, factors) < 1.5 * LEVEL
    assert farthest(color.equalize(one), one, lambda i, _: ImageOps.equalize(i), factors) < 1e-5


def test_sharpness_accepts_images_of_two_pixels():
    tiny = torch.rand(2, 3, 2, 2)
    torch.testing.assert_close(color.sharpness(tiny, torch.tensor([0.0, 2.0])), tiny)


def test_values_stay_between_0_and_1(images: Tensor):
    factors = torch.full((len(images),), 1.9)
    for change, _, _ in ENHANCED:
        changed = change(images, factors)
        assert changed.min() >= 0
        assert changed.max() <= 1


OPERATIONS_TMP: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "brightness": color.brightness,
    "contrast": color.contrast,
    "saturation": color.saturation,
    "hue": color.hue,
    "gray": lambda images, _: color.grayscale(images),
    "solarize": lambda images, n: color.solarize(images, 200 * n),
    "solarize-add": lambda images, n: color.solarize_add(images, 50 * n),
    "posterize": lambda images, n: color.posterize(images, (4 * n).floor()),
    "auto-contrast": lambda images, _: color.auto_contrast(images),
    "equalize": lambda images, _: color.equalize(images),
    "sharpness": color.sharpness,
    "blur": lambda images, n: color.blur(images, torch.stack([1 - n / 2, n / 8, n / 8], dim=1)),
}


@pytest.mark.parametrize("name", OPERATIONS_TMP)
@pytest.mark.parametrize("threads", [1, 2])
def test_an_image_has_the_same_bits_in_any_batch(images: Tensor, name: str, threads: int):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    large = torch.nn.functional.interpolate(images[:5], (103, 111))  # large enough to be shared out, and odd
    numbers = amounts(len(large), 0.3, 1.2)
    together = OPERATIONS_TMP[name](large, numbers)
    parts = [OPERATIONS_TMP[name](large[a:b], numbers[a:b]) for a, b in ((0, 1), (1, 4), (4, 5))]
    torch.set_num_threads(before)
    assert torch.equal(torch.cat(parts), together)


@pytest.mark.parametrize("name", OPERATIONS_TMP)
def test_operations_do_not_modify_their_input(images: Tensor, name: str):
    original = images.clone()
    OPERATIONS_TMP[name](images, amounts(len(images), 0.3, 1.2))
    assert torch.equal(images, original)
