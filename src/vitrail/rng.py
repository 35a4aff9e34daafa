"""Counter-based random numbers: every draw is a function of (seed, step, sample, stream).

A stateful generator gives other numbers with another number of workers or devices, or after an
interruption. Here there is no state. A sample's *seed* is 64 bits derived from the run's seed, the
step and the sample's slot in the global batch; a *stream* identifies what is drawn (a crop, a
layer's dropout); draw i of a stream is the i-th output of splitmix64. Any process can compute any
sample's draws, in any order, with the same bits on a CPU, on a GPU or in NumPy.

    derive_seed       integers -> one 64-bit seed, in Python
    sample_seeds      seed, step, slots -> a seed per sample
    fold_in           sample seeds, integer -> new sample seeds, as in jax.random
    uniform           seeds, stream -> B n numbers in [0, 1), multiples of 2**-24
    normal            seeds, stream -> B n normally distributed numbers, from a table of 2**16 quantiles
    permute_indices   indices in a random permutation of any size, without materializing it

The functions for tensors (`uniform`) and for arrays (`uniform_np`) agree to the bit. `normal` uses a
table for this reason: logarithms and cosines differ in the last bit between machines, and on a CPU
even with the position of a number in a tensor.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Seeds = npt.NDArray[np.uint64]

GOLDEN = 0x9E3779B97F4A7C15
GOLDEN_INVERSE = pow(GOLDEN, -1, 1 << 64)
MIX1, MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK = (1 << 64) - 1
MAX_SORTED_SIZE = 1024  # smaller permutations are computed by sorting random numbers


def stream_id(name: str) -> int:
    """The number of a named stream: `CROP = stream_id("crop")`. For layers, use `fold_in`."""
    return zlib.crc32(name.encode())


def derive_seed(*parts: int) -> int:
    """Mix integers into one 64-bit seed: `derive_seed(seed, step)`."""
    key = 0
    for part in parts:
        key = _mix_int((key + GOLDEN + _mix_int(part & MASK)) & MASK)
    return key


def sample_seeds(seed: int, step: int, slots: npt.ArrayLike) -> Seeds:
    """One seed for each slot in the global batch of a step, B uint64."""
    base = np.uint64(derive_seed(seed, step))
    with np.errstate(over="ignore"):
        return _mix_np(base + np.uint64(GOLDEN) + _mix_np(np.asarray(slots, dtype=np.uint64)))


def seeds_to_tensor(seeds: Seeds, device: torch.device | str = "cpu") -> Tensor:
    """The same bits as an int64 tensor: torch has no uint64 arithmetic."""
    return torch.from_numpy(seeds.view(np.int64)).to(device, non_blocking=True)


def fold_in(seeds: Tensor, layer: int) -> Tensor:
    """New seeds of the same samples for another layer or purpose."""
    return _mix(seeds + _to_int64(derive_seed(layer)))


def bits_np(seeds: Seeds, stream: int, count: int) -> Seeds:
    """B seeds -> B count, 64 random bits each."""
    with np.errstate(over="ignore"):
        base = _mix_np(seeds ^ np.uint64(_mix_int(stream)))
        counters = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        return _mix_np(base[:, None] + counters)


def uniform_np(seeds: Seeds, stream: int, count: int) -> npt.NDArray[np.float32]:
    """B seeds -> B count float32 in [0, 1), multiples of 2**-24."""
    return (bits_np(seeds, stream, count) >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


def normal_np(seeds: Seeds, stream: int, count: int) -> npt.NDArray[np.float32]:
    """B seeds -> B count float32, standard normal, none beyond 4.33: four from each 64 bits."""
    quarters = bits_np(seeds, stream, -(-count // 4)).view(np.int16)[:, :count]
    return normal_quantiles(torch.device("cpu")).numpy()[quarters.astype(np.int32) + 2**15]


def bits(seeds: Tensor, stream: int, count: int) -> Tensor:
    """B seeds -> B count, 64 random bits each, as int64."""
    # base + counter * GOLDEN, with GOLDEN factored out: a compiler may keep the counters in 32 bits, which
    # a product with so large a constant would overflow.
    base = _mix(seeds ^ _to_int64(_mix_int(stream))) * _to_int64(GOLDEN_INVERSE)
    counters = torch.arange(1, count + 1, device=seeds.device)
    return _mix((base[:, None] + counters) * _to_int64(GOLDEN))


def uniform(seeds: Tensor, stream: int, count: int) -> Tensor:
    """B seeds -> B count float32 in [0, 1), multiples of 2**-24."""
    return _logical_right_shift(bits(seeds, stream, count), 40).to(torch.float32) * 2**-24


def normal(seeds: Tensor, stream: int, count: int, table: Tensor | None = None) -> Tensor:
    """B seeds -> B count float32, standard normal, none beyond 4.33: four from each 64 bits.

    `table` is `normal_quantiles(device)`, for compiled callers that must pass it in.
    """
    quarters = bits(seeds, stream, -(-count // 4)).view(torch.int16)[:, :count]
    return (normal_quantiles(seeds.device) if table is None else table)[quarters.to(torch.int32) + 2**15]


def permute_indices(indices: npt.ArrayLike, size: int, seed: int) -> npt.NDArray[np.int64]:
    """Map indices through a random permutation of range(size).

    A Feistel network permutes the next power of four; indices outside the range are mapped again until
    they are inside (cycle walking). It needs no memory, and the cost does not depend on the index. For
    small sizes it would favor some permutations, so these are computed by sorting random numbers.
    """
    at = np.asarray(indices, dtype=np.uint64)
    if size < 1 or (at.size and int(at.max()) >= size):
        raise IndexError(f"an index is outside the permutation of {size}")
    if size <= MAX_SORTED_SIZE:
        order = np.argsort(bits_np(np.array([seed & MASK], np.uint64), stream_id("shuffled"), size)[0], kind="stable")
        return order.astype(np.int64, copy=False)[at.astype(np.int64)]
    half = max((int(size - 1).bit_length() + 1) // 2, 1)
    rounds = [np.uint64(derive_seed(seed, r)) for r in range(6)]
    at = _feistel(at, half, rounds)
    while (outside := at >= size).any():
        at[outside] = _feistel(at[outside], half, rounds)
    return at.astype(np.int64)


@lru_cache(maxsize=16)
def normal_quantiles(device: torch.device) -> Tensor:
    """Quantiles of the standard normal at the centers of 2**16 equal intervals, ascending."""
    with torch.inference_mode(False):
        centers = (torch.arange(2**16, dtype=torch.float64) + 0.5) / 2**16
        return torch.special.ndtri(centers).to(torch.float32).to(device, non_blocking=True)


def _feistel(at: Seeds, half: int, rounds: list[np.uint64]) -> Seeds:
    width, low = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = at >> width, at & low
    with np.errstate(over="ignore"):
        for key in rounds:
            left, right = right, left ^ (_mix_np(right ^ key) & low)
    return (left << width) | right


def _mix_int(x: int) -> int:
    x = ((x ^ (x >> 30)) * MIX1) & MASK
    x = ((x ^ (x >> 27)) * MIX2) & MASK
    return x ^ (x >> 31)


def _mix_np(x: Any) -> Any:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX2)
    return x ^ (x >> np.uint64(31))


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _logical_right_shift(x, 30)) * _to_int64(MIX1)
    x = (x ^ _logical_right_shift(x, 27)) * _to_int64(MIX2)
    return x ^ _logical_right_shift(x, 31)


def _logical_right_shift(x: Tensor, by: int) -> Tensor:
    """Logical right shift: torch's operator is arithmetic and repeats the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _to_int64(x: int) -> int:
    """The same 64 bits as a signed integer."""
    return x - (1 << 64) if x >= 1 << 63 else x
