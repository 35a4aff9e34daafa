"""Masked images and their class probabilities, for any network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import pair
from vitrail.errors import ConfigError
from vitrail.models import Swin, ViT
from vitrail.models.base import eval_mode
from vitrail.models.swin import cover_with_patches

# b images at a time, h rows and w columns of patches

Fill = Literal["mean", "zero", "blur"]
"""Replacement for masked patches: the image's mean color, zero after normalization, or the blurred image."""
BLUR = 1 / 20
"""Standard deviation of the blur, as a fraction of the shorter side."""


def replacement_pixels(images: Tensor, fill: Fill) -> Tensor:
    """B C H W -> B C H W: the replacement pixels of each image."""
    if fill not in get_args(Fill):
        raise ConfigError(f"fill={fill!r}: expected one of {', '.join(get_args(Fill))}.")
    if fill == "zero":
        return torch.zeros_like(images)
    if fill == "mean":
        return images.mean((2, 3), keepdim=True).expand_as(images)
    return blurred(images, BLUR * min(images.shape[2:]))


def blurred(images: Tensor, sigma: float) -> Tensor:
    """Gaussian blur with replicated borders."""
    radius = max(1, round(3 * sigma))
    x = torch.arange(-radius, radius + 1, device=images.device, dtype=images.dtype)
    kernel = (-(x**2) / (2 * sigma**2)).exp()
    kernel = (kernel / kernel.sum()).expand(images.shape[1], 1, -1)
    channels = images.shape[1]
    out = F.pad(images, (radius, radius, 0, 0), mode="replicate")
    out = F.conv2d(out, kernel[:, :, None, :], groups=channels)
    out = F.pad(out, (0, 0, radius, radius), mode="replicate")
    return F.conv2d(out, kernel[:, :, :, None], groups=channels)


def covered_pixels(net: nn.Module, images: Tensor) -> Tensor:
    """B C H W without the last rows and columns if no patch covers them; padded where the network pads."""
    if isinstance(net, Swin):
        return cover_with_patches(images, pair(net.config.patch_size), net.config.uncovered)
    return net.crop_to_patches(images) if isinstance(net, ViT) and net.stem is None else images


def mask_patches(image: Tensor, replacement: Tensor, masks: Tensor) -> Tensor:
    """Replace masked patches: image C H W, replacement C H W and boolean masks b h w -> b C H W."""
    cover = F.interpolate(masks[:, None].to(image), image.shape[1:], mode="nearest").bool()
    return torch.where(cover, replacement, image)


@torch.no_grad()
def class_probabilities(
    net: nn.Module, images: Iterable[Tensor], target: int, batch_size: int = 32, *, multi_label: bool = False
) -> Tensor:
    """Probability of one class for each image C H W, in order, on the CPU: sigmoid if `multi_label`, else softmax."""
    found = []
    with eval_mode(net):
        for group in _groups(images, batch_size):
            logits = net(torch.stack(group)).float()
            probabilities = logits.sigmoid() if multi_label else logits.softmax(1)
            found.append(probabilities[:, target].cpu())
    return torch.cat(found)


def _groups(images: Iterable[Tensor], size: int) -> Iterator[list[Tensor]]:
    rest = iter(images)
    while group := list(islice(rest, size)):
        yield group
