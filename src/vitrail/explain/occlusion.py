"""Occlusion: what hiding a part of the image does to a class's probability (Zeiler and Fergus, 2014)."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.explain.gradient import check_targets
from vitrail.explain.hiding import Fill, filling, hidden, scores, seen
from vitrail.models import BiT, Net

# B images, h rows and w columns of patches, M places of the window

GRID = 14
"""Rows and columns that a network without patches of its own is given."""


def grid_of(net: Net, images: Tensor) -> tuple[int, int]:
    """Rows and columns of the image's parts: a ViT's patches (a hybrid's feature map), else a fair grid."""
    size = (images.shape[2], images.shape[3])
    if isinstance(net, BiT):
        return tuple(min(GRID, n) for n in size)  # type: ignore[return-value]
    return net.config.grid_of(size)


def windows(grid: tuple[int, int], size: int, stride: int) -> Tensor:
    """M h w, yes or no: a square of `size` patches at every `stride`; the last ones end at the edge."""
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
    """B C H W and B class numbers -> B h w: how much of the class's probability is lost with each patch.

    A square of `size` x `size` patches is hidden at every `stride`; a patch gets the mean loss over
    the squares that cover it. Below 0: the class is likelier without it. Squares have 2 x 2 patches,
    or 1 where there is a single row or column. several: an image may have several of the classes.
    """
    check_targets(net, targets, len(images))
    grid = grid_of(net, images)
    images = seen(net, images)
    if size is None:
        size = min(2, *grid)
        stride = min(stride, size)
    if not 1 <= size <= min(grid) or not 1 <= stride <= size:
        raise ConfigError(
            f"size={size}, stride={stride}: wanted a square of 1 to {min(grid)} patches, at steps no larger than it."
        )
    masks = windows(grid, size, stride)
    maps = []
    for image, instead, target in zip(images, filling(images, fill), targets.tolist(), strict=True):
        places = (hidden(image, instead, mask[None].to(image.device))[0] for mask in masks)
        whole, *left = scores(net, (image, *places), target, batch_size, multi_label=multi_label).double()
        lost = whole - torch.stack(left)  # M
        cover = masks.double()
        maps.append((lost[:, None, None] * cover).sum(0) / cover.sum(0))
    return torch.stack(maps).float()
