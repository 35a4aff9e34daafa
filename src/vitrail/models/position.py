"""How a patch knows where it is.

Additive kinds (learned-1d, learned-2d, sincos-2d) are modules that map a grid to one vector per
token. The kinds inside the attention (relative, rope-2d) map a grid to a function of queries and
keys. None of them holds a buffer, so a skeleton without storage plus a state_dict is complete.

What depends on the grid is computed by functions that torch.fx keeps as one node (`fx.wrap`), so that
a traced graph takes images of any size, as the network does.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from vitrail.config import ViTConfig
from vitrail.errors import ModelError
from vitrail.models.cached_module import CachedModule
from vitrail.models.layers import QKTransform

# h rows and w columns of patches, N = h w, T tokens (P special ones first), D width, H heads, K = D // H

Grid = tuple[int, int]

RESAMPLE_ARGS: dict[str, dict[str, Any]] = {
    "google": {"mode": "bilinear", "align_corners": True},  # scipy.ndimage.zoom, order 1
    "timm": {"mode": "bicubic", "antialias": True},  # and DINOv2 with registers
    "timm-npz": {"mode": "bilinear"},  # timm reading Google's files
    "huggingface": {"mode": "bicubic"},
    "torchvision": {"mode": "bicubic", "align_corners": True},
    "dinov2": {"mode": "bicubic", "offset": 0.1},  # and DINO: the scale is a little too large
}
"""Whose convention -> arguments of `torch.nn.functional.interpolate`."""


@fx.wrap
def resample(table: Tensor, grid: Grid, convention: str) -> Tensor:
    """h w D -> h' w' D, as the named code base does it; the same grid comes back as it is."""
    source = (table.shape[0], table.shape[1])
    if source == grid:
        return table
    how = dict(RESAMPLE_ARGS[convention])
    offset = how.pop("offset", 0.0)
    if offset:
        how["scale_factor"] = [(new + offset) / old for new, old in zip(grid, source, strict=True)]
    else:
        how["size"] = grid
    exact = table if table.dtype == torch.float64 else table.float()
    return F.interpolate(exact.permute(2, 0, 1)[None], **how)[0].permute(1, 2, 0).to(table.dtype)


def _arange(end: int, like: Tensor) -> Tensor:
    """0 ... end - 1 in at least single precision, where `like` lives."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.arange(end, device=like.device, dtype=dtype)


@fx.wrap
def sincos_2d(grid: Grid, width: int, like: Tensor) -> Tensor:
    """N D: sines and cosines of column, then of row, as big_vision has them."""
    omega = 10_000.0 ** -(_arange(width // 4, like) / (width // 4 - 1))
    y, x = torch.meshgrid(_arange(grid[0], like), _arange(grid[1], like), indexing="ij")
    angles = [axis.reshape(-1, 1) * omega for axis in (x, y)]
    return torch.cat([f(a) for a in angles for f in (torch.sin, torch.cos)], dim=1)


@fx.wrap
def cast_like(x: Tensor, like: Tensor) -> Tensor:
    """In the dtype of the tokens that it is added to; autocast adds it in single precision."""
    return x if torch.is_autocast_enabled(like.device.type) else x.to(like.dtype)


@fx.wrap
def rotary_cos_sin(grid: Grid, head: int, base: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, N K: centers of patches in [-1, 1], one period per pair of numbers."""
    periods = base ** (_arange(head // 4, like) * 4 / head)
    centers = [2 * (_arange(n, like) + 0.5) / n - 1 for n in grid]
    where = torch.stack(torch.meshgrid(*centers, indexing="ij"), dim=-1).flatten(0, 1)  # N 2
    angles = (2 * math.pi * where[:, :, None] / periods).flatten(1).tile(2)  # N K
    return angles.cos(), angles.sin()


@fx.wrap
def relative_position_index(grid: Grid, built_for: Grid, like: Tensor) -> Tensor:
    """N N: p_q - p_k of the flattened patches, from 0."""
    if grid != built_for:
        raise ModelError(
            f"relative positions exist for {built_for[0]}x{built_for[1]} patches only and cannot be "
            f"resampled to {grid[0]}x{grid[1]}; use images of the size the model was built for."
        )
    steps = torch.arange(math.prod(grid), device=like.device)
    return steps[:, None] - steps[None] + len(steps) - 1


class AdditivePosition(CachedModule):
    """A vector for each token; special tokens without a position get zeros."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.source, self.width = config.grid, config.width
        self.convention, self.zeros = config.resample, config.num_prefix_tokens - config.placed_prefix
        rows = config.placed_prefix
        self.prefix = nn.Parameter(torch.empty(rows, config.width)) if rows else None

    def forward(self, grid: Grid, like: Tensor) -> Tensor:
        """T D for this grid."""
        table: Tensor = self.cached((grid, like.dtype), like.device, lambda: self.build_table(grid, like))
        return table

    def build_table(self, grid: Grid, like: Tensor) -> Tensor:
        patches = self.patch_table(grid, like)
        parts = [patches]
        if self.zeros:
            parts.insert(0, patches.new_zeros(self.zeros, self.width))
        if self.prefix is not None:
            parts.insert(0, self.prefix)
        return torch.cat(parts) if len(parts) > 1 else patches

    def patch_table(self, grid: Grid, like: Tensor) -> Tensor:
        """N D."""
        raise NotImplementedError

    def resampled(self, grid: Grid) -> dict[str, Tensor]:
        """The parameters that depend on the grid, for another one."""
        return {}


class LearnedPosition1d(AdditivePosition):
    """A vector for each patch; called 1-D because it knows nothing of rows and columns."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.table = nn.Parameter(torch.empty(*config.grid, config.width))

    def patch_table(self, grid: Grid, like: Tensor) -> Tensor:
        return resample(self.table, grid, self.convention).flatten(0, 1)

    def resampled(self, grid: Grid) -> dict[str, Tensor]:
        return {"table": resample(self.table, grid, self.convention)}


class LearnedPosition2d(AdditivePosition):
    """Half a vector for each row and half for each column, side by side."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.rows = nn.Parameter(torch.empty(config.grid[0], config.width // 2))
        self.columns = nn.Parameter(torch.empty(config.grid[1], config.width // 2))

    def patch_table(self, grid: Grid, like: Tensor) -> Tensor:
        rows, columns = self.resampled(grid).values()
        pairs = rows[:, None].expand(*grid, -1), columns[None].expand(*grid, -1)
        return torch.cat(pairs, dim=-1).flatten(0, 1)

    def resampled(self, grid: Grid) -> dict[str, Tensor]:
        rows = resample(self.rows[:, None], (grid[0], 1), self.convention)[:, 0]
        columns = resample(self.columns[:, None], (grid[1], 1), self.convention)[:, 0]
        return {"rows": rows, "columns": columns}


class SinCosPosition2d(AdditivePosition):
    """Fixed waves: nothing to learn, any grid."""

    def patch_table(self, grid: Grid, like: Tensor) -> Tensor:
        return cast_like(sincos_2d(grid, self.width, like), like)


class RotaryPosition2d(CachedModule):
    """Queries and keys of patches turned by angles of their place (DINOv3's convention)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.head, self.base, self.special = (
            config.width // config.num_heads,
            config.rope_base,
            config.num_prefix_tokens,
        )

    def forward(self, grid: Grid, like: Tensor) -> QKTransform:
        cos, sin = self.cached((grid, like.dtype), like.device, lambda: self.cos_sin(grid, like))

        def turn(x: Tensor) -> Tensor:
            special, patches = x[:, :, : self.special], x[:, :, self.special :]
            a, b = patches.chunk(2, dim=-1)
            turned = patches * cos + torch.cat([-b, a], dim=-1) * sin
            return torch.cat([special, turned.to(x.dtype)], dim=2)

        return lambda q, k: (turn(q), turn(k), None)

    def cos_sin(self, grid: Grid, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, N K: centers of patches in [-1, 1], one period per pair of numbers."""
        return rotary_cos_sin(grid, self.head, self.base, like)


class RelativePosition(nn.Module):
    """The query also asks an embedding of each offset along the flattened patches (appendix D.4)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.grid, self.heads, self.special = config.grid, config.num_heads, config.num_prefix_tokens
        count = math.prod(config.grid)
        self.offsets = nn.Parameter(torch.empty(2 * count - 1, config.width))

    def forward(self, grid: Grid, like: Tensor) -> QKTransform:
        index = relative_position_index(grid, self.grid, like)

        def add(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            keys = self.offsets.unflatten(1, (self.heads, -1)).permute(1, 2, 0).to(q.dtype)  # H K 2N-1
            asked = (q[:, :, self.special :] * q.shape[-1] ** -0.5) @ keys  # B H N 2N-1
            bias = asked.gather(-1, index.expand(q.shape[0], self.heads, -1, -1))  # B H N N
            return q, k, F.pad(bias, (self.special, 0, self.special, 0))

        return add


ADDITIVE: dict[str, type[AdditivePosition]] = {
    "learned-1d": LearnedPosition1d,
    "learned-2d": LearnedPosition2d,
    "sincos-2d": SinCosPosition2d,
}
IN_ATTENTION: dict[str, type[nn.Module]] = {"relative": RelativePosition, "rope-2d": RotaryPosition2d}


def make_positions(config: ViTConfig) -> nn.ModuleList:
    """One module, or one per layer; empty where there are no positions."""
    if config.position == "none":
        return nn.ModuleList()
    kind = (ADDITIVE | IN_ATTENTION)[config.position]
    own = config.place == "layers" and config.position not in ("sincos-2d", "rope-2d")  # those are the same everywhere
    return nn.ModuleList(kind(config) for _ in range(config.depth if own else 1))
