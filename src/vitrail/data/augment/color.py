"""Color operations: functions of images, b C H W in [0, 1], and one number per image.

Definitions are Pillow's (ImageOps, ImageEnhance) and torchvision's, without rounding to 256 levels between
operations. Images with one channel are gray, and operations on colors do not change them. Sums over an image
are sums of integers, so that the result does not depend on the order of summation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.data.augment.params import per_image

# b images, C channels, H W pixels

LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, Pillow's "L"
FIXED_POINT = 2**20  # integer value of 1.0, for sums
NUDGE = 1e-3  # of a level, because v / 255 * 255 may be slightly less than v


def luma(images: Tensor) -> Tensor:
    """Brightness of each pixel: b 1 H W."""
    if images.shape[1] == 1:
        return images
    red, green, blue = (images[:, c : c + 1] * weight for c, weight in enumerate(LUMA))
    return red.add_(green).add_(blue)


def mean_luma(images: Tensor) -> Tensor:
    """Mean brightness of each image: b 1 1 1."""
    total = (luma(images) * FIXED_POINT).round().to(torch.int64).sum((1, 2, 3))
    return per_image(total.to(torch.float32) / (FIXED_POINT * images.shape[2] * images.shape[3]))


def blend(images: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    """factor * images + (1 - factor) * other, clipped to [0, 1]."""
    weight = per_image(factor)
    return (images * weight).add_(other * (1 - weight)).clamp_(0, 1)


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Scale the values: factor 0 is black, 1 the image."""
    return (images * per_image(factor)).clamp_(0, 1)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the mean gray: factor 0 is gray, 1 the image."""
    return blend(images, mean_luma(images), factor)


def saturation(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the gray image: factor 0 is gray, 1 the image."""
    return images if images.shape[1] == 1 else blend(images, luma(images), factor)


def grayscale(images: Tensor) -> Tensor:
    """Grayscale with the same number of channels."""
    return luma(images).expand_as(images)


def hue(images: Tensor, turn: Tensor) -> Tensor:
    """Rotate the hue in HSV by `turn` of the full circle; -0.5 and 0.5 are the same."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.unbind(1)  # each b H W
    value = images.amax(1)
    chroma = value - images.amin(1)
    divisor = torch.where(chroma > 0, chroma, 1)
    sixths = torch.where(
        value == red,
        (green - blue) / divisor,
        torch.where(value == green, (blue - red) / divisor + 2, (red - green) / divisor + 4),
    )
    sixths = sixths + 6 * turn[:, None, None]

    def channel(start: int) -> Tensor:
        at = sixths + start
        at = at - 6 * (at / 6).floor()
        return value - chroma * torch.minimum(at, 4 - at).clamp(0, 1)

    return torch.stack([channel(5), channel(3), channel(1)], dim=1)


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Invert levels (of 255) of at least `threshold` (0 to 256); 0 inverts everything."""
    return torch.where(images < per_image(_threshold_between_levels(threshold)), images, 1 - images)


def solarize_add(images: Tensor, levels: Tensor) -> Tensor:
    """Add `levels` (of 255) to levels below 128."""
    return torch.where(images < 127.5 / 255, (images + per_image(levels) / 255).clamp(max=1), images)


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep the upper `bits` of 8 bits."""
    step = per_image((1 << (8 - bits.to(torch.int32).clamp(0, 8))).to(torch.float32))
    return (images * 255).add_(NUDGE).div_(step).floor_().mul_(step).div_(255)


def auto_contrast(images: Tensor) -> Tensor:
    """Stretch each channel so that its minimum is 0 and its maximum 1; constant channels are unchanged."""
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    span = high - low
    return torch.where(span > 0, (images - low) / torch.where(span > 0, span, 1), images)


def equalize(images: Tensor) -> Tensor:
    """Equalize each channel's histogram (Pillow's ImageOps.equalize)."""
    planes, pixels = images.shape[0] * images.shape[1], images.shape[2] * images.shape[3]
    device = images.device
    bins = (images * 255).round_().to(torch.int64).view(planes, pixels)
    bins = bins.add_(torch.arange(planes, device=device)[:, None] * 256).flatten()
    counts = torch.zeros(planes * 256, dtype=torch.int32, device=device)  # one axis: deterministic on CUDA
    one = torch.ones((), dtype=torch.int32, device=device)
    counts = counts.scatter_add_(0, bins, one.expand_as(bins)).view(planes, 256)
    levels = torch.arange(256, device=device)
    brightest = torch.where(counts > 0, levels, 0).amax(1, keepdim=True)
    step = (pixels - counts.gather(1, brightest)) // 255
    table = (counts.cumsum(1) - counts + step // 2) // step.clamp(min=1)
    table = torch.where(step > 0, table.clamp(max=255), levels).to(torch.float32) / 255
    return table.flatten().index_select(0, bins).view_as(images)


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with a smoothed image (5 parts the pixel, 1 part each of its 8 neighbors; the border is unchanged)."""
    if min(images.shape[2:]) < 3:
        return images
    rows = (images[:, :, :-2] + images[:, :, 1:-1]).add_(images[:, :, 2:])
    neighborhood = (rows[..., :-2] + rows[..., 1:-1]).add_(rows[..., 2:])
    smoothed = images.clone()
    smoothed[:, :, 1:-1, 1:-1] = neighborhood.add_(4 * images[:, :, 1:-1, 1:-1]).div_(13)
    return blend(images, smoothed, factor)


def blur(images: Tensor, weights: Tensor) -> Tensor:
    """Separable blur with weights for distance 0, 1, ... (b n); edge pixels are repeated outside."""
    for axis in (3, 2):
        images = _blur_axis(images, weights, axis)
    return images


def _blur_axis(images: Tensor, weights: Tensor, axis: int) -> Tensor:
    radius, side = weights.shape[1] - 1, images.shape[axis]
    padding = (radius, radius, 0, 0) if axis == 3 else (0, 0, radius, radius)
    padded = torch.nn.functional.pad(images, padding, mode="replicate")
    out = images * per_image(weights[:, 0])
    for distance in range(1, radius + 1):
        pair = padded.narrow(axis, radius - distance, side) + padded.narrow(axis, radius + distance, side)
        out = out.add_(pair.mul_(per_image(weights[:, distance])))
    return out


def _threshold_between_levels(threshold: Tensor) -> Tensor:
    """Half a level below the threshold, so that rounding does not matter."""
    return (threshold - 0.5) / 255
