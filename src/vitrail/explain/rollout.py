"""Attention rollout: how much of each patch reaches each token through all layers (the paper's Fig. 6)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from vitrail.errors import ModelError
from vitrail.explain.attention import Query, Walk, reading, token_number
from vitrail.models import Net

# B images, H heads, T tokens (special ones first), N patches in h rows and w columns


def rollout(layers: Iterable[Tensor]) -> Tensor:
    """Attention of each layer, B H T T, in order -> B T T; every row sums to 1."""
    joint = None
    for step in map(_kept_by_half, layers):  # which holds on to no layer while the next one is computed
        joint = step if joint is None else step @ joint
    if joint is None:
        raise ModelError("got the attention of no layer, wanted that of one or more.")
    return joint


def _kept_by_half(attention: Tensor) -> Tensor:
    """B H T T -> B T T: the mean head, and every token half itself."""
    return (attention.mean(1) + torch.eye(attention.shape[-1]).to(attention)) / 2


@torch.no_grad()
def class_view(net: Net, images: Tensor, query: Query = "read") -> Tensor:
    """B C H W -> B h w: how much of each patch is in what the head reads, or in one token.

    That is the class token's row of the rollout (the mean of both tokens' for a distilled network,
    which answers with the mean of two heads); the mean of the patches' rows where those are
    pooled; their rows weighed by the attention pool where there is one. A map sums to 1 less what
    the special tokens keep to themselves.
    """
    walk = Walk(net, images)
    joint = rollout(walk)  # B T T
    special = walk.net.config.num_prefix_tokens
    if query == "read":
        mixed = reading(walk.net, joint, joint.shape[-1] - special, walk.pool_attention)
        row = torch.einsum("bt,btu->bu", mixed, joint)
    else:
        row = joint[:, token_number(walk.net, query, walk.grid)]
    return row[:, special:].unflatten(1, walk.grid)
