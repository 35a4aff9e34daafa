"""Position encodings of patches.

Additive encodings (learned-1d, learned-2d, sincos-2d) map a grid to one vector per token. Encodings
inside attention (relative, rope-2d) map a grid to a QKTransform, a function of queries and keys.
None of them has buffers: a model on the meta device plus a state_dict is complete.

Functions that depend on the grid are leaf nodes for torch.fx (`fx.wrap`), so a traced graph accepts
images of any size, like the model.
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

# N = h w patches in h rows and w columns; T tokens, prefix tokens first; D width; H heads of K = D // H channels

Grid = tuple[int, int]

RESAMPLE_ARGS: dict[str, dict[str, Any]] = {
    "google": {"mode": "bilinear", "align_corners": True},  # scipy.ndimage.zoom, order 1
    "timm": {"mode": "bicubic", "antialias": True},  # and DINOv2 with registers
    "timm-npz": {"mode": "bilinear"},  # timm reading Google's files
    "huggingface": {"mode": "bicubic"},
    "torchvision": {"mode": "bicubic", "align_corners": True},
    "tipsv2": {"mode": "bilinear", "antialias": True},
    "dinov2": {"mode": "bicubic", "offset": 0.1},  # and DINO: the scale is a little too large
}
"""Library -> arguments of torch.nn.functional.interpolate that reproduce how it resamples position embeddings."""


@fx.wrap
def resample(table: Tensor, grid: Grid, convention: str) -> Tensor:
    """Interpolate a table of position embeddings, h w D -> h' w' D, as the named library does."""
    source = (table.shape[0], table.shape[1])
    if source == grid:
        return table
    kwargs = dict(RESAMPLE_ARGS[convention])
    offset = kwargs.pop("offset", 0.0)
    if offset:
        kwargs["scale_factor"] = [(new + offset) / old for new, old in zip(grid, source, strict=True)]
    else:
        kwargs["size"] = grid
    x = table if table.dtype == torch.float64 else table.float()
    x = F.interpolate(x.permute(2, 0, 1)[None], **kwargs)  # 1 D h' w'
    return x[0].permute(1, 2, 0).to(table.dtype)  # h' w' D


def _arange(end: int, like: Tensor) -> Tensor:
    """0 ... end - 1 on the device of `like`, in float64 where `like` is, else float32."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.arange(end, device=like.device, dtype=dtype)


@fx.wrap
def sincos_2d(grid: Grid, width: int, like: Tensor) -> Tensor:
    """Fixed embeddings, N D, as in big_vision: sin(x omega), cos(x omega), sin(y omega), cos(y omega), each N D/4.

    x is the column and y the row of a patch; omega are D/4 frequencies, spaced geometrically from 1 to 1/10000.
    """
    omega = 10_000.0 ** -(_arange(width // 4, like) / (width // 4 - 1))  # D/4
    y, x = torch.meshgrid(_arange(grid[0], like), _arange(grid[1], like), indexing="ij")
    angles = [axis.reshape(-1, 1) * omega for axis in (x, y)]  # each N D/4
    return torch.cat([f(a) for a in angles for f in (torch.sin, torch.cos)], dim=1)


@fx.wrap
def cast_like(x: Tensor, like: Tensor) -> Tensor:
    """Cast to the dtype of the tokens it is added to; unchanged under autocast, which adds in float32."""
    return x if torch.is_autocast_enabled(like.device.type) else x.to(like.dtype)


def rotary_periods(head_dim: int, base: float, like: Tensor, precision: str = "float32") -> Tensor:
    """The K/4 periods of the rotary positions of a head, from 1 to base^(1 - 4/K).

    `precision` "bfloat16" rounds the base and the periods to it.
    """
    if precision == "bfloat16":
        periods = float(torch.tensor(base).bfloat16()) ** (_arange(head_dim // 4, like) * 4 / head_dim)
        return periods.bfloat16().to(periods.dtype)
    return base ** (_arange(head_dim // 4, like) * 4 / head_dim)


@fx.wrap
def rotary_cos_sin(
    grid: Grid, head_dim: int, base: float, like: Tensor, precision: str = "float32"
) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each N K, of the rotation angles 2 pi c / period.

    c is the row or column coordinate of a patch's center, scaled to [-1, 1]. The K/2 angles are those of the row with
    K/4 periods, then those of the column; they repeat for the second half of the channels.
    """
    periods = rotary_periods(head_dim, base, like, precision)
    centers = [2 * (_arange(n, like) + 0.5) / n - 1 for n in grid]
    coords = torch.stack(torch.meshgrid(*centers, indexing="ij"), dim=-1).flatten(0, 1)  # N 2
    angles = (2 * math.pi * coords[:, :, None] / periods).flatten(1).tile(2)  # N K
    return angles.cos(), angles.sin()


@fx.wrap
def relative_position_index(grid: Grid, built_for: Grid, like: Tensor) -> Tensor:
    """N N: p_q - p_k + N - 1, from 0 to 2N - 2; p_q and p_k are the indices of the query's and the key's patch."""
    if grid != built_for:
        raise ModelError(
            f"relative positions exist for {built_for[0]}x{built_for[1]} patches only and cannot be "
            f"resampled to {grid[0]}x{grid[1]}; use images of the size the model was built for."
        )
    steps = torch.arange(math.prod(grid), device=like.device)
    return steps[:, None] - steps[None] + len(steps) - 1


class AdditivePosition(CachedModule):
    """Base class of the additive encodings: one vector per token, T D; prefix tokens without a position get zeros."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.width, self.convention = config.width, config.resample
        self.num_zeros = config.num_prefix_tokens - config.num_positioned_prefix_tokens
        num_prefix = config.num_positioned_prefix_tokens
        self.prefix = nn.Parameter(torch.empty(num_prefix, config.width)) if num_prefix else None

    def forward(self, grid: Grid, like: Tensor) -> Tensor:
        """The embeddings for this grid, T D, with the dtype and device of `like`."""
        table: Tensor = self.cached((grid, like.dtype), like.device, lambda: self.build_table(grid, like))
        return table

    def build_table(self, grid: Grid, like: Tensor) -> Tensor:
        patches = self.patch_table(grid, like)  # N D
        parts = [patches]
        if self.num_zeros:
            parts.insert(0, patches.new_zeros(self.num_zeros, self.width))
        if self.prefix is not None:
            parts.insert(0, self.prefix)
        return torch.cat(parts) if len(parts) > 1 else patches

    def patch_table(self, grid: Grid, like: Tensor) -> Tensor:
        """Position embeddings of the patches, N D."""
        raise NotImplementedError

    def resampled(self, grid: Grid) -> dict[str, Tensor]:
        """The parameters that depend on the grid, by name, resampled to a new grid."""
        return {}


class LearnedPosition1d(AdditivePosition):
    """A learned vector for each patch, table h w D; called 1-D because rows and columns are not distinguished."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.table = nn.Parameter(torch.empty(*config.grid, config.width))

    def patch_table(self, grid: Grid, like: Tensor) -> Tensor:
        return resample(self.table, grid, self.convention).flatten(0, 1)

    def resampled(self, grid: Grid) -> dict[str, Tensor]:
        return {"table": resample(self.table, grid, self.convention)}


class LearnedPosition2d(AdditivePosition):
    """Concatenation of a learned vector for the row and one for the column: rows h D/2, columns w D/2."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.rows = nn.Parameter(torch.empty(config.grid[0], config.width // 2))
        self.columns = nn.Parameter(torch.empty(config.grid[1], config.width // 2))

    def patch_table(self, grid: Grid, like: Tensor) -> Tensor:
        rows, columns = self.resampled(grid).values()
        halves = rows[:, None].expand(*grid, -1), columns[None].expand(*grid, -1)  # each h w D/2
        return torch.cat(halves, dim=-1).flatten(0, 1)  # N D

    def resampled(self, grid: Grid) -> dict[str, Tensor]:
        rows = resample(self.rows[:, None], (grid[0], 1), self.convention)[:, 0]
        columns = resample(self.columns[:, None], (grid[1], 1), self.convention)[:, 0]
        return {"rows": rows, "columns": columns}


class SinCosPosition2d(AdditivePosition):
    """Fixed 2-D sine and cosine embeddings; no parameters, any grid."""

    def patch_table(self, grid: Grid, like: Tensor) -> Tensor:
        return cast_like(sincos_2d(grid, self.width, like), like)


class RotaryPosition2d(CachedModule):
    """2-D rotary position embedding of the patches' queries and keys, as in DINOv3; prefix tokens are not rotated.

    Channels i and i + K/2 are a pair, (a, b), which is rotated by the angle t of the patch (see `rotary_cos_sin`):
    (a cos t - b sin t, b cos t + a sin t).
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.head_dim = config.width // config.num_heads
        self.base, self.precision = config.rope_base, config.rope_periods
        self.num_prefix = config.num_prefix_tokens

    def forward(self, grid: Grid, like: Tensor) -> QKTransform:
        cos, sin = self.cached((grid, like.dtype), like.device, lambda: self.cos_sin(grid, like))

        def rotate(x: Tensor) -> Tensor:  # B H T K -> B H T K
            prefix, patches = x[:, :, : self.num_prefix], x[:, :, self.num_prefix :]
            a, b = patches.chunk(2, dim=-1)
            rotated = patches * cos + torch.cat([-b, a], dim=-1) * sin
            return torch.cat([prefix, rotated.to(x.dtype)], dim=2)

        return lambda q, k: (rotate(q), rotate(k), None)

    def cos_sin(self, grid: Grid, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the rotation angles, each N K."""
        return rotary_cos_sin(grid, self.head_dim, self.base, like, self.precision)


class RelativePosition(nn.Module):
    """Relative position embeddings (appendix D.4 of the paper): adds q . e[p_q - p_k] / sqrt(K) to the logits.

    p_q and p_k are the indices of the query's and the key's patch; e (`offsets`, 2N-1 D) is learned. Logits of
    prefix tokens are not changed.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.grid, self.num_heads, self.num_prefix = config.grid, config.num_heads, config.num_prefix_tokens
        count = math.prod(config.grid)
        self.offsets = nn.Parameter(torch.empty(2 * count - 1, config.width))

    def forward(self, grid: Grid, like: Tensor) -> QKTransform:
        index = relative_position_index(grid, self.grid, like)

        def add_bias(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            embeddings = self.offsets.unflatten(1, (self.num_heads, -1)).permute(1, 2, 0).to(q.dtype)  # H K 2N-1
            logits = (q[:, :, self.num_prefix :] * q.shape[-1] ** -0.5) @ embeddings  # B H N 2N-1
            bias = logits.gather(-1, index.expand(q.shape[0], self.num_heads, -1, -1))  # B H N N
            return q, k, F.pad(bias, (self.num_prefix, 0, self.num_prefix, 0))  # bias: B H T T

        return add_bias


ADDITIVE: dict[str, type[AdditivePosition]] = {
    "learned-1d": LearnedPosition1d,
    "learned-2d": LearnedPosition2d,
    "sincos-2d": SinCosPosition2d,
}
IN_ATTENTION: dict[str, type[nn.Module]] = {"relative": RelativePosition, "rope-2d": RotaryPosition2d}


def make_positions(config: ViTConfig) -> nn.ModuleList:
    """One position module, or one per layer with position_at='layers'; an empty list for position='none'."""
    if config.position == "none":
        return nn.ModuleList()
    kind = (ADDITIVE | IN_ATTENTION)[config.position]
    has_parameters = config.position not in ("sincos-2d", "rope-2d")  # the others are the same in every layer
    per_layer = config.resolved_position_at == "layers" and has_parameters
    return nn.ModuleList(kind(config) for _ in range(config.depth if per_layer else 1))
