"""Cutting a map of tokens into shifted windows, as one reordering of its tokens.

The usual code rolls the map, pads it, cuts it into windows, and undoes each step afterwards, with a copy of the
tokens each time. Here the steps are composed into an index once for each size of map, and tokens are copied twice: into
windows, and back.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from vitrail.config.swin import WindowPlacement, WindowShape

# B images; T = h w tokens of a map, row by row; nW windows of N = wh ww tokens; D width

Grid = tuple[int, int]


class WindowPlan(NamedTuple):
    """How the tokens of a map are arranged in windows."""

    source: Tensor
    """nW N, flat: index of the token at each place of each window; T where there is padding."""
    inverse: Tensor
    """T: the place of each token among the nW N."""
    mask: Tensor | None
    """nW N N: True for two tokens that are neighbors only by the cyclic shift; None without a shift."""
    padded: bool
    num_windows: int
    grid: Grid
    """Rows and columns of the map."""
    shape: WindowShape
    roll_first: bool
    """Shift the map, then pad it (timm); else the reverse."""


@fx.wrap
def window_plan(grid: Grid, placement: WindowPlacement, shifted: bool, like: Tensor) -> WindowPlan:
    """The plan of a map with h rows and w columns, on the device of `like`; `shifted`: for every second block."""
    placement = WindowPlacement(*placement)
    shape = placement.on(grid)
    if not shifted:
        shape = shape._replace(shift=(0, 0))
    roll_first = placement.rule == "timm"
    if torch.compiler.is_compiling():  # tensors of a traced graph must not be cached
        return _make_plan(grid, shape, roll_first, like.device)
    return _cached_plan(grid, shape, roll_first, like.device)


@lru_cache(maxsize=64)
def _cached_plan(grid: Grid, shape: WindowShape, roll_first: bool, device: torch.device) -> WindowPlan:
    with torch.inference_mode(False):  # else a later training step could not use the tensors
        return _make_plan(grid, shape, roll_first, device)


def _make_plan(grid: Grid, shape: WindowShape, roll_first: bool, device: torch.device) -> WindowPlan:
    num_tokens = grid[0] * grid[1]
    rows, columns = (
        _axis(side, size, shift, roll_first, device)
        for side, size, shift in zip(grid, shape.size, shape.shift, strict=True)
    )
    inside = rows.inside[:, None] & columns.inside
    index = torch.where(inside, rows.source[:, None] * grid[1] + columns.source, num_tokens)  # padded map
    index = _cut(index, shape.size).flatten()
    places = torch.arange(len(index), device=device)
    inverse = torch.empty(num_tokens + 1, dtype=torch.int64, device=device).scatter_(0, index, places)[:num_tokens]
    mask = None
    if any(shape.shift):
        regions = _cut(rows.region[:, None] * 3 + columns.region, shape.size)  # nW N
        mask = regions[:, :, None] != regions[:, None]
    return WindowPlan(
        index,
        inverse,
        mask,
        len(index) > num_tokens,
        len(index) // math.prod(shape.size),
        grid,
        shape,
        roll_first,
    )


class _Axis(NamedTuple):
    """One side of the padded map: the row or column each place comes from, whether it exists, and its region."""

    source: Tensor
    inside: Tensor
    region: Tensor


def _axis(side: int, size: int, shift: int, roll_first: bool, device: torch.device) -> _Axis:
    padded = -(-side // size) * size
    places = torch.arange(padded, device=device)
    source = (places + shift) % (side if roll_first else padded)
    inside = (places if roll_first else source) < side
    # The shift puts tokens from the other end of the map into the last window, after the first `size - shift` places.
    region = (places >= padded - size).long() + (places >= padded - shift) if shift else torch.zeros_like(places)
    return _Axis(source, inside, region)


def _cut(x: Tensor, size: Grid) -> Tensor:
    """h w -> nW N."""
    x = x.unflatten(1, (-1, size[1])).unflatten(0, (-1, size[0]))  # rows wh columns ww
    return x.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)


@fx.wrap
def to_windows(x: Tensor, plan: WindowPlan) -> Tensor:
    """B T D -> B nW N D; padding is zero."""
    if torch.compiler.is_compiling():
        return roll_and_cut(x, plan)
    return _reorder(x, plan.source, plan.inverse, plan.padded, False).unflatten(1, (plan.num_windows, -1))


@fx.wrap
def from_windows(x: Tensor, plan: WindowPlan) -> Tensor:
    """B nW N D -> B T D, without the padding."""
    if torch.compiler.is_compiling():
        return join_and_unroll(x, plan)
    return _reorder(x.flatten(1, 2), plan.inverse, plan.source, False, plan.padded)


def roll_and_cut(x: Tensor, plan: WindowPlan) -> Tensor:
    """`to_windows` step by step. A compiler makes one copy of it, and of its gradient; without one there are three."""
    grid, shape = plan.grid, plan.shape
    padding = [-side % size for side, size in zip(grid, shape.size, strict=True)]
    x = x.unflatten(1, grid)  # B h w D
    x = _pad(_roll(x, shape.shift, -1), padding) if plan.roll_first else _roll(_pad(x, padding), shape.shift, -1)
    x = x.unflatten(2, (-1, shape.size[1])).unflatten(1, (-1, shape.size[0]))  # B rows wh columns ww D
    return x.permute(0, 1, 3, 2, 4, 5).flatten(3, 4).flatten(1, 2)


def join_and_unroll(x: Tensor, plan: WindowPlan) -> Tensor:
    """`from_windows` step by step."""
    grid, shape = plan.grid, plan.shape
    x = x.unflatten(2, shape.size).unflatten(1, (-(-grid[0] // shape.size[0]), -1))  # B rows columns wh ww D
    x = x.permute(0, 1, 3, 2, 4, 5).flatten(3, 4).flatten(1, 2)  # B padded h, padded w, D
    if plan.roll_first:
        return _roll(x[:, : grid[0], : grid[1]], shape.shift, 1).flatten(1, 2)
    return _roll(x, shape.shift, 1)[:, : grid[0], : grid[1]].flatten(1, 2)


def _roll(x: Tensor, shift: Grid, sign: int) -> Tensor:
    return torch.roll(x, (sign * shift[0], sign * shift[1]), (1, 2)) if any(shift) else x


def _pad(x: Tensor, padding: list[int]) -> Tensor:
    return F.pad(x, (0, 0, 0, padding[1], 0, padding[0])) if any(padding) else x


def _reorder(x: Tensor, index: Tensor, inverse: Tensor, padded: bool, padded_back: bool) -> Tensor:
    """Tokens in another order; `padded`: the index contains padding, `padded_back`: the inverse does."""
    if torch.is_grad_enabled() and x.requires_grad:
        reordered: Tensor = _Reorder.apply(x, index, inverse, padded, padded_back)  # type: ignore[no-untyped-call]
        return reordered
    return _select(x, index, padded)


def _select(x: Tensor, index: Tensor, padded: bool) -> Tensor:
    return (F.pad(x, (0, 0, 0, 1)) if padded else x).index_select(1, index)


class _Reorder(torch.autograd.Function):
    """Tokens in another order. The gradient is the inverse order: a gather, where autograd would scatter and add."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, padded: bool, padded_back: bool) -> Tensor:
        ctx.save_for_backward(index, inverse)
        ctx.padded = padded, padded_back
        return _select(x, index, padded)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        index, inverse = ctx.saved_tensors
        padded, padded_back = ctx.padded
        x = _reorder(grad, inverse, index, padded_back, padded)  # differentiable, for second derivatives
        return x, None, None, None, None
