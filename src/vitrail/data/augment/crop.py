"""Random resized crops, shifts and horizontal flips.

`crop_boxes` needs sizes and seeds only, so that the loader's workers, which decode just the crop, and the
device, which holds whole small images, crop the same box for the same seed.

Resizing is separable: each output row is a weighted sum of a few input rows, then each column of a few
columns. Rows are gathered and added one after the other, which is slower on a CPU than a matrix product
(19 ms instead of 8 for 1024 x 3 x 32 x 32), but gives the same bits in any batch.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitrail import rng

# b images, C channels, H W pixels of the input, h w of the output, T inputs that one output mixes

CROP, SHIFT, FLIP = (rng.stream_id(name) for name in ("crop", "shift", "flip"))
MAX_TRIES = 10

Boxes = npt.NDArray[np.int64]
"""n 4: top, left, height, width."""
Interpolation = Literal["bilinear", "bicubic"]

FILTER_RADIUS = {"bilinear": 1, "bicubic": 2}


def crop_boxes(seeds: rng.Seeds, sizes: npt.ArrayLike, scale: tuple[float, float], ratio: tuple[float, float]) -> Boxes:
    """A random box in each image: seeds (n), sizes (n 2: height, width) -> n 4: top, left, height, width.

    torchvision's RandomResizedCrop: an area uniform in `scale` and a width over height log-uniform
    in `ratio`, tried up to ten times until it fits; else the largest centered part whose shape is allowed.
    """
    sizes = np.asarray(sizes, dtype=np.int64).reshape(-1, 2)
    boxes, fits = sample_boxes(seeds, CROP, sizes, scale, ratio)
    boxes[~fits] = _largest_centered(sizes[~fits], ratio)
    return boxes


def sample_boxes(
    seeds: rng.Seeds,
    stream: int,
    sizes: npt.NDArray[np.int64],
    scale: tuple[float, float],
    ratio: tuple[float, float],
    *,
    margin: int = 0,
) -> tuple[Boxes, npt.NDArray[np.bool_]]:
    """Boxes of random area, aspect ratio and position, and whether one of ten tries fits with `margin` to spare."""
    height, width = sizes.T
    draws = rng.uniform_np(seeds, stream, 2 * MAX_TRIES + 2).astype(np.float64)  # exact, and 1 is never reached
    areas = (height * width)[:, None] * (scale[0] + (scale[1] - scale[0]) * draws[:, :MAX_TRIES])  # n MAX_TRIES
    low, high = np.log(ratio)
    ratios = np.exp(low + (high - low) * draws[:, MAX_TRIES : 2 * MAX_TRIES])
    widths, heights = np.rint(np.sqrt(areas * ratios)), np.rint(np.sqrt(areas / ratios))
    fits = (widths > 0) & (widths <= width[:, None] - margin) & (heights > 0) & (heights <= height[:, None] - margin)
    rows, first = np.arange(len(fits)), fits.argmax(axis=1)
    h, w = heights[rows, first].astype(np.int64), widths[rows, first].astype(np.int64)
    top = (draws[:, -2] * (height - h + 1)).astype(np.int64)
    left = (draws[:, -1] * (width - w + 1)).astype(np.int64)
    return np.stack([top, left, h, w], axis=1), fits[rows, first]


def _largest_centered(sizes: npt.NDArray[np.int64], ratio: tuple[float, float]) -> Boxes:
    """The largest centered box with a width over height in `ratio`."""
    height, width = sizes.T
    h = np.where(width < ratio[0] * height, np.maximum(np.rint(width / ratio[0]), 1), height).astype(np.int64)
    w = np.where(width > ratio[1] * height, np.maximum(np.rint(height * ratio[1]), 1), width).astype(np.int64)
    return np.stack([(height - h) // 2, (width - w) // 2, h, w], axis=1)


def sample_shifts(seeds: rng.Seeds, pad: int) -> npt.NDArray[np.int64]:
    """n 2: pixels down and right, uniform in -pad to pad."""
    return (rng.uniform_np(seeds, SHIFT, 2).astype(np.float64) * (2 * pad + 1)).astype(np.int64) - pad


def sample_flips(seeds: rng.Seeds, prob: float) -> npt.NDArray[np.bool_]:
    """n: whether to flip an image, with probability `prob`."""
    return rng.uniform_np(seeds, FLIP, 1)[:, 0] < prob


def flip(images: Tensor) -> Tensor:
    """Horizontal flip."""
    return images.flip(-1)


def shift(images: Tensor, by: Tensor) -> Tensor:
    """Move each image by (down, right) pixels, b 2 int64, with reflection padding."""
    for axis in (3, 2):
        side = images.shape[axis]
        at = (torch.arange(side, device=images.device) - by[:, axis - 2, None]).abs()  # b side
        images = _gather(images, (side - 1) - ((side - 1) - at).abs(), axis)
    return images


def resized_crop(images: Tensor, boxes: Tensor, size: tuple[int, int], interpolation: Interpolation) -> Tensor:
    """Resize a box (b 4, int64: top, left, height, width) of each image to one size: float32, b C h w.

    Antialiased, as Pillow and torch.nn.functional.interpolate(antialias=True) do it; pixels outside
    the box count for nothing. Values are not clipped: bicubic may overshoot.
    """
    for axis in (3, 2):
        first, length = boxes[:, axis - 2], boxes[:, axis]
        index, weight = _taps(first, length, images.shape[axis], size[axis - 2], interpolation)
        images = _weighted_sum(images, index, weight, axis)
    return images


def _taps(first: Tensor, length: Tensor, side: int, out: int, interpolation: Interpolation) -> tuple[Tensor, Tensor]:
    """For each of `out` outputs the indices of its inputs and their weights: b out T, int64 and float32."""
    radius = FILTER_RADIUS[interpolation]
    num_taps = math.ceil(2 * radius * max(side / out, 1))
    scale = length.to(torch.float32)[:, None, None] / out  # b 1 1
    width_scale = scale.clamp(min=1)
    center = (torch.arange(out, device=first.device) + 0.5)[:, None] * scale  # b out 1
    index = (center - radius * width_scale + 0.5).floor() + torch.arange(num_taps, device=first.device)  # b out T
    weight = _kernel(((index + 0.5 - center) / width_scale).abs(), interpolation)
    inside = (index >= 0) & (index < length[:, None, None])
    weight = torch.where(inside, weight, 0)
    total = weight[..., 0]
    for t in range(1, num_taps):  # always in this order, so that the bits do not depend on the batch
        total = total + weight[..., t]
    last = length[:, None, None] - 1
    index = torch.minimum(index.to(torch.int64).clamp(min=0), last) + first[:, None, None]
    return index, weight / total[..., None]


def _kernel(x: Tensor, interpolation: Interpolation) -> Tensor:
    """The filter at distance x >= 0; bicubic is Keys' with a = -0.5."""
    if interpolation == "bilinear":
        return (1 - x).clamp(min=0)
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0))


def _weighted_sum(images: Tensor, index: Tensor, weight: Tensor, axis: int) -> Tensor:
    """Along one axis: out[i] = sum over t of weight[i, t] * images[index[i, t]]."""
    if axis == 3:
        return _weighted_sum(images.transpose(2, 3).contiguous(), index, weight, 2).transpose(2, 3).contiguous()
    out: Tensor | None = None
    for t in range(index.shape[-1]):
        term = _gather(images, index[..., t], 2).to(torch.float32).mul_(weight[:, None, :, t, None])
        out = term if out is None else out.add_(term)
    assert out is not None
    return out


def _gather(images: Tensor, index: Tensor, axis: int) -> Tensor:
    """Rows (axis 2) or columns (axis 3) of each image by index, b n."""
    if axis == 3:
        return _gather(images.transpose(2, 3), index, 2).transpose(2, 3)
    b, channels, side, width = images.shape
    start = torch.arange(b * channels, device=images.device).view(b, channels, 1) * side
    rows = (start + index[:, None]).flatten()
    return images.reshape(-1, width).index_select(0, rows).view(b, channels, -1, width)
