"""Attention inside windows with a bias, as one Triton kernel on a GPU.

A window of up to 128 tokens is one tile: logits, bias and softmax stay in registers, so that neither logits nor copies
of queries, keys and values are written to memory. A program computes one head of many windows that have the same bias,
which it reads once. The backward pass computes the weights again, and sums the gradient of the bias in registers.

It has not been measured on a GPU yet, and no network uses it: `python benchmarks/window_attention.py` compares it with
scaled dot-product attention and flex attention. Needs the package triton, which torch brings along on Linux with CUDA.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

# B images; nW windows of N tokens; H heads of K channels; G groups of windows, each with a bias of its own: 1 or nW

MAX_TOKENS = 128
WINDOWS_PER_PROGRAM = 16
NORM_EPS = 1e-12
"""Lower bound of the norm by which version 2 divides queries and keys, as in F.normalize."""


def window_attention_reference(qkv: Tensor, bias: Tensor, scale: Tensor, cosine: bool = False) -> Tensor:
    """softmax(scale q k^T + bias) v in each window: qkv, B nW N 3 H K, bias, G H N N, scale, H -> B nW N H K.

    `cosine`: queries and keys are divided by their norms (Swin Transformer V2).
    """
    q, k, v = (x.transpose(2, 3) for x in qkv.unbind(3))  # each B nW H N K
    if cosine:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    logits = (q * scale.to(q.dtype)[:, None, None]) @ k.transpose(-2, -1)
    return ((logits + bias).softmax(-1).to(v.dtype) @ v).transpose(2, 3)


def window_attention(
    qkv: Tensor,
    bias: Tensor,
    scale: Tensor,
    cosine: bool = False,
    windows_per_program: int = WINDOWS_PER_PROGRAM,
) -> Tensor:
    """`window_attention_reference` by the kernel. Gradients: of qkv, of bias, and if cosine of scale."""
    tokens = qkv.shape[2]
    if tokens > MAX_TOKENS:
        raise ValueError(f"got windows of {tokens} tokens; the kernel has at most {MAX_TOKENS}.")
    out: Tensor = torch.ops.vitrail.window_attention(qkv, bias, scale.float(), cosine, windows_per_program)
    return out


@triton.jit
def _load_tile(base, rows, columns, row_stride, tokens, channels):
    """A tile of the tokens of one window, N K in float32 and zero outside."""
    inside = (rows[:, None] < tokens) & (columns[None, :] < channels)
    return tl.load(base + rows[:, None] * row_stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _store_tile(base, tile, rows, columns, row_stride, tokens, channels):
    inside = (rows[:, None] < tokens) & (columns[None, :] < channels)
    tl.store(base + rows[:, None] * row_stride + columns[None, :], tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _normalized(x, eps: tl.constexpr):
    """x / |x| in float32, and 1 / |x|."""
    x = x.to(tl.float32)
    inverse = 1.0 / tl.maximum(tl.sqrt(tl.sum(x * x, 1)), eps)
    return x * inverse[:, None], inverse


@triton.jit
def _forward_kernel(
    qkv, bias, scale, out, groups, windows, tokens, channels, heads,
    CHUNK: tl.constexpr, COSINE: tl.constexpr, EPS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    head, group, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows, columns = tl.arange(0, N), tl.arange(0, K)
    dtype: tl.constexpr = qkv.dtype.element_ty
    inside = (rows[:, None] < tokens) & (rows[None, :] < tokens)
    table = bias + (group * heads + head) * tokens * tokens
    added = tl.load(table + rows[:, None] * tokens + rows[None, :], mask=inside, other=0.0).to(tl.float32)
    added = tl.where(rows[None, :] < tokens, added, float("-inf"))
    factor = tl.load(scale + head)
    width = heads * channels
    for j in range(CHUNK):
        i = part * CHUNK + j
        present = tl.where(i < windows, tokens, 0)  # nothing is read or written beyond the last window
        window = (i * groups + group).to(tl.int64)
        base = qkv + window * tokens * 3 * width + head * channels
        q = _load_tile(base, rows, columns, 3 * width, present, channels)
        k = _load_tile(base + width, rows, columns, 3 * width, present, channels)
        v = _load_tile(base + 2 * width, rows, columns, 3 * width, present, channels)
        if COSINE:
            q = _normalized(q, EPS)[0].to(dtype)
            k = _normalized(k, EPS)[0].to(dtype)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * factor + added
        weights = tl.exp(logits - tl.max(logits, 1)[:, None])
        weights = weights / tl.sum(weights, 1)[:, None]
        x = tl.dot(weights.to(dtype), v, input_precision="ieee")
        _store_tile(out + window * tokens * width + head * channels, x, rows, columns, width, present, channels)


@triton.jit
def _backward_kernel(
    qkv, bias, scale, grad, grad_qkv, grad_bias, grad_scale, groups, windows, tokens, channels, heads,
    CHUNK: tl.constexpr, COSINE: tl.constexpr, EPS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    head, group, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows, columns = tl.arange(0, N), tl.arange(0, K)
    dtype: tl.constexpr = qkv.dtype.element_ty
    inside = (rows[:, None] < tokens) & (rows[None, :] < tokens)
    table = bias + (group * heads + head) * tokens * tokens
    added = tl.load(table + rows[:, None] * tokens + rows[None, :], mask=inside, other=0.0).to(tl.float32)
    added = tl.where(rows[None, :] < tokens, added, float("-inf"))
    factor = tl.load(scale + head)
    width = heads * channels
    sum_bias = tl.zeros((N, N), tl.float32)
    sum_scale = tl.zeros((N,), tl.float32)
    for j in range(CHUNK):
        i = part * CHUNK + j
        present = tl.where(i < windows, tokens, 0)  # nothing is read or written beyond the last window
        window = (i * groups + group).to(tl.int64)
        base = qkv + window * tokens * 3 * width + head * channels
        q = _load_tile(base, rows, columns, 3 * width, present, channels)
        k = _load_tile(base + width, rows, columns, 3 * width, present, channels)
        v = _load_tile(base + 2 * width, rows, columns, 3 * width, present, channels)
        of_out = _load_tile(
            grad + window * tokens * width + head * channels, rows, columns, width, present, channels
        )  # N K
        if COSINE:
            q_unit, q_inverse = _normalized(q, EPS)
            k_unit, k_inverse = _normalized(k, EPS)
            q, k = q_unit.to(dtype), k_unit.to(dtype)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        logits = products * factor + added
        weights = tl.exp(logits - tl.max(logits, 1)[:, None])
        weights = weights / tl.sum(weights, 1)[:, None]
        of_v = tl.dot(tl.trans(weights.to(dtype)), of_out, input_precision="ieee")
        of_weights = tl.dot(of_out, tl.trans(v), input_precision="ieee")
        of_logits = weights * (of_weights - tl.sum(weights * of_weights, 1)[:, None])
        sum_bias += of_logits
        low = of_logits.to(dtype)
        of_q = tl.dot(low, k, input_precision="ieee") * factor
        of_k = tl.dot(tl.trans(low), q, input_precision="ieee") * factor
        if COSINE:
            sum_scale += tl.sum(of_logits * products, 1)
            of_q = (of_q - q_unit * tl.sum(q_unit * of_q, 1)[:, None]) * q_inverse[:, None]
            of_k = (of_k - k_unit * tl.sum(k_unit * of_k, 1)[:, None]) * k_inverse[:, None]
        to = grad_qkv + window * tokens * 3 * width + head * channels
        _store_tile(to, of_q, rows, columns, 3 * width, present, channels)
        _store_tile(to + width, of_k, rows, columns, 3 * width, present, channels)
        _store_tile(to + 2 * width, of_v, rows, columns, 3 * width, present, channels)
    place = (part * groups + group) * heads + head
    table = grad_bias + place.to(tl.int64) * tokens * tokens
    tl.store(table + rows[:, None] * tokens + rows[None, :], sum_bias, mask=inside)
    if COSINE:
        tl.store(grad_scale + place, tl.sum(sum_scale, 0))


def _launch(qkv: Tensor, bias: Tensor, windows_per_program: int) -> tuple[tuple[int, int, int], tuple[int, ...], Any]:
    """Grid (heads, groups, parts), the sizes that both kernels take, and their constants."""
    images, num_windows, tokens, _, heads, channels = qkv.shape
    groups = len(bias)
    windows = images * num_windows // groups
    parts = -(-windows // windows_per_program)
    constants = {
        "CHUNK": windows_per_program,
        "EPS": NORM_EPS,
        "N": max(triton.next_power_of_2(tokens), 16),
        "K": max(triton.next_power_of_2(channels), 16),
        "num_warps": 4 if tokens <= 64 else 8,
    }
    return (heads, groups, parts), (groups, windows, tokens, channels, heads), constants


@torch.library.custom_op("vitrail::window_attention", mutates_args=())
def _window_attention(qkv: Tensor, bias: Tensor, scale: Tensor, cosine: bool, windows_per_program: int) -> Tensor:
    qkv, bias = qkv.contiguous(), bias.contiguous()
    out = qkv.new_empty(*qkv.shape[:3], *qkv.shape[4:])
    grid, sizes, constants = _launch(qkv, bias, windows_per_program)
    with torch.cuda.device_of(qkv):  # Triton launches on the current device
        _forward_kernel[grid](qkv, bias, scale, out, *sizes, COSINE=cosine, **constants)
    return out


@_window_attention.register_fake
def _(qkv: Tensor, bias: Tensor, scale: Tensor, cosine: bool, windows_per_program: int) -> Tensor:
    return qkv.new_empty(*qkv.shape[:3], *qkv.shape[4:])


@torch.library.custom_op("vitrail::window_attention_backward", mutates_args=())
def _window_attention_backward(
    qkv: Tensor, bias: Tensor, scale: Tensor, grad: Tensor, cosine: bool, windows_per_program: int
) -> tuple[Tensor, Tensor, Tensor]:
    qkv, bias, grad = qkv.contiguous(), bias.contiguous(), grad.contiguous()
    grid, sizes, constants = _launch(qkv, bias, windows_per_program)
    heads, groups, parts = grid
    tokens, grad_qkv = qkv.shape[2], torch.empty_like(qkv)
    # Sums of each program, which are added up in a fixed order: unlike with atomics, the result is always the same.
    grad_bias = bias.new_empty(parts, groups, heads, tokens, tokens, dtype=torch.float32)
    grad_scale = scale.new_zeros(parts, groups, heads)
    arguments = qkv, bias, scale, grad, grad_qkv, grad_bias, grad_scale, *sizes
    with torch.cuda.device_of(qkv):
        _backward_kernel[grid](*arguments, COSINE=cosine, **constants)
    return grad_qkv, grad_bias.sum(0).to(bias.dtype), grad_scale.sum((0, 1))


@_window_attention_backward.register_fake
def _(
    qkv: Tensor, bias: Tensor, scale: Tensor, grad: Tensor, cosine: bool, windows_per_program: int
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(qkv), torch.empty_like(bias), torch.empty_like(scale)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.options = inputs[3:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.vitrail.window_attention_backward(*ctx.saved_tensors, grad, *ctx.options)
    return (*grads[:2], grads[2] if ctx.options[0] else None, None, None)


_window_attention.register_autograd(_backward, setup_context=_setup_context)
