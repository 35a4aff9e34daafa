"""Attention of any layer, head and query token, one layer at a time.

Attention weights are materialized only for the requested layers; the other layers use fused kernels.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import ModelError
from vitrail.models import BiT, Net, Swin, ViT
from vitrail.models.base import eval_mode

# B images, H heads, T tokens (P prefix tokens first), N patches in h rows and w columns, L requested layers

Query = str | tuple[int, int]
"""A query token: "class", "distill", "register 2", a patch (row, column) from 1, or "pooled": the pooled tokens."""
MAX_KEPT_BYTES = 256 * 2**20
"""Attention of all layers that is kept in memory at once; above it, blocks are computed again instead."""


@dataclass
class BlockRecord:
    """One block of a forward pass, kept for a backward pass through this block alone."""

    input: Tensor
    """B T D, before positions are added in this block; a leaf that requires gradients."""
    output: Tensor | None
    """B T D, with its graph; None if the block has to be computed again for the backward pass."""
    attention: Tensor | None
    """B H T T, in the graph of `output`."""


class AttentionIterator:
    """A forward pass that yields the attention of each layer in order, B H T T.

    Each tensor can be freed before the next one is computed, so memory does not grow with depth. The variable of a
    `for` loop keeps a reference: use `map`, or `del` at the end of the body. The other fields are set after the last
    layer.
    """

    logits: Tensor
    """B classes; B D where the network has no head."""
    last_tokens: Tensor
    """B T D: output of the last block."""
    tokens: Tensor
    """The same, after the final norm if that comes before pooling."""
    pool_attention: Tensor | None = None
    """B H N: attention weights of the attention pool, if there is one."""

    def __init__(
        self, net: Net, images: Tensor, layers: Collection[int] | None = None, *, record_blocks: bool = False
    ) -> None:
        """`layers` counts from 0; None: all of them. `record_blocks`: fill `block_records`, in order."""
        self.net, self.images = require_attention(net), images
        self.layers = range(len(self.net.blocks)) if layers is None else layers
        self.grid = self.net.config.grid_of((images.shape[2], images.shape[3]))
        self.record_blocks = record_blocks
        self.block_records: list[BlockRecord] = []

    def __iter__(self) -> Iterator[Tensor]:
        net = self.net
        with eval_mode(net), torch.no_grad():
            x, grid = net.embed(self.images)
        keep_graph = self.record_blocks and attention_bytes(net, x) <= MAX_KEPT_BYTES
        state: Any = None
        for i, block in enumerate(net.blocks):
            attention: list[Tensor] = []
            with (
                eval_mode(net),
                torch.set_grad_enabled(keep_graph),
            ):  # not around the yield: the caller's code runs there
                block_input = x.detach().requires_grad_() if self.record_blocks else x
                x, state = net.apply_position(i, block_input, grid, state)
                x = block(x, state, attention if keep_graph or i in self.layers else None)
            if self.record_blocks:
                graph = (x, attention[0]) if keep_graph else (None, None)
                self.block_records.append(BlockRecord(block_input, *graph))
                x = x.detach()
            if i in self.layers:
                yield full_precision(attention.pop().detach())
        with eval_mode(net), torch.no_grad():
            pooled: list[Tensor] = []
            self.last_tokens, self.tokens = x, net.norm_before_pool(x)
            self.logits = net.classify(*net.pool_tokens(self.tokens, pooled if net.pool is not None else None))
            self.pool_attention = full_precision(pooled[0])[:, :, 0] if pooled else None

    def run(self) -> AttentionIterator:
        """Run the whole forward pass and return self."""
        for _ in self:
            pass
        return self


def attention_bytes(net: ViT, tokens: Tensor) -> int:
    """Memory of the attention weights of all layers for tokens B T D."""
    batch, count = tokens.shape[:2]
    return len(net.blocks) * batch * net.config.num_heads * count**2 * tokens.element_size()


def full_precision(attention: Tensor) -> Tensor:
    """Half-precision attention as float32, renormalized so that rows sum to 1."""
    if attention.dtype not in (torch.float16, torch.bfloat16):
        return attention
    return attention.float() / attention.float().sum(-1, keepdim=True)


def require_attention(net: Net) -> ViT:
    """The network, or ModelError if it has no attention."""
    if isinstance(net, BiT):
        raise ModelError("a BiT has no attention; try a ViT, or occlusion, which works with any network.")
    if isinstance(net, Swin):
        raise ModelError(
            "a Swin Transformer has no attention between all tokens, only inside windows; `explain` and rollout_map "
            "show it, and net.features(images, 'attention') returns it."
        )
    return net


def layer_index(net: Net, layer: int) -> int:
    """1-based number of a layer with attention, or negative from the end -> 0-based index."""
    depth = net.config.depth if isinstance(net, Swin) else len(require_attention(net).blocks)
    if not 1 <= abs(layer) <= depth:
        raise ModelError(
            f"there is no layer {layer}: this network has layers 1 to {depth} (or -1, the last, to -{depth})."
        )
    return layer - 1 if layer > 0 else depth + layer


def head_index(net: ViT, head: int) -> int:
    """1-based head number -> 0-based index."""
    heads = net.config.num_heads
    if not 1 <= head <= heads:
        raise ModelError(f"there is no head {head}: each layer of this network has heads 1 to {heads}.")
    return head - 1


def token_index(net: ViT, query: Query, grid: tuple[int, int]) -> int:
    """Index of the query token among all tokens."""
    names = net.config.prefix_token_names
    if isinstance(query, str):
        if query not in names:
            known = ", ".join(["pooled", *names])
            raise ModelError(
                f"unknown query {query!r}; expected {known}, or a patch as ROW,COLUMN counted from 1, such as 7,3."
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
    """Parse a command-line query: `class`, `register 2`, or `7,3` for a patch."""
    if match := re.fullmatch(r"\s*(\d+)\s*[,x ]\s*(\d+)\s*", text):
        return int(match[1]), int(match[2])
    return text.strip().lower().replace("-", " ")


def pooling_weights(net: ViT, like: Tensor, patches: int, pool_attention: Tensor | None = None) -> Tensor:
    """B T: weight of each token in the pooled representation; rows sum to 1.

    The class token (or class and distillation token, half each), the mean of the patches, both halves of token+gap,
    or the weights of the attention pool.
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


def query_weights(net: Net, images: Tensor, query: Query = "pooled") -> Tensor:
    """B T: weights that select the query token, or the pooling weights for "pooled"."""
    net = require_attention(net)
    grid = net.config.grid_of((images.shape[2], images.shape[3]))
    like, patches = images.new_empty(len(images), 0, dtype=torch.float32), grid[0] * grid[1]
    if query == "pooled":
        pool = AttentionIterator(net, images, layers=()).run().pool_attention if net.pool is not None else None
        return pooling_weights(net, like, patches, pool)
    weights = like.new_zeros(len(images), net.config.num_prefix_tokens + patches)
    weights[:, token_index(net, query, grid)] = 1
    return weights


class QueryAttention:
    """Collects the attention rows of a query, layer by layer, from one forward pass.

    The weights of an attention pool are known only at the end of the pass; until then the attention of all layers is
    kept, or, if that takes too much memory, the weights come from a forward pass of their own.
    """

    def __init__(self, net: Net, images: Tensor, query: Query = "pooled") -> None:
        self.net = require_attention(net)
        self.grid = self.net.config.grid_of((images.shape[2], images.shape[3]))
        num_tokens = self.net.config.num_prefix_tokens + self.grid[0] * self.grid[1]
        pooled = query == "pooled" and self.net.pool is not None
        keep = pooled and attention_bytes(self.net, images.new_empty(len(images), num_tokens, 0)) <= MAX_KEPT_BYTES
        self.weights = None if keep else query_weights(net, images, query)
        """B T; None until the pool's attention is known."""
        self.layers: list[Tensor] = []

    def add(self, attention: Tensor) -> None:
        """Add the attention of the next layer, B H T T."""
        self.layers.append(attention if self.weights is None else _query_rows(self.weights, attention))

    def maps(self, pool_attention: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """L B H h w: attention to the patches, and L B H P: to the prefix tokens; both together sum to 1."""
        rows = self.layers
        if self.weights is None:
            like = rows[0].new_empty(len(rows[0]), 0, dtype=torch.float32)
            weights = pooling_weights(self.net, like, self.grid[0] * self.grid[1], pool_attention)
            rows = [_query_rows(weights, attention) for attention in rows]
        stacked, num_prefix = torch.stack(rows), self.net.config.num_prefix_tokens  # L B H T
        return stacked[..., num_prefix:].unflatten(-1, self.grid), stacked[..., :num_prefix]


def _query_rows(weights: Tensor, attention: Tensor) -> Tensor:
    """B T and B H T T -> B H T: the attention rows of the query."""
    return torch.einsum("bt,bhtu->bhu", weights.to(attention), attention)


def attention_maps(
    net: Net, images: Tensor, query: Query = "pooled", layers: Collection[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of the query in each layer: L B H h w to the patches, and L B H P to the prefix tokens.

    Both together sum to 1. `layers` are 0-based indices; None: all layers.
    """
    collected = QueryAttention(net, images, query)
    iterator = AttentionIterator(net, images, layers)
    for attention in iterator:
        collected.add(attention)
        del attention
    return collected.maps(iterator.pool_attention)
