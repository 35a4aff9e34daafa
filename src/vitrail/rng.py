"""All chance in training, as a pure function of (seed, step, sample, stream).

A generator has a state, and states drift apart: with another number of workers or devices, or after
an interruption. Here nothing has a state. A *key* is 64 bits made from the seed, the step and the
sample's place in the global batch; a *stream* numbers what is drawn for (a crop, a layer's
dropout); draw i of a stream is splitmix64's i-th output. So any process can compute any sample's
draws, in any order, and gets the same bits on a CPU, a GPU or in NumPy.

    derive_seed        integers -> one key, in Python
    sample_seeds       seed, step, slots -> a key per sample, NumPy or torch alike
    uniform       seeds, stream -> B n numbers in [0, 1), multiples of 2**-24
    normal        seeds, stream -> B n numbers of a bell curve, from 2**16 of its quantiles
    shuffled      places in a permutation of any size, without making it

The twins for tensors (`uniform`) and for arrays (`uniform_np`) agree to the bit. So that `normal`
does too, it looks its values up: logarithms and cosines differ in the last bit from one machine to
the next, and on a CPU even with a number's place in a tensor.
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
MAX_SORTED_SIZE = 1024  # up to here a permutation is made whole


def stream_id(name: str) -> int:
    """The number of a named stream: `CROP = stream("crop")`. Layers add their index to the key instead."""
    return zlib.crc32(name.encode())


def derive_seed(*parts: int) -> int:
    """Integers in, 64 well-mixed bits out: `derive_seed(seed, step)`."""
    key = 0
    for part in parts:
        key = _mix_int((key + GOLDEN + _mix_int(part & MASK)) & MASK)
    return key


def sample_seeds(seed: int, step: int, slots: npt.ArrayLike) -> Seeds:
    """One key for each place in the global batch of a step."""
    base = np.uint64(derive_seed(seed, step))
    with np.errstate(over="ignore"):
        return _mix_np(base + np.uint64(GOLDEN) + _mix_np(np.asarray(slots, dtype=np.uint64)))


def seeds_to_tensor(seeds: Seeds, device: torch.device | str = "cpu") -> Tensor:
    """The same bits as int64, which is what torch multiplies."""
    return torch.from_numpy(seeds.view(np.int64)).to(device, non_blocking=True)


def fold_in(seeds: Tensor, layer: int) -> Tensor:
    """Keys of the same samples for another part of a network."""
    return _mix(seeds + _signed(derive_seed(layer)))


def bits_np(seeds: Seeds, stream: int, count: int) -> Seeds:
    """B -> B count, 64 bits each."""
    with np.errstate(over="ignore"):
        base = _mix_np(seeds ^ np.uint64(_mix_int(stream)))
        places = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        return _mix_np(base[:, None] + places)


def uniform_np(seeds: Seeds, stream: int, count: int) -> npt.NDArray[np.float32]:
    """B -> B count in [0, 1), multiples of 2**-24."""
    return (bits_np(seeds, stream, count) >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


def normal_np(seeds: Seeds, stream: int, count: int) -> npt.NDArray[np.float32]:
    """B -> B count with mean 0 and deviation 1, none beyond 4.33: four from each 64 bits."""
    quarters = bits_np(seeds, stream, -(-count // 4)).view(np.int16)[:, :count]
    return normal_quantiles(torch.device("cpu")).numpy()[quarters.astype(np.int32) + 2**15]


def bits(seeds: Tensor, stream: int, count: int) -> Tensor:
    """B -> B count, 64 bits each, as int64."""
    # base + place * GOLDEN, with GOLDEN taken out of both: a compiler may keep places in 32 bits, which
    # a product with so large a constant would overflow.
    base = _mix(seeds ^ _signed(_mix_int(stream))) * _signed(GOLDEN_INVERSE)
    places = torch.arange(1, count + 1, device=seeds.device)
    return _mix((base[:, None] + places) * _signed(GOLDEN))


def uniform(seeds: Tensor, stream: int, count: int) -> Tensor:
    """B -> B count in [0, 1), multiples of 2**-24, float32."""
    return _shift(bits(seeds, stream, count), 40).to(torch.float32) * 2**-24


def normal(seeds: Tensor, stream: int, count: int, table: Tensor | None = None) -> Tensor:
    """B -> B count with mean 0 and deviation 1, none beyond 4.33: four from each 64 bits.

    `table` is `quantiles`, for a caller whom torch.compile forbids to fetch it here.
    """
    quarters = bits(seeds, stream, -(-count // 4)).view(torch.int16)[:, :count]
    return (normal_quantiles(seeds.device) if table is None else table)[quarters.to(torch.int32) + 2**15]


def permute_indices(indices: npt.ArrayLike, size: int, seed: int) -> npt.NDArray[np.int64]:
    """Where a random permutation of `size` things sends these places; a bijection on range(size).

    A Feistel network permutes the next power of four; places that land outside are sent on until
    they land inside. Costs the same for the first place and the billionth, and no memory. Of few
    things it would favor some permutations over others, so these are sorted by random numbers.
    """
    at = np.asarray(indices, dtype=np.uint64)
    if size < 1 or (at.size and int(at.max()) >= size):
        raise IndexError(f"a place is outside the permutation of {size}")
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
    """Of the normal distribution, at the middles of 2**16 equal shares, smallest first."""
    with torch.inference_mode(False):
        middles = (torch.arange(2**16, dtype=torch.float64) + 0.5) / 2**16
        return torch.special.ndtri(middles).to(torch.float32).to(device, non_blocking=True)


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
    x = (x ^ _shift(x, 30)) * _signed(MIX1)
    x = (x ^ _shift(x, 27)) * _signed(MIX2)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, by: int) -> Tensor:
    """To the right, filling with zeros: torch's own shift repeats the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(x: int) -> int:
    """The same 64 bits as a signed integer."""
    return x - (1 << 64) if x >= 1 << 63 else x
