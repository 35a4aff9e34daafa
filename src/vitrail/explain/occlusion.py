"""Occlusion: change of a class probability when parts of the image are masked (Zeiler and Fergus, 2014)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.explain.gradient import check_targets
from vitrail.explain.masking import Fill, class_probabilities, covered_pixels, mask_patches, replacement_pixels
from vitrail.models import BiT, Net, Swin

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

    A square of `size` x `size` patches (default 2, or 1 for a single row or column; for a Swin Transformer, whose
    patches are small, 8 at 4 times the stride) is masked at steps of `stride`;
    a patch gets the mean drop over the squares that cover it. A negative value means that masking raises the
    probability.
    """
    check_targets(net, targets, len(images))
    maps = []
    for image, target in zip(images, targets.tolist(), strict=True):
        for step in occlusion_steps(
            net, image, target, size=size, stride=stride, fill=fill, batch_size=batch_size, multi_label=multi_label
        ):
            last = step
        maps.append(last.values)
    return torch.stack(maps).float()


@dataclass(frozen=True)
class PartialOcclusion:
    """An occlusion map of which some squares have been masked."""

    values: Tensor
    """h w, float64: mean drop over the squares so far; NaN where none covers the patch."""
    known: Tensor
    """h w: whether all squares that cover the patch are included."""
    done: int
    """Number of squares so far."""
    total: int


def occlusion_steps(
    net: Net,
    image: Tensor,
    target: int,
    *,
    size: int | None = None,
    stride: int = 1,
    fill: Fill = "mean",
    batch_size: int = 32,
    step_s: float | None = None,
    multi_label: bool = False,
    probability: float | None = None,
) -> Iterator[PartialOcclusion]:
    """`occlusion` of one image C H W, in steps of at most `batch_size` squares; the last step has the complete map.

    With `step_s`, the first step is one square and the number is adapted so that a step takes about this long.
    `probability` is that of the class for the unmasked image, if it is known already.
    """
    images = image[None]
    grid = grid_of(net, images)
    images = covered_pixels(net, images)
    if size is None:
        unit = 2 ** min(2, len(net.config.depths) - 1) if isinstance(net, Swin) else 1  # 16 of its pixels
        size = min(2 * unit, *grid)
        stride = min(stride * unit, size)
    if not 1 <= size <= min(grid) or not 1 <= stride <= size:
        raise ConfigError(
            f"size={size}, stride={stride}: expected a size of 1 to {min(grid)} patches and a stride of 1 to the size."
        )
    masks = windows(grid, size, stride)
    replacement = replacement_pixels(images, fill)[0]
    if probability is None:
        probability = float(class_probabilities(net, images, target, multi_label=multi_label))
    drops: list[Tensor] = []
    done, count = 0, batch_size if step_s is None else 1
    while done < len(masks):
        start = time.perf_counter()
        masked = mask_patches(images[0], replacement, masks[done : done + count].to(images.device))
        after = class_probabilities(net, masked, target, count, multi_label=multi_label)
        drops.append(probability - after.double())
        done += len(masked)
        if step_s is not None:
            affordable = int(count * step_s / (time.perf_counter() - start))
            count = min(max(affordable, 1), 2 * count, batch_size)
        values = _mean_over_windows(masks[:done], torch.cat(drops))
        yield PartialOcclusion(values, ~masks[done:].any(0), done, len(masks))


def _mean_over_windows(masks: Tensor, drops: Tensor) -> Tensor:
    """Masks M h w and drops M -> h w: mean over the squares that cover a patch; NaN if none does."""
    cover = masks.double()
    return (drops[:, None, None] * cover).sum(0) / cover.sum(0)
