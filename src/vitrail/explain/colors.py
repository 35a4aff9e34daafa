"""Patch features as colors: the first three principal components as red, green and blue (as in DINOv2)."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.errors import ModelError
from vitrail.explain.attention import layer_index
from vitrail.models import BiT, Net, Swin
from vitrail.models.base import eval_mode

# B images, h rows and w columns of patches, D width

EDGES = (0.01, 0.99)
"""Quantiles of a component that map to 0 and 1."""


@torch.no_grad()
def patch_features(net: Net, images: Tensor, layer: int | None = None) -> Tensor:
    """B C H W -> B h w D: output of a layer (1-based, or negative from the end); None: the last, normalized.

    For a BiT: the feature map of the last stage.
    """
    with eval_mode(net):
        if isinstance(net, BiT):
            if layer is not None:
                raise ModelError("a BiT has stages instead of layers; only its last feature map can be colored.")
            maps = net.features(images, outputs=("feature_maps",)).feature_maps
            assert maps is not None
            return maps[-1].permute(0, 2, 3, 1)
        if layer is None:
            patches = net.features(images, outputs=("patches",)).patches
            assert patches is not None
            return patches
        if isinstance(net, Swin):
            if not 1 <= abs(layer) <= net.config.depth:
                raise ModelError(f"there is no layer {layer}: this network has layers 1 to {net.config.depth}.")
            found = net.features(images, "patch_maps", layers=[layer - 1 if layer > 0 else layer]).patch_maps
            assert found is not None
            return found[0]
        number = layer_index(net, layer)
        tokens = net.features(images, outputs=("tokens",)).tokens
        assert tokens is not None
        grid = net.config.grid_of((images.shape[2], images.shape[3]))
        return tokens[number + 1][:, net.config.num_prefix_tokens :].unflatten(1, grid)


def principal_components(features: Tensor, count: int = 3) -> Tensor:
    """... D -> ... count, float64: the first principal components over all features.

    Signs are chosen so that the largest entry of each direction is positive.
    """
    flat = features.flatten(0, -2).double()
    if min(flat.shape) < count:
        raise ModelError(
            f"{count} components need at least {count} patches and {count} features, got {tuple(flat.shape)}."
        )
    centered = flat - flat.mean(0)
    directions = torch.linalg.svd(centered, full_matrices=False)[2][:count]  # count D
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    return (centered @ (directions * largest.sign()).T).unflatten(0, features.shape[:-1])


def feature_colors(features: Tensor, foreground: bool = False) -> Tensor:
    """B h w D -> B h w 3, from 0 to 1: similar patches get similar colors, across all images.

    foreground: the first component splits patches in two groups. The group that is rarer at the image borders gets
    components of its own; the other is white.
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
        raise ModelError("the first component does not separate a foreground from the background.")
    colors = torch.ones_like(whole)
    colors[front] = _levels(principal_components(features[front]))
    return colors.float()


def _levels(values: Tensor) -> Tensor:
    """M 3 -> rescaled to 0 ... 1 between quantiles, so that outliers do not dominate."""
    low, high = (torch.quantile(values, q, dim=0) for q in EDGES)
    return ((values - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
