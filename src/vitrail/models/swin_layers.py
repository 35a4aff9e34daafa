"""Layers of the Swin Transformer: attention inside windows, its position biases, blocks, and the merging of patches."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from vitrail.config import SwinConfig
from vitrail.config.architecture import Activation
from vitrail.kernels.onednn_linear import apply_linear
from vitrail.models import drop, windows
from vitrail.models.cached_module import CachedModule
from vitrail.models.layers import MLP, QKVProjection, attend
from vitrail.models.position import resample
from vitrail.models.windows import Grid, WindowPlan

# B images; T = h w tokens of a map; nW windows of N = wh ww tokens; D width of the stage; H heads of K = D // H

MAX_LOG_SCALE = math.log(100)
"""Version 2: upper bound of the logarithm of the factor that multiplies the cosines."""
BIAS_HIDDEN = 512
"""Version 2: hidden dimension of the MLP that computes position biases."""


@dataclass(frozen=True)
class StageConfig:
    """The settings of one stage's layers."""

    width: int
    mlp_dim: int
    dropout: float
    activation: Activation = "gelu"
    proj_bias: bool = True


@fx.wrap
def relative_position_index(window: Grid, like: Tensor) -> Tensor:
    """N N: the row of the bias table for each query and key, from their vertical and horizontal distance."""
    rows, columns = (torch.arange(side, device=like.device) for side in window)
    dy = (rows[:, None] - rows + window[0] - 1)[:, None, :, None]  # query row, 1, key row, 1
    dx = (columns[:, None] - columns + window[1] - 1)[None, :, None, :]
    return (dy * (2 * window[1] - 1) + dx).flatten(2).flatten(0, 1)


@fx.wrap
def bias_of_table(table: Tensor, window: Grid) -> Tensor:
    """The bias of the attention logits, H N N, from a table with a row for each distance, (2 wh - 1)(2 ww - 1) H."""
    return table[relative_position_index(window, table)].permute(2, 0, 1)


@fx.wrap
def resample_table(table: Tensor, built_for: Grid, window: Grid, rule: str = "microsoft") -> Tensor:
    """A table for another window size: bicubic interpolation of the distances as in the original's code, or timm's."""
    if window == built_for:
        return table
    rows, columns = (2 * side - 1 for side in built_for)
    target = 2 * window[0] - 1, 2 * window[1] - 1
    table = table.unflatten(0, (rows, columns))
    if rule != "timm":
        return resample(table, target, "huggingface").flatten(0, 1)
    vertical, horizontal = (_geometric_weights(*sides).to(table) for sides in zip((rows, columns), target, strict=True))
    return torch.einsum("ir,rch,jc->ijh", vertical, table, horizontal).flatten(0, 1)


def _geometric_weights(source: int, target: int) -> Tensor:
    """target source: linear interpolation from distances in geometric progression, as in BEiT's code and timm's.

    The distances 1, 1 + q, 1 + q + q^2, ... of the table are stretched so that the largest ones of both sizes meet.
    """
    low, high = 1.01, 1.5
    while high - low > 1e-6:
        q = (low + high) / 2
        low, high = (low, q) if (1 - q ** (source // 2)) / (1 - q) > target // 2 else (q, high)
    distances = np.cumsum(q ** np.arange(source // 2))
    places = np.concatenate([-distances[::-1], [0.0], distances])
    wanted = np.arange(target) - target // 2
    return torch.from_numpy(np.stack([np.interp(wanted, places, row) for row in np.eye(source)], axis=1))


@fx.wrap
def log_distances(window: Grid, trained_window: int, like: Tensor) -> Tensor:
    """Version 2: signed logarithms of the distances in a window, (2 wh - 1)(2 ww - 1) 2.

    sign(t) log2(|t| + 1) / 3 with t = 8 d / (w - 1); w is the window size of the pre-training.
    """
    axes = []
    for side in window:
        distance = torch.arange(1 - side, side, device=like.device, dtype=torch.float32)
        t = 8 * distance / max((trained_window or side) - 1, 1)
        axes.append(t.sign() * torch.log2(t.abs() + 1) / math.log2(8))
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 1).to(like.dtype)


@fx.wrap
def add_mask(bias: Tensor, plan: WindowPlan, mask_value: float) -> Tensor:
    """The bias with `mask_value` for masked pairs: H N N -> nW H N N; unchanged, 1 H N N, without a shift."""
    if plan.mask is None:
        return bias[None]
    mask = torch.zeros(plan.mask.shape, dtype=bias.dtype, device=bias.device).masked_fill_(plan.mask, mask_value)
    return bias + mask[:, None]


class PositionBias(CachedModule):
    """Bias of the attention logits from relative positions, with the mask of shifted windows: nW H N N or 1 H N N."""

    def __init__(self, config: SwinConfig) -> None:
        super().__init__()
        self.mask_value = config.mask_value

    def forward(self, plan: WindowPlan, like: Tensor) -> Tensor:
        """The bias for these windows, with the dtype and device of `like`."""
        key = (plan.grid, plan.shape, like.dtype)
        bias: Tensor = self.cached(
            key, like.device, lambda: add_mask(self.bias(plan), plan, self.mask_value).to(like.dtype)
        )
        return bias

    def bias(self, plan: WindowPlan) -> Tensor:
        """The bias without the mask, H N N."""
        raise NotImplementedError


class TableBias(PositionBias):
    """Version 1: a learned bias for each head and distance, (2 wh - 1)(2 ww - 1) H."""

    def __init__(self, config: SwinConfig, stage: int) -> None:
        super().__init__(config)
        self.window = config.table_window(stage)
        rows, columns = (2 * side - 1 for side in self.window)
        self.table = nn.Parameter(torch.empty(rows * columns, config.num_heads[stage]))

    def bias(self, plan: WindowPlan) -> Tensor:
        return bias_of_table(resample_table(self.table, self.window, plan.shape.size), plan.shape.size)


class ContinuousBias(PositionBias):
    """Version 2: an MLP of the distance, 16 sigmoid(Linear(512, H)(ReLU(Linear(2, 512)(log distance))))."""

    def __init__(self, config: SwinConfig, stage: int) -> None:
        super().__init__(config)
        self.trained_window = config.pretrained_window_sizes[stage] if config.pretrained_window_sizes else 0
        self.up = nn.Linear(2, BIAS_HIDDEN)
        self.down = nn.Linear(BIAS_HIDDEN, config.num_heads[stage], bias=False)

    def bias(self, plan: WindowPlan) -> Tensor:
        table = self.down(F.relu(self.up(log_distances(plan.shape.size, self.trained_window, self.up.weight))))
        return 16 * torch.sigmoid(bias_of_table(table, plan.shape.size))


class WindowAttention(nn.Module):
    """Multi-head self-attention inside the windows of a map, B T D -> B T D.

    Version 2 compares queries and keys by their cosine, multiplied by a learned factor for each head.
    """

    def __init__(self, config: SwinConfig, stage: int, shifted: bool) -> None:
        super().__init__()
        width, self.num_heads = config.stage_width(stage), config.num_heads[stage]
        self.placement, self.shifted = config.window_placement(stage), shifted
        self.qkv = QKVProjection(width, bias=config.qkv_bias, key_bias=config.version == 1)
        self.bias = TableBias(config, stage) if config.version == 1 else ContinuousBias(config, stage)
        self.log_scale = nn.Parameter(torch.empty(self.num_heads)) if config.version == 2 else None
        self.out = nn.Linear(width, width)
        self.dropout, self.attention_dropout = config.dropout, config.attention_dropout

    def forward(
        self,
        x: Tensor,
        grid: Grid,
        weights_out: list[Tensor] | None = None,
        dropout_seeds: Tensor | None = None,
    ) -> Tensor:
        """`weights_out` receives the attention weights, for `by_window`; `dropout_seeds`, B int64, seed the dropout."""
        plan = self.plan(grid, x)
        qkv = self.qkv(windows.to_windows(x, plan))  # B nW N 3D
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).unbind(3)  # each B nW N H K
        bias, scale = self.bias(plan, qkv), None
        if self.log_scale is not None:
            factor = self.log_scale.clamp(max=MAX_LOG_SCALE).exp()[:, None]  # H 1
            q, k, scale = (F.normalize(q, dim=-1) * factor).to(v.dtype), F.normalize(k, dim=-1).to(v.dtype), 1.0
        rate = self.attention_dropout if self.training else 0.0
        x = attend_in_windows(q, k, v, bias, scale, rate, weights_out)  # B nW N D
        return drop.dropout(
            apply_linear(self.out, windows.from_windows(x, plan)), self.dropout if self.training else 0.0, dropout_seeds
        )

    def plan(self, grid: Grid, like: Tensor) -> WindowPlan:
        """The windows of a map with this grid."""
        return windows.window_plan(grid, self.placement, self.shifted, like)


@fx.wrap
def attend_in_windows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    scale: float | None,
    dropout: float,
    weights_out: list[Tensor] | None,
) -> Tensor:
    """Attention inside each window: q, k, v, B nW N H K, and bias, nW H N N or 1 H N N -> B nW N D."""
    num_images, num_windows, tokens, num_heads, _ = q.shape
    if len(bias) == 1:  # the same bias in every window: windows are a batch, and nothing is copied
        q, k, v = (x.flatten(0, 1).transpose(1, 2) for x in (q, k, v))  # each B nW, H, N, K
    else:  # windows beside the heads: the bias, which differs between them, is shared by all images
        q, k, v = (x.transpose(2, 3).flatten(1, 2) for x in (q, k, v))  # each B, nW H, N, K
        bias = bias.flatten(0, 1)[None]
    x = attend(q, k, v, bias=bias, dropout=dropout, weights_out=weights_out, scale=scale)
    return x.reshape(num_images, num_windows, num_heads, tokens, -1).transpose(2, 3).flatten(3)


def by_window(weights: Tensor, num_images: int, num_heads: int) -> Tensor:
    """The weights of `attend_in_windows`, whose windows are a batch or beside the heads -> B nW H N N."""
    return weights.reshape(num_images, -1, num_heads, *weights.shape[-2:])


class SwinBlock(nn.Module):
    """Block of a Swin Transformer, B T D -> B T D.

        version 1   x = x + drop_path(Attention(norm1(x)));  x = x + drop_path(MLP(norm2(x)))
        version 2   x = x + drop_path(norm1(Attention(x)));  x = x + drop_path(norm2(MLP(x)))

    `seeds`, 5 B (see `models.drop`), determine dropout and stochastic depth; None draws them from torch's generator.
    """

    def __init__(self, config: SwinConfig, stage: int, shifted: bool, drop_path: float = 0.0) -> None:
        super().__init__()
        width = config.stage_width(stage)
        self.norm1 = nn.LayerNorm(width, eps=config.norm_eps)
        self.attention = WindowAttention(config, stage, shifted)
        self.norm2 = nn.LayerNorm(width, eps=config.norm_eps)
        self.mlp = MLP(StageConfig(width, config.mlp_dim(stage), config.dropout))
        self.drop_path, self.norm_first = drop_path, config.version == 1

    def forward(
        self, x: Tensor, grid: Grid, weights_out: list[Tensor] | None = None, seeds: Tensor | None = None
    ) -> Tensor:
        attention_seeds, hidden_seeds, mlp_seeds, path1, path2 = (None,) * 5 if seeds is None else seeds.unbind()
        rate = self.drop_path if self.training else 0.0
        if self.norm_first:
            y = self.attention(self.norm1(x), grid, weights_out, attention_seeds)
            x = x + drop.drop_path(y, rate, path1)
            return x + drop.drop_path(self.mlp(self.norm2(x), hidden_seeds, mlp_seeds), rate, path2)
        y = self.norm1(self.attention(x, grid, weights_out, attention_seeds)).to(x.dtype)
        x = x + drop.drop_path(y, rate, path1)
        y = self.norm2(self.mlp(x, hidden_seeds, mlp_seeds)).to(x.dtype)
        return x + drop.drop_path(y, rate, path2)


class PatchMerging(nn.Module):
    """Joins each 2 x 2 tokens of a map into one of twice the width: B T D -> B T/4 2D. Odd sides are padded with zeros.

    Version 1: Linear(4D, 2D)(norm(x)); version 2: norm(Linear(4D, 2D)(x)).
    """

    def __init__(self, config: SwinConfig, width: int) -> None:
        super().__init__()
        self.norm_first = config.version == 1
        self.norm = nn.LayerNorm(4 * width if self.norm_first else 2 * width, eps=config.norm_eps)
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        x = join_neighbors(x, grid)  # B T/4 4D
        if self.norm_first:
            return apply_linear(self.reduction, self.norm(x))
        y = apply_linear(self.reduction, x)
        normed: Tensor = self.norm(y)
        return normed.to(y.dtype)


@fx.wrap
def join_neighbors(x: Tensor, grid: Grid) -> Tensor:
    """B T D -> B T/4 4D: the channels of each 2 x 2 tokens: top left, bottom left, top right, bottom right."""
    x = x.unflatten(1, grid)  # B h w D
    if grid[0] % 2 or grid[1] % 2:
        x = F.pad(x, (0, 0, 0, grid[1] % 2, 0, grid[0] % 2))
    x = x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))  # B h/2 2 w/2 2 D
    return x.permute(0, 1, 3, 4, 2, 5).flatten(3).flatten(1, 2)
