"""Dropout and stochastic depth that depend on a sample's seed, not on its batch.

A sample's seed (`vitrail.rng`) and the layer determine what is dropped; its neighbors, rank and
micro-batch do not, and gradient checkpointing draws the same values again without saved state. The
exception is dropout of the attention weights, which the fused kernel draws from torch's generator.

    block_seeds   sample seeds -> 64 bits for each sample and each dropout of each block
    dropout       16 bits per element, four from each mix of the seed plus 0, 1, 2, ...
    drop_path     the seed itself decides whether a sample skips a residual branch

Dropout rates are rounded to multiples of 1/65536; values are scaled by the rounded rate, so the
mean is unchanged.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx

from vitrail import rng
from vitrail.errors import ModelError
from vitrail.kernels.compute_once import compute_once

# B samples, L layers

DROP_SITES = ("out", "hidden", "down", "skip attention", "skip MLP")
"""Dropouts of a block: the attention's output, inside the MLP, the MLP's output, and either residual branch."""
BLOCKS, EMBED = rng.stream_id("dropout in blocks"), rng.stream_id("dropout of the embedding")
NUM_LEVELS = 1 << 16


def random_sample_seeds(x: Tensor) -> Tensor:
    """A seed for each sample, B int64, from torch's generator (`torch.manual_seed`)."""
    return torch.randint(1 << 62, (x.shape[0],), device=x.device)


@fx.wrap
def resolve_sample_seeds(x: Tensor, sample_seeds: Tensor | None) -> Tensor:
    """The given seeds after a check, or new ones."""
    if sample_seeds is None:
        return random_sample_seeds(x)
    check_sample_seeds(sample_seeds, x)
    return sample_seeds


def check_sample_seeds(sample_seeds: Tensor, x: Tensor) -> None:
    if sample_seeds.shape != x.shape[:1] or sample_seeds.dtype != torch.int64:
        got = f"{sample_seeds.dtype} {tuple(sample_seeds.shape)}"
        raise ModelError(f"expected one int64 seed for each of {x.shape[0]} images, got {got}.")


@fx.wrap
def embedding_seeds(sample_seeds: Tensor) -> Tensor:
    """B -> B: the seeds of the dropout before the first block."""
    return compute_once(rng.fold_in(sample_seeds, EMBED))


@fx.wrap
def block_seeds(sample_seeds: Tensor, layers: int) -> Tensor:
    """B -> L 5 B int64: a seed for each layer, each of its dropouts and each sample."""
    sample_seeds = rng.fold_in(sample_seeds, BLOCKS)
    sites = torch.arange(layers * len(DROP_SITES), device=sample_seeds.device)[:, None]
    return compute_once(rng.fold_in(sample_seeds + sites, 0)).unflatten(0, (layers, len(DROP_SITES)))


def dropout(x: Tensor, rate: float, seed: Tensor | None) -> Tensor:
    """Dropout of the elements of x, B ...; the identity at rate 0."""
    return _dropout(x, rate, seed) if rate else x


@fx.wrap
def _dropout(x: Tensor, rate: float, seed: Tensor | None) -> Tensor:
    level = min(round(rate * NUM_LEVELS), NUM_LEVELS - 1)
    kept = random_int16(x, random_sample_seeds(x) if seed is None else seed) >= level - NUM_LEVELS // 2
    return torch.where(kept, x * (NUM_LEVELS / (NUM_LEVELS - level)), 0.0)


def random_int16(x: Tensor, seed: Tensor) -> Tensor:
    """An int16 for each element of x, B ...: uniform from -LEVELS / 2 to LEVELS / 2 - 1."""
    count = math.prod(x.shape[1:])
    counters = torch.arange(-(-count // 4), device=x.device)
    bits = rng.fold_in(seed[:, None] + counters, 0)
    return bits.view(torch.int16)[:, :count].reshape(x.shape)


def drop_path(x: Tensor, rate: float, seed: Tensor | None) -> Tensor:
    """Stochastic depth of a residual branch, B N D: whole samples are zeroed, the others scaled up."""
    return _drop_path(x, rate, seed) if rate else x


@fx.wrap
def _drop_path(x: Tensor, rate: float, seed: Tensor | None) -> Tensor:
    seed = random_sample_seeds(x) << 2 if seed is None else seed  # new seeds have 62 bits
    unit = ((seed >> 40) & 0xFFFFFF).to(torch.float32) * 2**-24  # in [0, 1)
    kept = (unit >= rate).to(torch.promote_types(x.dtype, torch.float32))
    return (x * (kept / (1 - rate))[:, None, None]).to(x.dtype)
