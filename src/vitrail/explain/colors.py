"""Patches in the colors of their features: three principal components as red, green and blue (DINOv2's image)."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.errors import ModelError
from vitrail.explain.attention import layer_number
from vitrail.models import BiT, Net
from vitrail.models.base import eval_mode

# B images, h rows and w columns of patches, D width

EDGES = (0.01, 0.99)
"""Quantiles of a component that become none and all of its color."""


@torch.no_grad()
def patch_features(net: Net, images: Tensor, layer: int | None = None) -> Tensor:
    """B C H W -> B h w D: what leaves a layer (counted from 1, or from -1 backwards), or the last one normalized.

    A BiT gives its last stage's map.
    """
    with eval_mode(net):
        if isinstance(net, BiT):
            if layer is not None:
                raise ModelError("a BiT has stages, not layers; its last map is what can be colored.")
            maps = net.features(images, outputs=("feature_maps",)).feature_maps
            assert maps is not None
            return maps[-1].permute(0, 2, 3, 1)
        if layer is None:
            patches = net.features(images, outputs=("patches",)).patches
            assert patches is not None
            return patches
        number = layer_number(net, layer)
        tokens = net.features(images, outputs=("tokens",)).tokens
        assert tokens is not None
        grid = net.config.grid_of((images.shape[2], images.shape[3]))
        return tokens[number + 1][:, net.config.num_prefix_tokens :].unflatten(1, grid)


def principal_components(features: Tensor, count: int = 3) -> Tensor:
    """... D -> ... count, float64: along the directions in which all of them together differ most.

    The sign, which mathematics leaves open, is such that the largest entry of a direction is positive.
    """
    flat = features.flatten(0, -2).double()
    if min(flat.shape) < count:
        raise ModelError(f"{count} components need as many patches and numbers to a patch; got {tuple(flat.shape)}.")
    centered = flat - flat.mean(0)
    directions = torch.linalg.svd(centered, full_matrices=False)[2][:count]  # count D
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    return (centered @ (directions * largest.sign()).T).unflatten(0, features.shape[:-1])


def feature_colors(features: Tensor, foreground: bool = False) -> Tensor:
    """B h w D -> B h w 3, from 0 to 1: like colors are like patches, in all images together.

    foreground: the first component divides patches in two groups; the one that is rarer along the
    images' edges is colored by components of its own, the other is white.
    """
    whole = principal_components(features)
    if not foreground:
        return _levels(whole.flatten(0, -2)).view_as(whole).float()
    front = whole[..., 0] > 0
    edge = torch.cat(
        [front[:, 0].flatten(), front[:, -1].flatten(), front[:, :, 0].flatten(), front[:, :, -1].flatten()]
    )
    if edge.double().mean() > front.double().mean():
        front = ~front
    if int(front.sum()) < 4:
        raise ModelError("no foreground can be told from the background by the first component.")
    colors = torch.ones_like(whole)
    colors[front] = _levels(principal_components(features[front]))
    return colors.float()


def _levels(values: Tensor) -> Tensor:
    """M 3 -> the same from 0 to 1, between quantiles, so that one odd patch does not take all the color."""
    low, high = (torch.quantile(values, q, dim=0) for q in EDGES)
    return ((values - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
