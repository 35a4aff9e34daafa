"""Occlusion: change of a class probability when parts of the image are masked (Zeiler and Fergus, 2014)."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.explain.gradient import check_targets
from vitrail.explain.masking import Fill, class_probabilities, covered_pixels, mask_patches, replacement_pixels
from vitrail.models import BiT, Net

# B images, h rows and w columns of patches, M window positions

GRID = 14
"""Rows and columns of the grid for a network without patches."""


def grid_of(net: Net, images: Tensor) -> tuple[int, int]:
    """Rows and columns of the grid: a ViT's patches, a hybrid's feature map, or GRID x GRID for a BiT."""
    size = (images.shape[2], images.shape[3])
    if isinstance(net, BiT):
        return tuple(min(GRID, n) for n in size)  # type: ignore[return-value]
    return net.config.grid_of(size)


def windows(grid: tuple[int, int], size: int, stride: int) -> Tensor:
    """M h w boolean masks: squares of `size` patches at steps of `stride`; the last ones end at the edge."""
    rows, columns = ([*range(0, n - size, stride), n - size] for n in grid)
    masks = torch.zeros(len(rows) * len(columns), *grid, dtype=torch.bool)
    for mask, (row, column) in zip(masks, ((r, c) for r in rows for c in columns), strict=True):
        mask[row : row + size, column : column + size] = True
    return masks


def occlusion(
    net: Net,
    images: Tensor,
    targets: Tensor,
    *,
    size: int | None = None,
    stride: int = 1,
    fill: Fill = "mean",
    batch_size: int = 32,
    multi_label: bool = False,
) -> Tensor:
    """B C H W and B class indices -> B h w: drop of the class probability when each patch is masked.

    A square of `size` x `size` patches (default 2, or 1 for a single row or column) is masked at steps of `stride`;
    a patch gets the mean drop over the squares that cover it. A negative value means that masking raises the
    probability.
    """
    check_targets(net, targets, len(images))
    grid = grid_of(net, images)
    images = covered_pixels(net, images)
    if size is None:
        size = min(2, *grid)
        stride = min(stride, size)
    if not 1 <= size <= min(grid) or not 1 <= stride <= size:
        raise ConfigError(
            f"size={size}, stride={stride}: expected a square of 1 to {min(grid)} patches, at steps no larger than it."
        )
    masks = windows(grid, size, stride)
    maps = []
    for image, instead, target in zip(images, replacement_pixels(images, fill), targets.tolist(), strict=True):
        places = (mask_patches(image, instead, mask[None].to(image.device))[0] for mask in masks)
        whole, *left = class_probabilities(net, (image, *places), target, batch_size, multi_label=multi_label).double()
        lost = whole - torch.stack(left)  # M
        cover = masks.double()
        maps.append((lost[:, None, None] * cover).sum(0) / cover.sum(0))
    return torch.stack(maps).float()
