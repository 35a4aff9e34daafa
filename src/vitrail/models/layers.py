"""The encoder's parts: patch projection, attention, MLP, block, attention pool."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import ViTConfig
from vitrail.kernels.linear_gelu import can_fuse_linear_gelu, linear_gelu_tanh
from vitrail.kernels.packed_attention import can_pack_attention, packed_attention
from vitrail.models import drop

# B images, C channels, N tokens, D width, H heads, K = D // H, M hidden width of the MLP

QKTransform = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor | None]]
"""A position that lives in the attention: q, k (B H N K) -> q, k, logits to add or None."""


class PatchEmbed(nn.Module):
    """Each patch flattened and multiplied by one matrix: a convolution whose stride is its size."""

    def __init__(self, in_channels: int, width: int, patch: tuple[int, int], bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, in_channels, *patch))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    def forward(self, images: Tensor) -> Tensor:
        """B C H W -> B h w D."""
        height, width = self.weight.shape[-2:]
        x = images.unflatten(3, (-1, width)).unflatten(2, (-1, height))  # B C h p w q
        x = x.permute(0, 2, 4, 1, 3, 5).flatten(3)  # B h w Cpq
        return F.linear(x, self.weight.flatten(1), self.bias)


class RMSNorm(nn.RMSNorm):
    """Computed in the precision of its weight: torch has no kernel for two, and warns."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def make_norm(config: ViTConfig, width: int | None = None) -> nn.Module:
    """LayerNorm or RMSNorm with the model's epsilon."""
    kind = nn.LayerNorm if config.norm == "layer" else RMSNorm
    return kind(width or config.width, eps=config.norm_eps)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    weights_out: list[Tensor] | None = None,
) -> Tensor:
    """softmax(q k' / sqrt(K) + bias) v, all B H N K.

    Fused, unless a list is given to keep the weights (B H N N) in: then the same arithmetic is
    written out, and agrees to rounding.
    """
    if weights_out is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout)
    logits = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    weights = (logits if bias is None else logits + bias).softmax(-1)
    del logits
    weights_out.append(weights)
    return F.dropout(weights, dropout, training=dropout > 0) @ v


class Attention(nn.Module):
    """Every token asks every token."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        width, self.heads = config.width, config.num_heads
        self.qkv = nn.Linear(width, 3 * width, bias=config.qkv_bias)
        self.q_norm = make_norm(config, width // config.num_heads) if config.qk_norm else nn.Identity()
        self.k_norm = make_norm(config, width // config.num_heads) if config.qk_norm else nn.Identity()
        self.out = nn.Linear(width, width, bias=config.proj_bias)
        self.dropout, self.attention_dropout = config.dropout, config.attention_dropout
        self.bare = not config.qk_norm

    def forward(
        self,
        x: Tensor,
        qk_transform: QKTransform | None = None,
        weights_out: list[Tensor] | None = None,
        dropout_seeds: Tensor | None = None,
    ) -> Tensor:
        qkv, rate = self.qkv(x), self.attention_dropout if self.training else 0.0  # B N 3D
        if self.bare and qk_transform is None and weights_out is None and not rate and can_pack_attention(qkv):
            x = packed_attention(qkv, self.heads)
        else:
            q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each B H N K
            q, k, bias = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype), None
            if qk_transform is not None:
                q, k, bias = qk_transform(q, k)
            x = attend(q, k, v, bias=bias, dropout=rate, weights_out=weights_out).transpose(1, 2).flatten(2)  # B N D
        return drop.dropout(self.out(x), self.dropout if self.training else 0.0, dropout_seeds)


def swiglu(x: Tensor) -> Tensor:
    """Half of the numbers gate the other half."""
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


def quick_gelu(x: Tensor) -> Tensor:
    """OpenAI CLIP's cheap stand-in for GELU."""
    return x * torch.sigmoid(1.702 * x)


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu-tanh": gelu_tanh,
    "gelu-quick": quick_gelu,
    "swiglu": swiglu,
}


class MLP(nn.Module):
    """Each token by itself: wider, bent, back."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        hidden = config.mlp_dim * (2 if config.activation == "swiglu" else 1)
        self.up = nn.Linear(config.width, hidden, bias=config.proj_bias)
        self.down = nn.Linear(config.mlp_dim, config.width, bias=config.proj_bias)
        self.activation, self.dropout = ACTIVATIONS[config.activation], config.dropout

    def forward(self, x: Tensor, hidden_seeds: Tensor | None = None, output_seeds: Tensor | None = None) -> Tensor:
        """`hidden` and `down` are the seeds of the two dropouts."""
        rate = self.dropout if self.training else 0.0
        if self.activation is gelu_tanh and can_fuse_linear_gelu(self.up, x):
            x = linear_gelu_tanh(x, self.up.weight, self.up.bias)
        else:
            x = self.activation(self.up(x))
        x = drop.dropout(x, rate, hidden_seeds)
        return drop.dropout(self.down(x), rate, output_seeds)


class Block(nn.Module):
    """Attention, then MLP, each on the normalized tokens and added to them.

    `seeds` (5 B, see `models.drop`) decide what dropout and stochastic depth drop; None: fresh ones.
    """

    def __init__(self, config: ViTConfig, drop_path: float = 0.0) -> None:
        super().__init__()
        self.norm1 = make_norm(config)
        self.attention = Attention(config)
        self.norm2 = make_norm(config)
        self.mlp = MLP(config)
        scaled = config.layer_scale is not None
        self.scale1 = nn.Parameter(torch.empty(config.width)) if scaled else None
        self.scale2 = nn.Parameter(torch.empty(config.width)) if scaled else None
        self.drop_path = drop_path

    def forward(
        self,
        x: Tensor,
        qk_transform: QKTransform | None = None,
        weights_out: list[Tensor] | None = None,
        seeds: Tensor | None = None,
    ) -> Tensor:
        out, hidden, down, skip1, skip2 = (None,) * 5 if seeds is None else seeds.unbind()
        y = self.attention(self.norm1(x), qk_transform, weights_out, out)
        x = x + self.scale_and_drop(y, self.scale1, skip1)
        y = self.mlp(self.norm2(x), hidden, down)
        return x + self.scale_and_drop(y, self.scale2, skip2)

    def scale_and_drop(self, x: Tensor, scale: Tensor | None, seed: Tensor | None) -> Tensor:
        """Scaled by LayerScale, and skipped for some images by stochastic depth."""
        x = x if scale is None else (x * scale).to(x.dtype)  # autocast would leave float32 to be added
        return drop.drop_path(x, self.drop_path if self.training else 0.0, seed)


class AttentionPool(nn.Module):
    """Cross-attention of one learned query to the tokens, then a residual MLP (big_vision's MAP head) or a norm (CoCa).

    CoCa's pool may have a width P and heads of its own. Its other queries, which only CoCa's text
    decoder reads, are not here.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        width, self.heads = config.pooled_width, config.pool_heads or config.num_heads
        self.probe = nn.Parameter(torch.empty(width))
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(config.width, 2 * width)
        self.out = nn.Linear(width, width)
        self.norm = make_norm(config, width)
        self.mlp = MLP(config.replace(dropout=0.0)) if config.pool == "map" else None

    def forward(self, x: Tensor, weights_out: list[Tensor] | None = None) -> Tensor:
        """B N D -> B P, where P is D but in CoCa."""
        q = self.q(self.probe).expand(x.shape[0], 1, -1).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # B H 1 K
        k, v = self.kv(x).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each B H N K
        x = self.out(attend(q, k, v, weights_out=weights_out).flatten(1))  # B P
        normed: Tensor = self.norm(x)
        return normed if self.mlp is None else x + self.mlp(normed)
