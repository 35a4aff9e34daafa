"""Dropout and stochastic depth whose draws belong to a sample, whatever batch it is in.

A sample's key (`vitrail.chance`) and the layer decide what is dropped; its neighbors, its rank and
its micro-batch do not, and gradient checkpointing draws the same again without any saved state. The
one exception is the dropout of attention weights, which the fused attention draws by itself.

    seeds      keys -> 64 bits for each sample and each place where something may be dropped
    dropout    16 bits an element, four from each draw, made by mixing the seed plus 0, 1, 2, ...
    skip       the seed itself decides whether a sample goes without a branch

So a rate of dropout is rounded to a multiple of 1/65536; what is kept is scaled by the rounded rate,
which leaves the mean as it was.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx

from vitrail import chance
from vitrail.errors import ModelError
from vitrail.kernels.settle import settled

# B samples, L layers

PLACES = ("out", "hidden", "down", "skip attention", "skip MLP")
"""Where a block may drop: the attention's output, inside the MLP and after it, and either branch."""
BLOCKS, EMBED = chance.stream("dropout in blocks"), chance.stream("dropout of the embedding")
LEVELS = 1 << 16


def fresh_keys(x: Tensor) -> Tensor:
    """A key for each sample from torch's own generator: `torch.manual_seed` decides them."""
    return torch.randint(1 << 62, (x.shape[0],), device=x.device)


@fx.wrap
def keys_of(x: Tensor, keys: Tensor | None) -> Tensor:
    """The keys given, checked, or fresh ones."""
    if keys is None:
        return fresh_keys(x)
    check_keys(keys, x)
    return keys


def check_keys(keys: Tensor, x: Tensor) -> None:
    if keys.shape != x.shape[:1] or keys.dtype != torch.int64:
        raise ModelError(f"wanted one int64 key for each of {x.shape[0]} images, got {keys.dtype} {tuple(keys.shape)}.")


@fx.wrap
def embedding_seed(keys: Tensor) -> Tensor:
    """B -> B, for what enters the first block."""
    return settled(chance.with_layer(keys, EMBED))


@fx.wrap
def seeds(keys: Tensor, layers: int) -> Tensor:
    """B -> L 5 B: for each layer and each of its places 64 bits a sample, as int64."""
    keys = chance.with_layer(keys, BLOCKS)
    places = torch.arange(layers * len(PLACES), device=keys.device)[:, None]
    return settled(chance.with_layer(keys + places, 0)).unflatten(0, (layers, len(PLACES)))


def dropout(x: Tensor, rate: float, seed: Tensor | None) -> Tensor:
    """B ... with some elements zeroed and the others scaled up; nothing is drawn at rate 0."""
    return _dropped(x, rate, seed) if rate else x


@fx.wrap
def _dropped(x: Tensor, rate: float, seed: Tensor | None) -> Tensor:
    level = min(round(rate * LEVELS), LEVELS - 1)
    kept = draws(x, fresh_keys(x) if seed is None else seed) >= level - LEVELS // 2
    return torch.where(kept, x * (LEVELS / (LEVELS - level)), 0.0)


def draws(x: Tensor, seed: Tensor) -> Tensor:
    """For each element of x, B ..., a whole number from -LEVELS / 2 to LEVELS / 2 - 1."""
    count = math.prod(x.shape[1:])
    places = torch.arange(-(-count // 4), device=x.device)
    bits = chance.with_layer(seed[:, None] + places, 0)
    return bits.view(torch.int16)[:, :count].reshape(x.shape)


def skip(x: Tensor, rate: float, seed: Tensor | None) -> Tensor:
    """B N D with whole samples zeroed and the others scaled up: a branch some samples go without."""
    return _skipped(x, rate, seed) if rate else x


@fx.wrap
def _skipped(x: Tensor, rate: float, seed: Tensor | None) -> Tensor:
    seed = fresh_keys(x) << 2 if seed is None else seed  # a fresh key has 62 bits
    unit = ((seed >> 40) & 0xFFFFFF).to(torch.float32) * 2**-24  # in [0, 1)
    kept = (unit >= rate).to(torch.promote_types(x.dtype, torch.float32))
    return (x * (kept / (1 - rate))[:, None, None]).to(x.dtype)
