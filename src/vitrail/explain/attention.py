"""Attention of any layer, head and token, one layer at a time.

Only the layers that are looked at have their attention written out; the others, and everything else
that runs the network, stay with the fused kernels.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vitrail.config import ViTConfig
from vitrail.errors import ModelError
from vitrail.models import BiT, Net, ViT
from vitrail.models.base import eval_mode

# B images, H heads, T tokens (P special ones first), N patches in h rows and w columns, L layers looked at

Query = str | tuple[int, int]
"""Who asks: "read" (what the head reads), "class", "distill", "register 2", or a patch's row and column, from 1."""


class Walk:
    """A forward pass that can be watched: `for attention in Walk(net, images)`, B H T T each, in order.

    A layer's attention is gone when the next one is computed, unless the caller keeps it (the variable
    of a `for` loop does: `map` and `del` do not), so that memory does not grow with the network's depth.
    Afterwards the other fields are filled in.
    """

    logits: Tensor
    """B classes; B D where the network has no head."""
    tokens: Tensor
    """B T D: what leaves the last block, after the final norm where that comes before pooling."""
    pool_attention: Tensor | None = None
    """B H N: where the attention pool looks, if there is one."""

    def __init__(self, net: Net, images: Tensor, layers: Collection[int] | None = None) -> None:
        """`layers` counts from 0; None: all of them."""
        self.net, self.images = attentive(net), images
        self.layers = range(len(self.net.blocks)) if layers is None else layers
        self.grid = self.net.config.grid_of((images.shape[2], images.shape[3]))

    def __iter__(self) -> Iterator[Tensor]:
        net = self.net
        with eval_mode(net), torch.no_grad():
            x, grid = net.embed(self.images)
        place: Any = None
        for i, block in enumerate(net.blocks):
            kept: list[Tensor] = []
            with eval_mode(net), torch.no_grad():  # not while the caller has the word
                x, place = net.apply_position(i, x, grid, place)
                x = block(x, place, kept if i in self.layers else None)
            if kept:
                yield single(kept.pop())
        with eval_mode(net), torch.no_grad():
            look: list[Tensor] = []
            self.tokens = net.norm_before_pool(x)
            self.logits = net.classify(*net.pool_tokens(self.tokens, look if net.pool is not None else None))
            self.pool_attention = single(look[0])[:, :, 0] if look else None

    def run(self) -> Walk:
        """To the end, for those who want only that."""
        for _ in self:
            pass
        return self


def single(attention: Tensor) -> Tensor:
    """In single precision at least; rows that were rounded to half precision sum to 1 again."""
    if attention.dtype not in (torch.float16, torch.bfloat16):
        return attention
    return attention.float() / attention.float().sum(-1, keepdim=True)


def attentive(net: Net) -> ViT:
    """The network, if it has attention to look at."""
    if isinstance(net, BiT):
        raise ModelError(
            "a BiT has convolutions and no attention to look at; try a ViT, or occlusion, which any can have."
        )
    return net


def layer_number(net: ViT, layer: int) -> int:
    """From 1 as people count, or from -1 backwards -> from 0."""
    depth = len(net.blocks)
    if not 1 <= abs(layer) <= depth:
        raise ModelError(
            f"there is no layer {layer}: this network has layers 1 to {depth} (or -1, the last, to -{depth})."
        )
    return layer - 1 if layer > 0 else depth + layer


def head_number(net: ViT, head: int) -> int:
    """From 1 as people count -> from 0."""
    heads = net.config.num_heads
    if not 1 <= head <= heads:
        raise ModelError(f"there is no head {head}: each layer of this network has heads 1 to {heads}.")
    return head - 1


def special_names(config: ViTConfig) -> tuple[str, ...]:
    """The tokens that are no patches, in order."""
    names = ["class"] if config.class_token else []
    names += ["distill"] if config.distilled else []
    return (*names, *(f"register {i + 1}" for i in range(config.num_registers)))


def token_number(net: ViT, query: Query, grid: tuple[int, int]) -> int:
    """The place among all tokens of the one that asks."""
    names = special_names(net.config)
    if isinstance(query, str):
        if query not in names:
            have = f"it has {', '.join(names)} and patches" if names else "it has patches only"
            raise ModelError(
                f"this network has no token {query!r}: {have}; a patch is its row and column, from 1 (7,3), and 'read' "
                "is what the head reads."
            )
        return names.index(query)
    row, column = query
    if not (1 <= row <= grid[0] and 1 <= column <= grid[1]):
        raise ModelError(
            f"there is no patch in row {row}, column {column}: the grid has rows 1 to {grid[0]} and columns 1 to "
            f"{grid[1]}."
        )
    return len(names) + (row - 1) * grid[1] + column - 1


def parse_query(text: str) -> Query:
    """As it is written on a command line: class, "register 2", or 7,3 for a patch."""
    if match := re.fullmatch(r"\s*(\d+)\s*[,x ]\s*(\d+)\s*", text):
        return int(match[1]), int(match[2])
    return text.strip().lower().replace("-", " ")


def reading(net: ViT, like: Tensor, patches: int, pool_attention: Tensor | None = None) -> Tensor:
    """B T: how the head mixes the tokens; each row sums to 1.

    The class token alone (half of it the distillation token's, which has half of the answer), the
    mean of the patches, both halves of token+gap, or as the attention pool weighs its tokens.
    """
    config = net.config
    weights = like.new_zeros(like.shape[0], config.num_prefix_tokens + patches)
    token = weights.clone()
    if config.class_token:
        token[:, : 1 + config.distilled] = 1 / (1 + config.distilled)
    match config.pool:
        case "token":
            return token
        case "gap":
            weights[:, config.num_prefix_tokens :] = 1 / patches
        case "token+gap":
            weights[:, config.num_prefix_tokens :] = 0.5 / patches
            weights += token / 2
        case "map" | "coca":
            assert pool_attention is not None
            weights[:, -pool_attention.shape[-1] :] = pool_attention.mean(1)  # over the patches, or all tokens
    return weights


def asking(net: Net, images: Tensor, query: Query = "read") -> Tensor:
    """B T: whose view is taken: one token's, or that of what the head reads."""
    net = attentive(net)
    grid = net.config.grid_of((images.shape[2], images.shape[3]))
    like, patches = images.new_empty(len(images), 0, dtype=torch.float32), grid[0] * grid[1]
    if query == "read":
        pool = Walk(net, images, layers=()).run().pool_attention if net.pool is not None else None
        return reading(net, like, patches, pool)
    weights = like.new_zeros(len(images), net.config.num_prefix_tokens + patches)
    weights[:, token_number(net, query, grid)] = 1
    return weights


def _asked(weights: Tensor, attention: Tensor) -> Tensor:
    """B T and B H T T -> B H T: the rows of those who ask."""
    return torch.einsum("bt,bhtu->bhu", weights.to(attention), attention)


def attention_views(
    net: Net, images: Tensor, query: Query = "read", layers: Collection[int] | None = None
) -> tuple[Tensor, Tensor]:
    """L B H h w, what the query attends to in each layer; and L B H P, what of it goes to the special tokens.

    Together they sum to 1. `layers` counts from 0; None: all of them.
    """
    weights = asking(net, images, query)
    walk = Walk(net, images, layers)
    rows = torch.stack([*map(partial(_asked, weights), walk)])  # L B H T
    special = walk.net.config.num_prefix_tokens
    return rows[..., special:].unflatten(-1, walk.grid), rows[..., :special]
