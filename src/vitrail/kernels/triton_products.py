# mypy: ignore-errors
# (a Triton kernel is not Python to a type checker)
"""Matrix products with an epilogue, in Triton, for GPUs with tensor memory access (Hopper and later).

    linear    a b^T + bias (+ residual)
    gelu      GELU(a b^T + bias), and on request the argument of GELU, which the backward pass needs
    dgelu     (a b) GELU'(z), its column sums, and on request GELU(z) again

Each program computes several output tiles, one after the other, so that the loads of the next tile overlap with the
epilogue of the last. With `row_scale` and `column_scale` the operands are 8-bit floats, scaled by rows of a and of b.
The plain versions are in `fused_mlp`; GELU is that of `gelu_polynomial`, in either form.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vitrail.kernels import gelu_polynomial

# a: M K; b: N K (or K N); results: M N

C0, C1, C2, C3, C4, C5, C6 = (tl.constexpr(c) for c in gelu_polynomial.COEFFICIENTS)
LIMIT, EXPONENT = tl.constexpr(gelu_polynomial.LIMIT), tl.constexpr(gelu_polynomial.EXPONENT)
SLOPE = tl.constexpr(gelu_polynomial.SLOPE)
TANH_LIMIT, TANH_SCALE = tl.constexpr(gelu_polynomial.TANH_LIMIT), tl.constexpr(gelu_polynomial.TANH_SCALE)
TANH_CUBE = tl.constexpr(gelu_polynomial.TANH_CUBE)
TANH_CURVE = tl.constexpr(3 * gelu_polynomial.TANH_SCALE * gelu_polynomial.TANH_CUBE)
TANH_EXPONENT = tl.constexpr(-gelu_polynomial.LOG2_E * gelu_polynomial.TANH_SCALE)
LARGEST_E4M3 = tl.constexpr(448.0)


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """How a product is cut into tiles."""

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    stages: int = 3
    """Tiles of a and b in shared memory at a time."""
    warps: int = 4
    group: int = 8
    """Rows of tiles that are computed together, for the second-level cache."""
    parts: int = 4
    """The epilogue works on this many parts of a tile, for less shared memory and fewer registers: 1, 2 or 4."""
    per_sm: int = 2
    """Programs per multiprocessor: with two, one multiplies while the other computes its epilogue."""
    flatten: bool = True
    """One loop over tiles and steps, so that the loads of the next tile start before the epilogue."""


CONFIGS = {
    "128x128, 2 per SM": TileConfig(),
    "128x128, 2 per SM, loops not joined": TileConfig(flatten=False),
    "128x128, 8 warps, 2 per SM": TileConfig(warps=8),
    "64x256, 2 per SM": TileConfig(block_m=64, block_n=256, stages=2),
    "128x256, 8 warps": TileConfig(block_n=256, warps=8, stages=4, per_sm=1),
    "128x256, 8 warps, loops not joined": TileConfig(block_n=256, warps=8, stages=4, per_sm=1, flatten=False),
    "256x128, 8 warps": TileConfig(block_m=256, warps=8, stages=4, per_sm=1),
}
"""Tilings worth a measurement. All fit into the shared memory of a Hopper GPU, with every epilogue."""
GELU = CONFIGS["128x128, 2 per SM"]
DGELU = CONFIGS["128x128, 2 per SM"]
RESIDUAL = CONFIGS["128x256, 8 warps"]
"""Tilings of the three epilogues: the GELU's long ones have to overlap with products."""
EIGHT_BIT_RESIDUAL = TileConfig(block_n=256, block_k=128, warps=8, per_sm=1)
EIGHT_BIT_GELU = TileConfig(block_n=256, block_k=128, warps=8, per_sm=1)


def launch(
    epilogue: str,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    b_is_transposed: bool = True,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    argument: Tensor | None = None,
    hidden: Tensor | None = None,
    sums: Tensor | None = None,
    row_scale: Tensor | None = None,
    column_scale: Tensor | None = None,
    out_scale: Tensor | None = None,
    tanh: bool = False,
    config: TileConfig = GELU,
) -> None:
    """Write `out`, M N, and `argument` (gelu), or `hidden` and `sums`, ceil(M / block_m) N (dgelu).

    `b` is N K if `b_is_transposed`, else K N. `out_scale`, one number: of an 8-bit `out`. `tanh`: that form of GELU.
    What is written must be contiguous.
    """
    (m, k), n = a.shape, out.shape[1]
    a, b, residual = _readable(a), _readable(b), None if residual is None else _readable(residual)
    tile = [config.block_m, config.block_n // config.parts]
    b_tile = [config.block_n, config.block_k] if b_is_transposed else [config.block_k, config.block_n]
    out_tiles = TensorDescriptor.from_tensor(out, tile)

    def tiles_of(x: Tensor | None) -> TensorDescriptor:
        return out_tiles if x is None else TensorDescriptor.from_tensor(x, tile)

    programs = _num_programs(a.device) * config.per_sm
    num_tiles = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
    with torch.cuda.device_of(a):  # Triton launches on the current device
        _product[(min(programs, num_tiles),)](
            TensorDescriptor.from_tensor(a, [config.block_m, config.block_k]),
            TensorDescriptor.from_tensor(b, b_tile),
            out_tiles, tiles_of(residual), tiles_of(argument), tiles_of(hidden),
            *(out if x is None else x for x in (bias, sums, row_scale, column_scale, out_scale)),
            m, n, k,
            EPILOGUE=epilogue, TANH=tanh, B_IS_TRANSPOSED=b_is_transposed,
            HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, HAS_ARGUMENT=argument is not None,
            HAS_HIDDEN=hidden is not None, HAS_SUMS=sums is not None,
            HAS_SCALES=row_scale is not None, HAS_OUT_SCALE=out_scale is not None,
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP=config.group,
            PARTS=config.parts, FLATTEN=config.flatten,
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip


def _readable(x: Tensor) -> Tensor:
    """x, n D, or a copy of it whose rows are contiguous and start at multiples of 16 bytes."""
    aligned = x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0
    return x if x.stride(1) == 1 and aligned else x.clone(memory_format=torch.contiguous_format)


def dgelu(
    grad: Tensor, weight: Tensor, argument: Tensor, tanh: bool = False, config: TileConfig = DGELU
) -> tuple[Tensor, Tensor, Tensor]:
    """(grad weight) GELU'(argument), GELU(argument), and the column sums of the first; weight: K N."""
    argument = _readable(argument)
    out, hidden = argument.new_empty(argument.shape), argument.new_empty(argument.shape)
    sums = argument.new_empty(triton.cdiv(len(argument), config.block_m), argument.shape[1], dtype=torch.float32)
    launch(
        "dgelu", grad, weight, out,
        b_is_transposed=False, argument=argument, hidden=hidden, sums=sums, tanh=tanh, config=config,
    )  # fmt: skip
    return out, hidden, sums.sum(0)


def is_interpreted() -> bool:
    """Whether Triton interprets its kernels on the CPU (TRITON_INTERPRET=1)."""
    return not isinstance(_product, triton.runtime.JITFunction)


def _num_programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


@triton.jit
def gelu_and_derivative(x, TANH: tl.constexpr):
    """Both at once: the compiler does not see that they have an exponential and a polynomial in common."""
    if TANH:
        t = tl.maximum(tl.minimum(x, TANH_LIMIT), -TANH_LIMIT)
        s = 1.0 / (1.0 + tl.exp2(t * TANH_EXPONENT * (t * t * TANH_CUBE + 1.0)))
        value = tl.maximum(x, -TANH_LIMIT, propagate_nan=tl.PropagateNan.ALL) * s
        return value, s + t * s * (1.0 - s) * (t * t * TANH_CURVE + TANH_SCALE)
    else:
        t = tl.minimum(tl.abs(x), LIMIT)
        power = tl.exp2(t * t * EXPONENT)
        polynomial = (((((t * C6 + C5) * t + C4) * t + C3) * t + C2) * t + C1) * t + C0
        value = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) - t * power * polynomial
        tail = power * (polynomial - t * SLOPE)
        return value, tl.where(x > 0, 1.0 - tail, tail)


@triton.jit
def _halves(x):
    """Columns of the left and the right half."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _position(tile, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Row and column of tiles: down GROUP rows, then to the next column."""
    rows, columns = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    per_group = GROUP * columns
    first = tile // per_group * GROUP
    height = tl.minimum(rows - first, GROUP)
    return first + tile % per_group % height, tile % per_group // height


@triton.jit
def _product(
    a_tiles, b_tiles, out_tiles, residual_tiles, argument_tiles, hidden_tiles,
    bias, sums, row_scale, column_scale, out_scale,
    m, n, k,
    EPILOGUE: tl.constexpr, TANH: tl.constexpr, B_IS_TRANSPOSED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_ARGUMENT: tl.constexpr, HAS_HIDDEN: tl.constexpr,
    HAS_SUMS: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_OUT_SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    FLATTEN: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = BLOCK_N // PARTS
    first, step = tl.program_id(0), tl.num_programs(0)
    num_tiles = tl.cdiv(m, BLOCK_M) * tl.cdiv(n, BLOCK_N)
    finished = first - step  # the epilogue counts its own tiles, so that the pipeline can run ahead of it
    for tile in tl.range(first, num_tiles, step, flatten=FLATTEN):
        row, column = _position(tile, m, n, BLOCK_M, BLOCK_N, GROUP)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for i in range(tl.cdiv(k, BLOCK_K)):
            a = a_tiles.load([row * BLOCK_M, i * BLOCK_K])
            if B_IS_TRANSPOSED:
                acc = tl.dot(a, b_tiles.load([column * BLOCK_N, i * BLOCK_K]).T, acc)
            else:
                acc = tl.dot(a, b_tiles.load([i * BLOCK_K, column * BLOCK_N]), acc)

        finished += step
        row, column = _position(finished, m, n, BLOCK_M, BLOCK_N, GROUP)
        if HAS_SCALES:
            rows = row * BLOCK_M + tl.arange(0, BLOCK_M)
            acc *= tl.load(row_scale + rows, mask=rows < m, other=0.0)[:, None]
        if PARTS == 1:
            parts = (acc,)
        elif PARTS == 2:
            parts = _halves(acc)
        else:
            left, right = _halves(acc)
            parts = _halves(left) + _halves(right)
        for part in tl.static_range(PARTS):
            x = parts[part]
            start = column * BLOCK_N + part * WIDTH
            columns = start + tl.arange(0, WIDTH)
            if HAS_SCALES:
                x *= tl.load(column_scale + columns, mask=columns < n, other=0.0)[None, :]
            if HAS_BIAS:
                x += tl.load(bias + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
            if EPILOGUE == "gelu":
                if HAS_ARGUMENT:
                    argument_tiles.store([row * BLOCK_M, start], x.to(argument_tiles.dtype))
                x = gelu_and_derivative(x, TANH)[0]
            if EPILOGUE == "dgelu":
                z = argument_tiles.load([row * BLOCK_M, start]).to(tl.float32)
                value, derivative = gelu_and_derivative(z, TANH)
                # Always the value; the term in x keeps the compiler from computing z's exponentials in two layouts.
                value = tl.minimum(value, tl.abs(x) + float("inf"))
                x *= derivative
                if HAS_HIDDEN:
                    hidden_tiles.store([row * BLOCK_M, start], value.to(hidden_tiles.dtype))
                if HAS_SUMS:
                    tl.store(sums + row * n + columns, tl.sum(x, 0), mask=columns < n)
            if HAS_RESIDUAL:
                x += residual_tiles.load([row * BLOCK_M, start]).to(tl.float32)
            if HAS_OUT_SCALE:
                x = tl.clamp(x / tl.load(out_scale), -LARGEST_E4M3, LARGEST_E4M3)
            out_tiles.store([row * BLOCK_M, start], x.to(out_tiles.dtype))
