"""Changes of color: each a function of images b C H W in [0, 1] and one number for each of them.

Definitions are Pillow's (ImageOps, ImageEnhance) and torchvision's, without rounding to 256 levels
between one change and the next. Images of one channel are gray already: what needs colors leaves
them alone. Sums over an image are of whole numbers, so that no order of summation shows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.data.augment.params import per_image

# b images, C channels, H W pixels

LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, Pillow's "L"
FIXED_POINT = 2**20  # parts of the brightest, for sums
NUDGE = 1e-3  # of a level: v / 255 * 255 may come out just under v


def luma(images: Tensor) -> Tensor:
    """How bright each pixel is: b 1 H W."""
    if images.shape[1] == 1:
        return images
    red, green, blue = (images[:, c : c + 1] * share for c, share in enumerate(LUMA))
    return red.add_(green).add_(blue)


def mean_luma(images: Tensor) -> Tensor:
    """How bright each image is: b 1 1 1."""
    whole = (luma(images) * FIXED_POINT).round().to(torch.int64).sum((1, 2, 3))
    return per_image(whole.to(torch.float32) / (FIXED_POINT * images.shape[2] * images.shape[3]))


def blend(images: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    """Factor 1 is the image, 0 the other, 2 as far on the image's other side; clipped."""
    share = per_image(factor)
    return (images * share).add_(other * (1 - share)).clamp_(0, 1)


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Between black and twice as bright."""
    return (images * per_image(factor)).clamp_(0, 1)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Against the mean gray."""
    return blend(images, mean_luma(images), factor)


def saturation(images: Tensor, factor: Tensor) -> Tensor:
    """Against the same image in gray."""
    return images if images.shape[1] == 1 else blend(images, luma(images), factor)


def grayscale(images: Tensor) -> Tensor:
    """The same image in gray, with as many channels."""
    return luma(images).expand_as(images)


def hue(images: Tensor, turn: Tensor) -> Tensor:
    """Colors turned by a share of the circle of hue, saturation and value; -0.5 and 0.5 are the same."""
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
    """Levels of `threshold` (0 to 256, of 255) and above are inverted; 0 inverts everything."""
    return torch.where(images < per_image(_threshold_between_levels(threshold)), images, 1 - images)


def solarize_add(images: Tensor, levels: Tensor) -> Tensor:
    """Levels under 128 become brighter by so many."""
    return torch.where(images < 127.5 / 255, (images + per_image(levels) / 255).clamp(max=1), images)


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Only so many bits of the 8 are kept."""
    step = per_image((1 << (8 - bits.to(torch.int32).clamp(0, 8))).to(torch.float32))
    return (images * 255).add_(NUDGE).div_(step).floor_().mul_(step).div_(255)


def auto_contrast(images: Tensor) -> Tensor:
    """The darkest level of each channel becomes black, the brightest white; flat channels stay."""
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    span = high - low
    return torch.where(span > 0, (images - low) / torch.where(span > 0, span, 1), images)


def equalize(images: Tensor) -> Tensor:
    """Each channel's levels spread so that all are about equally common (Pillow's ImageOps.equalize)."""
    planes, pixels = images.shape[0] * images.shape[1], images.shape[2] * images.shape[3]
    device = images.device
    places = (images * 255).round_().to(torch.int64).view(planes, pixels)
    places = places.add_(torch.arange(planes, device=device)[:, None] * 256).flatten()
    counts = torch.zeros(planes * 256, dtype=torch.int32, device=device)  # one axis: CUDA counts deterministically
    one = torch.ones((), dtype=torch.int32, device=device)
    counts = counts.scatter_add_(0, places, one.expand_as(places)).view(planes, 256)
    levels = torch.arange(256, device=device)
    brightest = torch.where(counts > 0, levels, 0).amax(1, keepdim=True)
    step = (pixels - counts.gather(1, brightest)) // 255
    table = (counts.cumsum(1) - counts + step // 2) // step.clamp(min=1)
    table = torch.where(step > 0, table.clamp(max=255), levels).to(torch.float32) / 255
    return table.flatten().index_select(0, places).view_as(images)


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """Against a softer image: each pixel 5 parts of itself and 1 of each neighbor; edges stay."""
    if min(images.shape[2:]) < 3:
        return images
    rows = (images[:, :, :-2] + images[:, :, 1:-1]).add_(images[:, :, 2:])
    around = (rows[..., :-2] + rows[..., 1:-1]).add_(rows[..., 2:])
    softer = images.clone()
    softer[:, :, 1:-1, 1:-1] = around.add_(4 * images[:, :, 1:-1, 1:-1]).div_(13)
    return blend(images, softer, factor)


def blur(images: Tensor, weights: Tensor) -> Tensor:
    """Each pixel and its neighbors along both axes, weighed by distance 0, 1, ... (b n); edges go on outside."""
    for axis in (3, 2):
        images = _blur_axis(images, weights, axis)
    return images


def _blur_axis(images: Tensor, weights: Tensor, axis: int) -> Tensor:
    reach, side = weights.shape[1] - 1, images.shape[axis]
    padding = (reach, reach, 0, 0) if axis == 3 else (0, 0, reach, reach)
    padded = torch.nn.functional.pad(images, padding, mode="replicate")
    out = images * per_image(weights[:, 0])
    for far in range(1, reach + 1):
        pair = padded.narrow(axis, reach - far, side) + padded.narrow(axis, reach + far, side)
        out = out.add_(pair.mul_(per_image(weights[:, far])))
    return out


def _threshold_between_levels(threshold: Tensor) -> Tensor:
    """Half a level under a threshold, so that rounding decides nothing."""
    return (threshold - 0.5) / 255
