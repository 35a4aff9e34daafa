"""Dropout and stochastic depth whose draws belong to a sample, whatever batch it is in.

A sample's key (`vitrail.rng`) and the layer decide what is dropped; its neighbors, its rank and
its micro-batch do not, and gradient checkpointing draws the same again without any saved state. The
one exception is the dropout of attention weights, which the fused attention draws by itself.

    seeds      sample_seeds -> 64 bits for each sample and each place where something may be dropped
    dropout    16 bits an element, four from each draw, made by mixing the seed plus 0, 1, 2, ...
    skip       the seed itself decides whether a sample goes without a branch

So a rate of dropout is rounded to a multiple of 1/65536; what is kept is scaled by the rounded rate,
which leaves the mean as it was.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx

from vitrail import rng
from vitrail.errors import ModelError
from vitrail.kernels.materialize import materialize

# B samples, L layers

DROP_SITES = ("out", "hidden", "down", "skip attention", "skip MLP")
"""Where a block may drop: the attention's output, inside the MLP and after it, and either branch."""
BLOCKS, EMBED = rng.stream_id("dropout in blocks"), rng.stream_id("dropout of the embedding")
NUM_LEVELS = 1 << 16


def random_sample_seeds(x: Tensor) -> Tensor:
    """A key for each sample from torch's own generator: `torch.manual_seed` decides them."""
    return torch.randint(1 << 62, (x.shape[0],), device=x.device)


@fx.wrap
def resolve_sample_seeds(x: Tensor, sample_seeds: Tensor | None) -> Tensor:
    """The sample_seeds given, checked, or fresh ones."""
    if sample_seeds is None:
        return random_sample_seeds(x)
    check_sample_seeds(sample_seeds, x)
    return sample_seeds


def check_sample_seeds(sample_seeds: Tensor, x: Tensor) -> None:
    if sample_seeds.shape != x.shape[:1] or sample_seeds.dtype != torch.int64:
        got = f"{sample_seeds.dtype} {tuple(sample_seeds.shape)}"
        raise ModelError(f"wanted one int64 seed for each of {x.shape[0]} images, got {got}.")


@fx.wrap
def embedding_seeds(sample_seeds: Tensor) -> Tensor:
    """B -> B, for what enters the first block."""
    return materialize(rng.fold_in(sample_seeds, EMBED))


@fx.wrap
def block_seeds(sample_seeds: Tensor, layers: int) -> Tensor:
    """B -> L 5 B: for each layer and each of its places 64 bits a sample, as int64."""
    sample_seeds = rng.fold_in(sample_seeds, BLOCKS)
    places = torch.arange(layers * len(DROP_SITES), device=sample_seeds.device)[:, None]
    return materialize(rng.fold_in(sample_seeds + places, 0)).unflatten(0, (layers, len(DROP_SITES)))


def dropout(x: Tensor, rate: float, seed: Tensor | None) -> Tensor:
    """B ... with some elements zeroed and the others scaled up; nothing is drawn at rate 0."""
    return _dropout(x, rate, seed) if rate else x


@fx.wrap
def _dropout(x: Tensor, rate: float, seed: Tensor | None) -> Tensor:
    level = min(round(rate * NUM_LEVELS), NUM_LEVELS - 1)
    kept = random_int16(x, random_sample_seeds(x) if seed is None else seed) >= level - NUM_LEVELS // 2
    return torch.where(kept, x * (NUM_LEVELS / (NUM_LEVELS - level)), 0.0)


def random_int16(x: Tensor, seed: Tensor) -> Tensor:
    """For each element of x, B ..., a whole number from -LEVELS / 2 to LEVELS / 2 - 1."""
    count = math.prod(x.shape[1:])
    places = torch.arange(-(-count // 4), device=x.device)
    bits = rng.fold_in(seed[:, None] + places, 0)
    return bits.view(torch.int16)[:, :count].reshape(x.shape)


def drop_path(x: Tensor, rate: float, seed: Tensor | None) -> Tensor:
    """B N D with whole samples zeroed and the others scaled up: a branch some samples go without."""
    return _drop_path(x, rate, seed) if rate else x


@fx.wrap
def _drop_path(x: Tensor, rate: float, seed: Tensor | None) -> Tensor:
    seed = random_sample_seeds(x) << 2 if seed is None else seed  # a fresh key has 62 bits
    unit = ((seed >> 40) & 0xFFFFFF).to(torch.float32) * 2**-24  # in [0, 1)
    kept = (unit >= rate).to(torch.promote_types(x.dtype, torch.float32))
    return (x * (kept / (1 - rate))[:, None, None]).to(x.dtype)
