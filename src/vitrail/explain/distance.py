"""Mean attention distance of each head, in pixels (the paper's Fig. 7 right and Fig. 11)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from vitrail.errors import DataError
from vitrail.explain.attention import AttentionIterator
from vitrail.explain.masking import covered_pixels
from vitrail.models import Net

# B images, H heads, T tokens (P prefix tokens first), N patches in h rows and w columns, L layers


def patch_distances(grid: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """N N, float64: pixels between the centers of any two patches of an image of this height and width."""
    sides = [n / count for n, count in zip(size, grid, strict=True)]
    axes = [torch.arange(count, dtype=torch.float64) * side for count, side in zip(grid, sides, strict=True)]
    centers = torch.cartesian_prod(*axes)  # N 2
    return torch.cdist(centers, centers, compute_mode="donot_use_mm_for_euclid_dist")


def mean_distances(attention: Tensor, distances: Tensor, num_prefix: int = 0) -> Tensor:
    """B H T T and N N -> B H: attention-weighted distance between query and key patch, averaged over queries.

    Attention to prefix tokens is dropped and the rest renormalized; a query without attention to patches is ignored.
    """
    among = attention[:, :, num_prefix:, num_prefix:]
    total = among.sum(-1)  # B H N
    far = torch.einsum("bhqk,qk->bhq", among, distances.to(among))
    counts = total > 0
    each = torch.where(counts, far / total.clamp(min=torch.finfo(total.dtype).tiny), 0)
    return each.sum(-1) / counts.sum(-1).clamp(min=1)


@torch.no_grad()
def attention_distance(net: Net, images: Tensor | Iterable[Tensor]) -> Tensor:
    """B C H W, or batches of them -> L H in pixels: the mean over all images, layers in order."""
    total, count = None, 0
    for batch in (images,) if isinstance(images, Tensor) else images:
        iterator, batch = AttentionIterator(net, batch), covered_pixels(net, batch)
        distances = patch_distances(iterator.grid, (batch.shape[2], batch.shape[3])).to(batch.device, torch.float32)
        measured = partial(mean_distances, distances=distances, num_prefix=iterator.net.config.num_prefix_tokens)
        found = torch.stack([each.sum(0).cpu().double() for each in map(measured, iterator)])  # L H
        total, count = found if total is None else total + found, count + len(batch)
    if total is None or not count:
        raise DataError("got no images; attention distances need one or more.")
    return total / count


def uniform_distance(grid: tuple[int, int], size: tuple[int, int]) -> float:
    """Attention distance of a head with uniform attention: the mean over all pairs of patches."""
    return float(patch_distances(grid, size).mean())
