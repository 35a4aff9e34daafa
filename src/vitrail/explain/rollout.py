"""Attention rollout (Abnar and Zuidema, 2020): product of the residual-corrected attention of all layers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from vitrail.errors import ModelError
from vitrail.explain.attention import AttentionIterator, Query, pooling_weights, token_index
from vitrail.explain.swin_attention import SwinExplainer
from vitrail.models import Net, Swin

# B images, H heads, T tokens (prefix tokens first), N patches in h rows and w columns


def rollout(layers: Iterable[Tensor]) -> Tensor:
    """Attention of each layer, B H T T, in order -> B T T; every row sums to 1."""
    product = None
    for layer in layers:
        product = add_layer(product, layer)
        del layer  # so that it can be freed before the next one is computed
    if product is None:
        raise ModelError("got no attention; expected that of at least one layer.")
    return product


def add_layer(product: Tensor | None, attention: Tensor) -> Tensor:
    """Rollout of the layers so far, B T T or None, and the next layer's attention, B H T T -> the rollout with it.

    The layer's factor is the mean over heads plus the identity, for the residual connection, halved.
    """
    factor = (attention.mean(1) + torch.eye(attention.shape[-1]).to(attention)) / 2
    return factor if product is None else factor @ product


@torch.no_grad()
def rollout_map(net: Net, images: Tensor, query: Query = "pooled") -> Tensor:
    """B C H W -> B h w: contribution of each patch to the pooled representation, or to one token.

    The class token's row of the rollout (the mean of both tokens' rows for a distilled network), the mean of the
    patches' rows for mean pooling, or their rows weighted by the attention pool. A map sums to 1 minus the
    contribution of the prefix tokens. For a Swin Transformer, see `swin_attention.py`.
    """
    if isinstance(net, Swin):
        return SwinExplainer(net, images, ("rollout",)).run().rollout(query)
    iterator = AttentionIterator(net, images)
    return query_row(iterator, rollout(iterator), query)


def query_row(iterator: AttentionIterator, product: Tensor, query: Query = "pooled") -> Tensor:
    """The rollout of a finished forward pass, B T T -> B h w: the row of the pooled tokens, or of one token."""
    num_prefix = iterator.net.config.num_prefix_tokens
    if query == "pooled":
        weights = pooling_weights(iterator.net, product, product.shape[-1] - num_prefix, iterator.pool_attention)
        row = torch.einsum("bt,btu->bu", weights, product)
    else:
        row = product[:, token_index(iterator.net, query, iterator.grid)]
    return row[:, num_prefix:].unflatten(1, iterator.grid)
