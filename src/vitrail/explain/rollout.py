"""Attention rollout (Abnar and Zuidema, 2020): product of the residual-corrected attention of all layers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from vitrail.errors import ModelError
from vitrail.explain.attention import AttentionIterator, Query, readout_weights, token_index
from vitrail.models import Net

# B images, H heads, T tokens (special ones first), N patches in h rows and w columns


def rollout(layers: Iterable[Tensor]) -> Tensor:
    """Attention of each layer, B H T T, in order -> B T T; every row sums to 1."""
    joint = None
    for step in map(with_residual, layers):  # map keeps no reference to a layer while the next one is computed
        joint = step if joint is None else step @ joint
    if joint is None:
        raise ModelError("got the attention of no layer, expected that of one or more.")
    return joint


def with_residual(attention: Tensor) -> Tensor:
    """B H T T -> B T T: mean over heads, plus identity for the residual connection, halved."""
    return (attention.mean(1) + torch.eye(attention.shape[-1]).to(attention)) / 2


@torch.no_grad()
def rollout_map(net: Net, images: Tensor, query: Query = "read") -> Tensor:
    """B C H W -> B h w: contribution of each patch to the pooled representation, or to one token.

    The class token's row of the rollout (the mean of both tokens' rows for a distilled network), the mean of the
    patches' rows for mean pooling, or their rows weighted by the attention pool. A map sums to 1 minus the
    contribution of the special tokens.
    """
    walk = AttentionIterator(net, images)
    return map_of_rollout(walk, rollout(walk), query)


def map_of_rollout(walk: AttentionIterator, joint: Tensor, query: Query = "read") -> Tensor:
    """The rollout of a finished forward pass, B T T -> B h w: the row of the pooled tokens, or of one token."""
    special = walk.net.config.num_prefix_tokens
    if query == "read":
        weights = readout_weights(walk.net, joint, joint.shape[-1] - special, walk.pool_attention)
        row = torch.einsum("bt,btu->bu", weights, joint)
    else:
        row = joint[:, token_index(walk.net, query, walk.grid)]
    return row[:, special:].unflatten(1, walk.grid)
