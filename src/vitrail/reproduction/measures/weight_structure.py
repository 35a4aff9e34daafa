"""Structure in a ViT's weights: position embeddings against the grid, patch filters against the images' patches."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitrail.config import ViTConfig, pair
from vitrail.errors import ModelError
from vitrail.explain import filter_components, position_similarity
from vitrail.explain.distance import patch_distances
from vitrail.models import Net, ViT

# h rows and w columns of patches, N = h w; n components of p x q pixels and C channels, d = p q C

Floats = npt.NDArray[np.floating[Any]]

LEADING = 0.25
"""Components that are called leading, as a fraction of the d possible ones."""
LEARNED = ("learned-1d", "learned-2d")


def distance_correlation(similarity: Floats) -> float:
    """h w h w -> correlation of the similarity of two positions with their distance; negative if close is similar."""
    grid = (similarity.shape[0], similarity.shape[1])
    distances = patch_distances(grid, grid).numpy()
    different = ~np.eye(len(distances), dtype=bool)
    alike = similarity.reshape(distances.shape)[different]
    return float(np.corrcoef(alike, distances[different])[0, 1]) if alike.std() > 0 else 0.0


def row_column_share(similarity: Floats) -> float:
    """h w h w, cosines -> fraction of the variance of the normalized embeddings that row + column explains.

    It is (h + w - 2) / (h w - 1) for random embeddings and 1 for the sum of a row and a column embedding.
    """
    rows, columns = similarity.shape[:2]
    count = rows * columns
    gram = similarity.reshape(count, count)
    total = np.trace(gram) - gram.sum() / count
    by_row, by_column = similarity.mean((1, 3)), similarity.mean((0, 2))  # h h and w w
    explained = columns * (np.trace(by_row) - by_row.sum() / rows)
    explained += rows * (np.trace(by_column) - by_column.sum() / columns)
    return float(explained / total) if total > 1e-12 else 0.0


def patch_components(images: Tensor, patch_size: tuple[int, int]) -> tuple[Floats, Floats]:
    """Principal components of the patches of images B C H W: d p q C, and the fraction of the variance of each, d."""
    height, width = patch_size
    patches = images.double().cpu().unfold(2, height, height).unfold(3, width, width)  # B C h w p q
    matrix = patches.permute(0, 2, 3, 4, 5, 1).flatten(0, 2).flatten(1)  # B h w, d
    values, vectors = torch.linalg.eigh(matrix.T.cov())
    values, vectors = values.flip(0).clamp(min=0), vectors.flip(1).T
    shares = values / values.sum().clamp(min=1e-30)
    return vectors.unflatten(1, (height, width, images.shape[1])).numpy(), shares.numpy()


def subspace_overlap(first: Floats, second: Floats) -> float:
    """n p q C each, orthonormal -> mean squared cosine between their spans: n / d at random, 1 if equal."""
    a, b = first.reshape(len(first), -1), second.reshape(len(second), -1)
    return float(np.square(a @ b.T).sum() / len(a))


def num_leading(patterns: Floats) -> int:
    return max(1, round(LEADING * int(np.prod(patterns.shape[1:]))))


def overlap_curve(filters: Floats, patches: Floats) -> Floats:
    """n: overlap of the first 1 ... n components of the filters with as many of the patches."""
    return np.array([subspace_overlap(filters[:n], patches[:n]) for n in range(1, len(filters) + 1)])


def position_numbers(net: Net) -> dict[str, float]:
    """Structure of learned position embeddings; empty for other kinds, which training does not change."""
    if not isinstance(net.config, ViTConfig) or net.config.position not in LEARNED:
        return {}
    similarity = position_similarity(net)
    return {
        "position-distance correlation": distance_correlation(similarity),
        "row and column share": row_column_share(similarity),
    }


def filter_numbers(net: Net, patches: Floats) -> dict[str, float]:
    """Structure of the patch filters, d p q C components of the images' patches given.

    `filter overlap`: of the leading components of both; `leading filters`: variance of those of the filters.
    """
    patterns, shares = all_filters(net)
    count = num_leading(patches)
    return {
        "filter overlap": subspace_overlap(patterns[:count], patches[:count]),
        "leading filters": float(shares[:count].sum()),
    }


def all_filters(net: Net) -> tuple[Floats, Floats]:
    """All principal components of the patch filters, n p q C, and their fractions of the variance."""
    if not isinstance(net, ViT):
        raise ModelError("a BiT has no patch filters.")
    return filter_components(net, net.patch.weight[0].numel())


@torch.no_grad()
def change_numbers(net: Net, untrained: Net, patches: Floats) -> dict[str, float]:
    """What training added to the patch filters: `change of filters`, its size as a fraction of the initial filters'.

    `change overlap`: of its leading components with those of the images' patches.
    """
    assert isinstance(net, ViT)
    assert isinstance(untrained, ViT)
    count = num_leading(patches)
    size = (net.patch.weight - untrained.patch.weight).norm() / untrained.patch.weight.norm()
    overlap = subspace_overlap(change_components(net, untrained)[:count], patches[:count])
    return {"change of filters": float(size), "change overlap": overlap}


@torch.no_grad()
def change_components(net: Net, untrained: Net) -> Floats:
    """Principal components of the trained minus the untrained patch filters, n p q C."""
    assert isinstance(net, ViT)
    assert isinstance(untrained, ViT)
    change = (net.patch.weight - untrained.patch.weight).double().cpu()  # D C p q
    patterns = torch.linalg.svd(change.flatten(1), full_matrices=False).Vh
    return patterns.unflatten(1, change.shape[1:]).permute(0, 2, 3, 1).numpy()


def patch_size(net: Net) -> tuple[int, int]:
    assert isinstance(net, ViT)
    return pair(net.config.patch_size)
