"""Attention rollout: how much of each patch reaches each token through all layers (the paper's Fig. 6)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from vitrail.errors import ModelError
from vitrail.evaluate.accuracy import evaluating
from vitrail.models import BiT, Net, Output, ViT

# B images, H heads, T tokens (special ones first), N patches in h rows and w columns


def rollout(layers: Iterable[Tensor]) -> Tensor:
    """Attention of each layer, B H T T, in order -> B T T; every row sums to 1."""
    joint = None
    for attention in layers:
        step = (attention.mean(1) + torch.eye(attention.shape[-1]).to(attention)) / 2
        joint = step if joint is None else step @ joint
    if joint is None:
        raise ModelError("got the attention of no layer, wanted that of one or more.")
    return joint


@torch.no_grad()
def class_view(net: Net, images: Tensor) -> Tensor:
    """B C H W -> B h w: how much of each patch is in what the head reads.

    That is the class token's row of the rollout (the mean of both tokens' for a distilled network,
    which answers with the mean of two heads); the mean of the patches' rows where those are
    pooled; their rows weighed by the attention pool where there is one. A map sums to 1 less what
    the special tokens keep to themselves.
    """
    if isinstance(net, BiT):
        raise ModelError("a BiT has convolutions and no attention, so there is nothing to roll out; try a ViT.")
    pool, special = net.config.pool, net.config.prefix
    with evaluating(net):
        out = net.features(images, want=("attention", "pool_attention") if pool == "map" else ("attention",))
    assert out.attention is not None
    joint = rollout(out.attention)  # B T T
    return _read(net, out, joint)[:, special:].unflatten(1, net.config.grid_of((images.shape[2], images.shape[3])))


def _read(net: ViT, out: Output, joint: Tensor) -> Tensor:
    """B T: the rows of the rollout as the head mixes them."""
    token = joint[:, : 1 + net.config.distilled].mean(1)
    patches = joint[:, net.config.prefix :]
    match net.config.pool:
        case "token":
            return token
        case "gap":
            return patches.mean(1)
        case "token+gap":
            return (token + patches.mean(1)) / 2
        case "map":
            assert out.pool_attention is not None
            return torch.einsum("bn,bnt->bt", out.pool_attention.mean(1), patches)
