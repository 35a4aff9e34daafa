"""Explanations of Swin Transformers: attention inside windows, drawn on the grid of patches of the first stage.

Stages have maps of different sizes. A weight of a token of a later map is shared equally among the tokens of the first
map that were merged into it. Where the side of a map is odd, merging pads it: the share of padding is dropped, and the
map is normalized to the same sum, so that equal weights give an even map. Attention to padding is dropped likewise.

Rollout, as for a ViT, multiplies a factor for each block and merge, from the last to the first:

    block   (A + I) / 2, where A is the mean over heads, zero for tokens in different windows
    merge   a quarter of each of the four tokens that are merged; nothing for padding

and takes the mean of the rows of the last map, whose tokens are averaged for the head, normalized to the sum 1.
Gradient-weighted rollout uses I + A' for the blocks, with A' as in `gradient.py`, and is not normalized. Only this row
is computed, from the last block down: no matrix between all tokens of a map is needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.config.swin import Grid
from vitrail.errors import ModelError
from vitrail.explain.attention import Query, full_precision
from vitrail.models import Swin
from vitrail.models.base import eval_mode
from vitrail.models.swin import Stage, half
from vitrail.models.swin_layers import PatchMerging, SwinBlock, by_window

# B images, H heads, T = h w tokens of a map, nW windows of N tokens


@dataclass(frozen=True)
class WindowedAttention:
    """The attention of one block of a Swin Transformer."""

    weights: Tensor
    """B nW H N N; each row sums to 1."""
    source: Tensor
    """nW N: the token of the map at each place of each window; T for padding."""
    grid: Grid
    """Rows and columns of the map."""
    stage: int

    def without_padding(self) -> WindowedAttention:
        """Attention to padding removed, and rows normalized again."""
        among = self.weights * (self.source < self.grid[0] * self.grid[1])[:, None, None]  # nW 1 1 N
        total = among.sum(-1, keepdim=True).clamp(min=torch.finfo(among.dtype).tiny)
        return WindowedAttention(among / total, self.source, self.grid, self.stage)

    def mean_of_heads(self) -> WindowedAttention:
        return WindowedAttention(self.weights.mean(2, keepdim=True), self.source, self.grid, self.stage)

    def rows(self, queries: Tensor) -> Tensor:
        """B T, the weights of query tokens -> B H T: their attention to each token of the map."""
        chosen = F.pad(queries.to(self.weights), (0, 1))[:, self.source]  # B nW N; padding is no query
        attended = torch.einsum("bwi,bwhij->bhwj", chosen, self.weights).flatten(2)
        tokens = self.grid[0] * self.grid[1]
        whole = attended.new_zeros(*attended.shape[:2], tokens + 1)
        return whole.index_add_(2, self.source.flatten(), attended)[..., :tokens]


def unmerge(row: Tensor, grid: Grid) -> Tensor:
    """... h' w' -> ... h w: share the weight of each merged token among the tokens that it was merged from.

    Padding beyond the odd side of a map gets its share too, which is lost.
    """
    shares = row / 4
    for axis, side in ((-2, grid[0]), (-1, grid[1])):
        shares = shares.repeat_interleave(2, axis).narrow(axis, 0, side)
    return shares


def with_sum(values: Tensor, total: Tensor | float) -> Tensor:
    """... h w, scaled so that each map has this sum, ... or a number."""
    found = values.sum((-1, -2), keepdim=True)
    return values * (
        torch.as_tensor(total).to(values)[..., None, None] / found.clamp(min=torch.finfo(values.dtype).tiny)
    )


def on_patches(row: Tensor, grids: tuple[Grid, ...]) -> Tensor:
    """... T of the last of these maps -> ... h w of the first one, with the same sum."""
    shares = row.unflatten(-1, grids[-1])
    for grid in reversed(grids[:-1]):
        shares = unmerge(shares, grid)
    return with_sum(shares, row.sum(-1))


@dataclass(frozen=True)
class Record:
    """A block or merge of a forward pass, and its input."""

    module: SwinBlock | PatchMerging
    input: Tensor
    grid: Grid
    stage: int


class SwinExplainer:
    """A forward pass that yields the attention of each block, and the maps of each method afterwards."""

    logits: Tensor
    """B classes; B D where the network has no head. Set after the last block, like `last_tokens`."""
    last_tokens: Tensor

    def __init__(self, net: Swin, images: Tensor, methods: Collection[str] = ()) -> None:
        self.net, self.images, self.methods = net, images, methods
        self.grids = net.config.stage_grids(net.config.grid_of((images.shape[2], images.shape[3])))
        self.records: list[Record] = []
        self.layers: list[WindowedAttention] = []
        """The mean over heads of each block, for rollout; only the last one for the method "attention"."""

    def __iter__(self) -> Iterator[WindowedAttention]:
        net = self.net
        with eval_mode(net), torch.no_grad():
            x, grid = net.embed(self.images)
        for number, stage in enumerate(net.stages):
            assert isinstance(stage, Stage)
            if stage.merge is not None:
                self._record(stage.merge, x, grid, number)
                with eval_mode(net), torch.no_grad():
                    x, grid = stage.merge(x, grid), (half(grid[0]), half(grid[1]))
            for block in stage.blocks:
                assert isinstance(block, SwinBlock)
                self._record(block, x, grid, number)
                with eval_mode(net), torch.no_grad():
                    output, weights = run_block(block, x, grid)
                    x, attention = output, windowed(block, weights, x, grid, number)
                if "rollout" in self.methods:
                    self.layers.append(attention.without_padding().mean_of_heads())
                elif "attention" in self.methods:
                    self.layers = [attention.without_padding().mean_of_heads()]
                yield attention
        with eval_mode(net), torch.no_grad():
            self.last_tokens, self.logits = x, net.head(net.norm(x).mean(1))

    def run(self) -> SwinExplainer:
        """Run the whole forward pass and return self."""
        for _ in self:
            pass
        return self

    def _record(self, module: SwinBlock | PatchMerging, x: Tensor, grid: Grid, stage: int) -> None:
        if "gradient" in self.methods:
            self.records.append(Record(module, x, grid, stage))

    def map(self, method: str, targets: Tensor) -> Tensor:
        """B h w, on the grid of patches: the map of "rollout", "attention" or "gradient"."""
        if method == "rollout":
            return self.rollout()
        if method == "gradient":
            return self.relevance(targets)
        return on_patches(self.layers[-1].rows(self.query_weights("pooled", -1))[:, 0], self.grids)

    def query_weights(self, query: Query, stage: int) -> Tensor:
        """B T: which tokens of a stage's map are asked: all of them for "pooled", or the one that covers a patch."""
        grid, stage = self.grids[stage], range(len(self.grids))[stage]
        weights = torch.zeros(len(self.images), *grid, device=self.images.device)
        if query == "pooled":
            return (weights + 1 / (grid[0] * grid[1])).flatten(1)
        rows, columns = self.grids[0]
        if isinstance(query, str):
            raise ModelError(
                f"unknown query {query!r}: a Swin Transformer has no class token; expected pooled, or a patch as "
                "ROW,COLUMN counted from 1, such as 7,3."
            )
        if not (1 <= query[0] <= rows and 1 <= query[1] <= columns):
            raise ModelError(
                f"there is no patch in row {query[0]}, column {query[1]}: the grid has rows 1 to {rows} and columns 1 "
                f"to {columns}."
            )
        weights[:, query[0] - 1 >> stage, query[1] - 1 >> stage] = 1
        return weights.flatten(1)

    def rollout(self, query: Query = "pooled") -> Tensor:
        """B h w: attention rollout to the pooled tokens, or to the token of the last map that covers a patch."""
        row = self.query_weights(query, -1)
        for below, layer in reversed([*zip([None, *self.layers], self.layers, strict=False)]):
            row = (row.to(layer.weights) + layer.rows(row)[:, 0]) / 2
            if below is not None and below.stage != layer.stage:
                row = unmerge(row.unflatten(1, layer.grid), below.grid).flatten(1)
        return with_sum(row.unflatten(1, self.grids[0]), 1.0)

    def relevance(self, targets: Tensor) -> Tensor:
        """B class indices -> B h w: gradient-weighted rollout. Each block is computed again for its backward pass."""
        net = self.net
        with eval_mode(net), torch.enable_grad():
            x = self.last_tokens.detach().requires_grad_()
            score = net.head(net.norm(x).mean(1)).gather(1, targets[:, None].to(x.device)).sum()
            (grad,) = torch.autograd.grad(score, x)
            row = self.query_weights("pooled", -1)
            while self.records:
                record = self.records.pop()
                below = record.input.detach().requires_grad_()
                if isinstance(record.module, PatchMerging):
                    output = record.module(below, record.grid)
                    (grad,) = torch.autograd.grad((output * grad).sum(), below)
                    row = unmerge(row.unflatten(1, self.grids[record.stage]), record.grid).flatten(1)
                    continue
                output, weights = run_block(record.module, below, record.grid)
                grad, by_weight = torch.autograd.grad((output * grad).sum(), (below, weights))
                relevant = (weights.detach().float() * by_weight.float()).clamp(min=0)
                layer = windowed(record.module, relevant, below, record.grid, record.stage).mean_of_heads()
                row = row + layer.rows(row)[:, 0]
        return row.unflatten(1, self.grids[0]).float()


def run_block(block: SwinBlock, x: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """The output of a block, B T D, and its attention weights, as `by_window` takes them."""
    weights: list[Tensor] = []
    output: Tensor = block(x, grid, weights)
    return output, weights[0]


def windowed(block: SwinBlock, weights: Tensor, x: Tensor, grid: Grid, stage: int) -> WindowedAttention:
    """The attention of a block with input x from its weights."""
    plan = block.attention.plan(grid, x)
    weights = by_window(full_precision(weights), len(x), block.attention.num_heads)
    return WindowedAttention(weights, plan.source.view(plan.num_windows, -1), grid, stage)


class SwinQueryAttention:
    """Collects the attention of a query, block by block, on the grid of patches."""

    def __init__(self, net: Swin, images: Tensor, query: Query = "pooled") -> None:
        self.explainer, self.query = SwinExplainer(net, images), query
        self.explainer.query_weights(query, 0)  # reports a wrong query before any work is done
        self.layers: list[Tensor] = []

    def add(self, attention: WindowedAttention) -> None:
        """Add the attention of the next block."""
        queries = self.explainer.query_weights(self.query, attention.stage)
        rows = attention.without_padding().rows(queries)  # B H T
        self.layers.append(on_patches(rows, self.explainer.grids[: attention.stage + 1]))

    def maps(self, _: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """L B H h w, NaN for heads that a stage does not have, and L B H 0: there are no prefix tokens."""
        heads = max(layer.shape[1] for layer in self.layers)
        whole = torch.stack(
            [F.pad(layer, (0, 0, 0, 0, 0, heads - layer.shape[1]), value=torch.nan) for layer in self.layers]
        )
        return whole, whole.new_zeros(*whole.shape[:3], 0)
