"""Cutting a map of tokens into shifted windows, as one reordering of its tokens.

The usual code rolls the map, pads it, cuts it into windows, and undoes each step afterwards, with a copy of the
tokens each time. Here the steps are composed into an index once for each size of map, and tokens are copied twice: into
windows, and back.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
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
    size: Grid
    """Height and width of a window."""
    key: Hashable
    """Equal for equal plans on any device."""


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
    """`roll_first`: shift the map, then pad it (timm); else the reverse."""
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
        shape.size,
        (grid, shape, roll_first),
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
    if torch.is_grad_enabled() and x.requires_grad:
        x = _Reorder.apply(x, plan.source, plan.inverse, plan.padded, False)  # type: ignore[no-untyped-call]
    else:
        x = _select(x, plan.source, plan.padded)
    return x.unflatten(1, (plan.num_windows, -1))


@fx.wrap
def from_windows(x: Tensor, plan: WindowPlan) -> Tensor:
    """B nW N D -> B T D, without the padding."""
    x = x.flatten(1, 2)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Reorder.apply(x, plan.inverse, plan.source, False, plan.padded)  # type: ignore[no-untyped-call]
    return _select(x, plan.inverse, False)


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
        if torch.is_grad_enabled() and grad.requires_grad:  # a second derivative was asked for
            x = _Reorder.apply(grad, inverse, index, padded_back, padded)  # type: ignore[no-untyped-call]
        else:
            x = _select(grad, inverse, padded_back)
        return x, None, None, None, None
