"""Attention of few tokens, forward and backward, in a handful of batched products, on a CPU.

PyTorch's fused attention walks over blocks that a short sequence does not fill. Here queries, keys
and values are laid out once, and their gradients are written where the projection's backward wants
them. For 32 images of 50 tokens with 4 heads of 16, forward and backward on one core: 2.0 ms
fused, 1.85 written out for autograd, 1.6 like this; for 17 tokens 0.59, 0.56 and 0.48. From about
150 tokens on the fused one wins (`python benchmarks/kernels.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from vitrail.kernels.linear_gelu import inside_transform

# B images, N tokens, H heads, K numbers each, D = H K

MAX_TOKENS = 128
"""Beyond this the fused attention is as fast, and keeps less."""


def packed_attention_reference(qkv: Tensor, heads: int) -> Tensor:
    """softmax(q k' / sqrt(K)) v of B N 3D, heads side by side in each third -> B N D."""
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)  # each B H N K
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def packed_attention(qkv: Tensor, heads: int) -> Tensor:
    """The same, for what `can_pack_attention` lets through."""
    out: Tensor = _Packed.apply(qkv, heads)  # type: ignore[no-untyped-call]
    return out


def can_pack_attention(qkv: Tensor) -> bool:
    """Few tokens in single or double precision on a CPU, gradients wanted, nobody watching, no kernel asked for."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or type(qkv) is not Tensor:
        return False
    if not (torch.is_grad_enabled() and qkv.requires_grad) or torch.is_autocast_enabled("cpu"):
        return False
    plain = qkv.device.type == "cpu" and qkv.dtype in (torch.float32, torch.float64)
    # `sdpa_kernel` switches this off, for a CPU too, when it asks for another: derivatives of derivatives need that.
    free = torch.backends.cuda.flash_sdp_enabled()
    return plain and free and 0 < qkv.shape[1] <= MAX_TOKENS and qkv.numel() > 0 and not inside_transform()


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int) -> Tensor:
        images, tokens, width = qkv.shape
        size = width // 3 // heads
        laid = qkv.view(images, tokens, 3, heads, size).permute(2, 0, 3, 1, 4).reshape(3, -1, tokens, size)
        q, k, v = laid  # each BH N K
        logits = torch.baddbmm(q.new_empty(1, 1, 1), q, k.mT, beta=0, alpha=size**-0.5)
        weights = logits.softmax(-1)  # BH N N
        ctx.save_for_backward(laid, weights)
        ctx.heads = heads
        out = torch.bmm(weights, v).view(images, heads, tokens, size)
        return out.transpose(1, 2).reshape(images, tokens, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        laid, weights = ctx.saved_tensors
        (q, k, v), into = laid, torch.empty_like(laid)
        images, tokens, width = grad.shape
        grad = grad.reshape(images, tokens, ctx.heads, -1).transpose(1, 2).reshape(v.shape)  # BH N K
        torch.bmm(weights.mT, grad, out=into[2])
        steep = torch._softmax_backward_data(torch.bmm(grad, v.mT), weights, -1, weights.dtype)
        steep.mul_(q.shape[-1] ** -0.5)
        torch.bmm(steep, k, out=into[0])
        torch.bmm(steep.mT, q, out=into[1])
        into = into.view(3, images, ctx.heads, tokens, -1)
        return into.permute(1, 3, 0, 2, 4).reshape(images, tokens, 3 * width), None
