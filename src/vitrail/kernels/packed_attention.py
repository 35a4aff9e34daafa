"""Attention for short sequences on a CPU, forward and backward, in a few batched matrix products.

PyTorch's fused attention works in blocks that a short sequence does not fill. Here queries, keys and
values are laid out once, and their gradients are written where the projection's backward needs them.
For 32 images of 50 tokens with 4 heads of 16, forward and backward on one core: 2.0 ms fused, 1.85
explicit with autograd, 1.6 here; for 17 tokens 0.59, 0.56 and 0.48. From about 150 tokens the fused
kernel is faster (`python benchmarks/kernels.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from vitrail.runtime import private_torch

# B images, N tokens, H heads, K head dimension, D = H K

MAX_TOKENS = 128
"""Beyond this the fused attention is as fast, and stores less."""


def packed_attention_reference(qkv: Tensor, num_heads: int) -> Tensor:
    """softmax(q k^T / sqrt(K)) v: packed q, k, v, B N 3D -> B N D."""
    q, k, v = qkv.unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)  # each B H N K
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def packed_attention(qkv: Tensor, num_heads: int) -> Tensor:
    """The same; requires `can_pack_attention`."""
    out: Tensor = _PackedAttention.apply(qkv, num_heads)  # type: ignore[no-untyped-call]
    return out


def can_pack_attention(qkv: Tensor) -> bool:
    """Whether `packed_attention` applies: few tokens, float32 or float64 on a CPU, gradients, no transform or mode."""
    if type(qkv) is not Tensor or not private_torch.is_plain_eager():
        return False
    if not (torch.is_grad_enabled() and qkv.requires_grad) or torch.is_autocast_enabled("cpu"):
        return False
    plain = qkv.device.type == "cpu" and qkv.dtype in (torch.float32, torch.float64)
    # `sdpa_kernel` disables flash, on a CPU too, to select another kernel: double backward needs that.
    flash = torch.backends.cuda.flash_sdp_enabled()
    return plain and flash and 0 < qkv.shape[1] <= MAX_TOKENS and qkv.numel() > 0


MAX_GPU_TOKENS = 256
"""Of the kernel for GPUs, which holds the scores of a query with all keys in registers."""


def short_attention(qkv: Tensor, num_heads: int) -> Tensor:
    """`packed_attention_reference` by a kernel for GPUs, without gradients; requires `can_use_short_attention`."""
    out: Tensor = torch.ops.vitrail.short_attention(qkv, num_heads)
    return out


def can_use_short_attention(qkv: Tensor, num_heads: int) -> bool:
    """Whether `short_attention` applies: inference, few tokens, 16 bits, heads of 32, 64 or 128 channels."""
    if torch.is_grad_enabled() or not isinstance(qkv, Tensor):  # torch.fx passes what is not a tensor
        return False
    sizes = qkv.shape[1] <= MAX_GPU_TOKENS and qkv.shape[2] // 3 // num_heads in (32, 64, 128)
    return sizes and qkv.dtype in (torch.bfloat16, torch.float16)


@torch.library.custom_op("vitrail::short_attention", mutates_args=())
def _short_attention(qkv: Tensor, num_heads: int) -> Tensor:
    from vitrail.kernels.triton_attention import packed_attention

    return packed_attention(qkv, num_heads)


@_short_attention.register_fake
def _(qkv: Tensor, num_heads: int) -> Tensor:
    return qkv.new_empty(*qkv.shape[:2], qkv.shape[2] // 3)


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, num_heads: int) -> Tensor:
        images, tokens, width = qkv.shape
        head_dim = width // 3 // num_heads
        packed = (
            qkv.view(images, tokens, 3, num_heads, head_dim).permute(2, 0, 3, 1, 4).reshape(3, -1, tokens, head_dim)
        )
        q, k, v = packed  # each BH N K
        logits = torch.baddbmm(q.new_empty(1, 1, 1), q, k.mT, beta=0, alpha=head_dim**-0.5)
        weights = logits.softmax(-1)  # BH N N
        ctx.save_for_backward(packed, weights)
        ctx.num_heads = num_heads
        out = torch.bmm(weights, v).view(images, num_heads, tokens, head_dim)
        return out.transpose(1, 2).reshape(images, tokens, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        packed, weights = ctx.saved_tensors
        (q, k, v), grad_packed = packed, torch.empty_like(packed)
        images, tokens, width = grad.shape
        grad = grad.reshape(images, tokens, ctx.num_heads, -1).transpose(1, 2).reshape(v.shape)  # BH N K
        torch.bmm(weights.mT, grad, out=grad_packed[2])
        grad_logits = private_torch.softmax_backward(torch.bmm(grad, v.mT), weights)
        grad_logits.mul_(q.shape[-1] ** -0.5)
        torch.bmm(grad_logits, k, out=grad_packed[0])
        torch.bmm(grad_logits.mT, q, out=grad_packed[1])
        grad_packed = grad_packed.view(3, images, ctx.num_heads, tokens, -1)
        return grad_packed.permute(1, 3, 0, 2, 4).reshape(images, tokens, 3 * width), None
