"""Layers of the ViT encoder: PatchEmbed, Attention, MLP, Block, AttentionPool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import ViTConfig
from vitrail.config.architecture import Activation
from vitrail.kernels.choice import Backend, Operation, backend_for
from vitrail.kernels.fused_mlp import can_fuse, compute_dtype, fused_mlp, linear_gelu, linear_residual
from vitrail.kernels.gelu_polynomial import can_use_compiled_gelu, compiled_gelu
from vitrail.kernels.linear_gelu import can_fuse_linear_gelu, linear_gelu_tanh
from vitrail.kernels.onednn_linear import apply_linear, project
from vitrail.kernels.packed_attention import (
    can_pack_attention,
    can_use_short_attention,
    packed_attention,
    short_attention,
)
from vitrail.models import drop

# B images of C channels; N tokens; D width; H heads of K = D // H channels; M hidden width of the MLP

QKTransform = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor | None]]
"""Position encoding inside attention: (q, k), each B H N K -> (q, k, bias of the logits, B H N N or None)."""


class PatchEmbed(nn.Module):
    """Patch embedding: cuts the images into p x q patches and projects each to D channels, B C H W -> B h w D.

    Equal to nn.Conv2d(C, D, kernel_size=(p, q), stride=(p, q)), and stored like it (weight D C p q), but computed
    as one matrix product.
    """

    def __init__(self, in_channels: int, width: int, patch_size: tuple[int, int], bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, in_channels, *patch_size))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    def forward(self, images: Tensor) -> Tensor:
        p, q = self.weight.shape[-2:]
        x = images.unflatten(3, (-1, q)).unflatten(2, (-1, p))  # B C h p w q
        x = x.permute(0, 2, 4, 1, 3, 5).flatten(3)  # B h w Cpq
        return project(x, self.weight.flatten(1), self.bias)  # B h w D


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight, in the weight's dtype: torch has no fused kernel for mixed dtypes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def make_norm(config: ViTConfig, width: int | None = None) -> nn.Module:
    """LayerNorm or RMSNorm over `width` channels (default: D)."""
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
    scale: float | None = None,
) -> Tensor:
    """Scaled dot-product attention, softmax(q k^T scale + bias) v; q, k, v and the result are B H N K.

    `scale` is 1 / sqrt(K) by default.

    Uses the fused kernel, unless `weights_out` is given: then the attention weights (B H N N) are
    computed explicitly and appended to that list. Both paths agree to rounding.
    """
    if weights_out is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=scale)
    logits = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.transpose(-2, -1)  # B H N N
    weights = (logits if bias is None else logits + bias).softmax(-1)
    del logits
    weights_out.append(weights)
    return F.dropout(weights, dropout, training=dropout > 0) @ v


class QKVProjection(nn.Linear):
    """Linear(D, 3D) for queries, keys and values. With key_bias=False its bias has 2D elements: q's and v's."""

    def __init__(self, width: int, *, bias: bool = True, key_bias: bool = True) -> None:
        super().__init__(width, 3 * width, bias=bias)
        self.key_bias = key_bias
        if bias and not key_bias:
            self.bias = nn.Parameter(torch.empty(2 * width))

    def forward(self, x: Tensor) -> Tensor:
        bias: Tensor | None = self.bias
        if bias is not None and not self.key_bias:
            q, v = bias.chunk(2)
            bias = torch.cat([q, torch.zeros_like(q), v])
        return project(x, self.weight, bias)


class Attention(nn.Module):
    """Multi-head self-attention, B N D -> B N D: q, k, v = Linear(D, 3D)(x), then Linear(D, D)(attend(q, k, v)).

    With qk_norm, q and k are normalized per head.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        width, self.num_heads = config.width, config.num_heads
        self.qkv = QKVProjection(width, bias=config.qkv_bias, key_bias=config.key_bias)
        self.q_norm = make_norm(config, width // config.num_heads) if config.qk_norm else nn.Identity()
        self.k_norm = make_norm(config, width // config.num_heads) if config.qk_norm else nn.Identity()
        self.out = nn.Linear(width, width, bias=config.proj_bias)
        self.dropout, self.attention_dropout = config.dropout, config.attention_dropout
        self.has_qk_norm = config.qk_norm

    def forward(
        self,
        x: Tensor,
        qk_transform: QKTransform | None = None,
        weights_out: list[Tensor] | None = None,
        dropout_seeds: Tensor | None = None,
        num_queries: int | None = None,
    ) -> Tensor:
        """`weights_out` receives the attention weights, B H N N; `dropout_seeds`, B int64, seed the final dropout.

        With `num_queries` only the first tokens attend, to all: B num_queries D.
        """
        x = self.mix(x, qk_transform, weights_out, num_queries)
        return drop.dropout(apply_linear(self.out, x), self.dropout if self.training else 0.0, dropout_seeds)

    def mix(
        self,
        x: Tensor,
        qk_transform: QKTransform | None = None,
        weights_out: list[Tensor] | None = None,
        num_queries: int | None = None,
    ) -> Tensor:
        """Attention without the output projection, B N D -> B N D."""
        qkv = apply_linear(self.qkv, x)  # B N 3D
        rate = self.attention_dropout if self.training else 0.0
        plain = not self.has_qk_norm and qk_transform is None and weights_out is None and num_queries is None
        if plain and not rate and can_pack_attention(qkv):
            return packed_attention(qkv, self.num_heads)  # B N D
        if plain and can_use_short_attention(qkv, self.num_heads) and backend_for("attention", x.device) != "plain":
            return short_attention(qkv, self.num_heads)  # B N D
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # each B H N K
        q, k, bias = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype), None
        if qk_transform is not None:
            q, k, bias = qk_transform(q, k)
        if num_queries is not None:
            q, bias = q[:, :, :num_queries], None if bias is None else bias[:, :, :num_queries]
        x = attend(q, k, v, bias=bias, dropout=rate, weights_out=weights_out)  # B H N K
        return x.transpose(1, 2).flatten(2)  # B N D


def swiglu(x: Tensor) -> Tensor:
    """SiLU(a) * b, where a and b are the two halves of the channels: ... 2M -> ... M."""
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), the approximation of GELU in OpenAI's CLIP."""
    return x * torch.sigmoid(1.702 * x)


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu-tanh": gelu_tanh,
    "gelu-quick": quick_gelu,
    "swiglu": swiglu,
}


class MLPConfig(Protocol):
    """The settings that an MLP reads: a ViTConfig, or a stage of a Swin Transformer."""

    @property
    def width(self) -> int: ...
    @property
    def mlp_dim(self) -> int: ...
    @property
    def activation(self) -> Activation: ...
    @property
    def proj_bias(self) -> bool: ...
    @property
    def dropout(self) -> float: ...


class MLP(nn.Module):
    """Position-wise feed-forward network, B N D -> B N D: Linear(D, M), activation, Linear(M, D).

    With SwiGLU the first layer is Linear(D, 2M).
    """

    def __init__(self, config: MLPConfig) -> None:
        super().__init__()
        hidden = config.mlp_dim * (2 if config.activation == "swiglu" else 1)
        self.up = nn.Linear(config.width, hidden, bias=config.proj_bias)
        self.down = nn.Linear(config.mlp_dim, config.width, bias=config.proj_bias)
        self.activation, self.dropout = ACTIVATIONS[config.activation], config.dropout

    def forward(self, x: Tensor, hidden_seeds: Tensor | None = None, output_seeds: Tensor | None = None) -> Tensor:
        """`hidden_seeds` and `output_seeds`, B int64, seed the dropout after the activation and after the output."""
        rate = self.dropout if self.training else 0.0
        if not rate and (backend := self.backend(x)) != "plain":
            dtype, up, down = compute_dtype(x), self.up, self.down
            first = up.weight.to(dtype), up.bias.to(dtype)
            second = down.weight.to(dtype), down.bias.to(dtype)
            return fused_mlp(x.to(dtype), *first, *second, backend, self.activation is gelu_tanh)
        if self.activation is gelu_tanh and can_fuse_linear_gelu(self.up, x):
            x = linear_gelu_tanh(x, self.up.weight, self.up.bias)  # B N M
        else:
            x = self.activate(apply_linear(self.up, x))  # B N M
        x = drop.dropout(x, rate, hidden_seeds)
        return drop.dropout(apply_linear(self.down, x), rate, output_seeds)

    def backend(self, x: Tensor) -> Backend:
        """The kernel for both layers with a GELU between them."""
        operation: Operation = "mlp training" if torch.is_grad_enabled() else "mlp"
        if self.activation not in (F.gelu, gelu_tanh) or not can_fuse(x, self.up, self.down):
            return "plain"
        backend = backend_for(operation, x.device)
        return "plain" if backend == "quack" and self.activation is gelu_tanh else backend

    def adds_residual(self, x: Tensor) -> bool:
        """Whether `add` applies to this input of the block, and its kernels are chosen."""
        return can_add_linear(x, self.down, "residual") and self.backend(x) != "plain"

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """The MLP plus the residual, without gradients; the second layer adds it in its kernel."""
        dtype = compute_dtype(residual)
        weight, bias = self.up.weight.to(dtype), self.up.bias.to(dtype)
        rows, tanh = x.to(dtype).flatten(0, -2), self.activation is gelu_tanh
        return add_linear(
            linear_gelu(rows, weight, bias, self.backend(residual), tanh), self.down, residual, "residual"
        )

    def activate(self, x: Tensor) -> Tensor:
        """The activation, in a compiled graph on a GPU by a cheaper formula if that was measured to be faster."""
        is_gelu = self.activation in (F.gelu, gelu_tanh)
        if is_gelu and can_use_compiled_gelu(x) and backend_for("gelu", x.device) == "polynomial":
            return compiled_gelu(x, self.activation is gelu_tanh)
        return self.activation(x)


class Block(nn.Module):
    """Pre-norm transformer block, B N D -> B N D.

        x = x + drop_path(scale1 * Attention(norm1(x)))
        x = x + drop_path(scale2 * MLP(norm2(x)))

    scale1 and scale2 (LayerScale) exist only if config.layer_scale is set. `seeds`, 5 B (see `models.drop`),
    determine dropout and stochastic depth; None draws them from torch's generator.
    """

    def __init__(self, config: ViTConfig, drop_path: float = 0.0) -> None:
        super().__init__()
        self.norm1 = make_norm(config)
        self.attention = Attention(config)
        self.norm2 = make_norm(config)
        self.mlp = MLP(config)
        has_scale = config.layer_scale is not None
        self.scale1 = nn.Parameter(torch.empty(config.width)) if has_scale else None
        self.scale2 = nn.Parameter(torch.empty(config.width)) if has_scale else None
        self.drop_path = drop_path

    def forward(
        self,
        x: Tensor,
        qk_transform: QKTransform | None = None,
        weights_out: list[Tensor] | None = None,
        seeds: Tensor | None = None,
        num_outputs: int | None = None,
    ) -> Tensor:
        """With `num_outputs` only the first tokens of the result are computed: B num_outputs D."""
        attention_seeds, hidden_seeds, mlp_seeds, path1, path2 = (None,) * 5 if seeds is None else seeds.unbind()
        kernels = self._may_add_residuals()
        out = self.attention.out
        residual: Operation = "attention residual"
        if kernels and weights_out is None and num_outputs is None and can_add_linear(x, out, residual):
            x = add_linear(self.attention.mix(self.norm1(x), qk_transform), out, x, residual)
        else:
            y = self.attention(self.norm1(x), qk_transform, weights_out, attention_seeds, num_outputs)
            x = x if num_outputs is None else x[:, :num_outputs]
            x = x + self.scale_and_drop(y, self.scale1, path1)
        if kernels and self.mlp.adds_residual(x):
            return self.mlp.add(self.norm2(x), x)
        y = self.mlp(self.norm2(x), hidden_seeds, mlp_seeds)
        return x + self.scale_and_drop(y, self.scale2, path2)

    def _may_add_residuals(self) -> bool:
        """Whether kernels may add the residuals: inference, no LayerScale, no hooks."""
        if torch.is_grad_enabled() or self.training or self.scale1 is not None or self.scale2 is not None:
            return False
        parts = self.attention, self.mlp
        replaced = not (isinstance(parts[0], Attention) and isinstance(parts[1], MLP))
        return not replaced and not any(m._forward_hooks or m._forward_pre_hooks for m in parts)

    def scale_and_drop(self, x: Tensor, scale: Tensor | None, seeds: Tensor | None) -> Tensor:
        """Apply LayerScale and stochastic depth to the output of a residual branch, B N D."""
        x = x if scale is None else (x * scale).to(x.dtype)  # under autocast the product is float32
        return drop.drop_path(x, self.drop_path if self.training else 0.0, seeds)


def can_add_linear(x: Tensor, layer: nn.Module, operation: Operation) -> bool:
    """Whether `add_linear` applies to this input of the block, and its kernel is chosen."""
    return can_fuse(x, layer) and backend_for(operation, x.device) != "plain"


def add_linear(x: Tensor, layer: nn.Linear, residual: Tensor, operation: Operation) -> Tensor:
    """layer(x) + residual in one kernel, in the dtype in which layers compute and the residual's shape."""
    dtype, width = compute_dtype(residual), residual.shape[-1]
    rows, bias = x.reshape(-1, x.shape[-1]).to(dtype), layer.bias.to(dtype)
    added = residual.reshape(-1, width).to(dtype)
    out = linear_residual(rows, layer.weight.to(dtype), bias, added, backend_for(operation, x.device))
    return out.view(residual.shape)


class AttentionPool(nn.Module):
    """Attention pooling: cross-attention from one learned query (`probe`) to the tokens, B N D -> B P.

    Followed by a residual MLP (pool='map', big_vision's MAP head) or a LayerNorm (pool='coca'). P is D, except
    that CoCa's pool may have its own width and number of heads. CoCa's other queries, which only its text
    decoder uses, are not implemented.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        width, self.num_heads = config.pooled_width, config.pool_heads or config.num_heads
        self.probe = nn.Parameter(torch.empty(width))
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(config.width, 2 * width)
        self.out = nn.Linear(width, width)
        self.norm = make_norm(config, width)
        self.mlp = MLP(config.replace(dropout=0.0)) if config.pool == "map" else None

    def forward(self, x: Tensor, weights_out: list[Tensor] | None = None) -> Tensor:
        """B N D -> B P; `weights_out` receives the attention weights, B H 1 N."""
        q = self.q(self.probe).expand(x.shape[0], 1, -1)  # B 1 P
        q = q.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # B H 1 K
        k, v = self.kv(x).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # each B H N K
        x = self.out(attend(q, k, v, weights_out=weights_out).flatten(1))  # B P
        normed: Tensor = self.norm(x)
        return normed if self.mlp is None else x + self.mlp(normed)
