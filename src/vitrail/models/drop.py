"""Dropout and stochastic depth whose draws belong to a sample, whatever batch it is in.

A sample's key (`vitrail.chance`) and the layer decide what is dropped; its neighbours, its rank and
its micro-batch do not, and gradient checkpointing draws the same again without any saved state. The
one exception is the dropout of attention weights, which the fused attention draws by itself.

Dropout takes 16 bits an element, four from each draw of 64, so that a rate is rounded to a multiple
of 1/65536; what is kept is scaled by the rounded rate, which leaves the mean as it was.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vitrail import chance
from vitrail.errors import ModelError

# B samples

EMBED = chance.stream("dropout of the embedding")
OUT = chance.stream("dropout of the attention's output")
HIDDEN = chance.stream("dropout inside the MLP")
DOWN = chance.stream("dropout of the MLP's output")
SKIP_ATTENTION = chance.stream("stochastic depth of the attention")
SKIP_MLP = chance.stream("stochastic depth of the MLP")

LEVELS = 1 << 16


def fresh_keys(x: Tensor) -> Tensor:
    """A key for each sample from torch's own generator: `torch.manual_seed` decides them."""
    return torch.randint(1 << 62, (x.shape[0],), device=x.device)


def check_keys(keys: Tensor, x: Tensor) -> None:
    if keys.shape != x.shape[:1] or keys.dtype != torch.int64:
        raise ModelError(f"wanted one int64 key for each of {x.shape[0]} images, got {keys.dtype} {tuple(keys.shape)}.")


def dropout(x: Tensor, rate: float, keys: Tensor | None, stream: int) -> Tensor:
    """B ... with some elements zeroed and the others scaled up; nothing is drawn at rate 0."""
    if not rate:
        return x
    level = min(round(rate * LEVELS), LEVELS - 1)
    kept = draws(x, keys, stream) >= level
    return torch.where(kept, x * (LEVELS / (LEVELS - level)), 0.0)


def draws(x: Tensor, keys: Tensor | None, stream: int) -> Tensor:
    """For each element of x a whole number from 0 to LEVELS - 1, as float32.

    Bits 16 p to 16 p + 15 of all of a sample's draws make the p-th quarter of its elements. As
    floats, since inductor's loops over a CPU's vectors do not compare 64-bit integers.
    """
    keys = fresh_keys(x) if keys is None else keys
    count = math.prod(x.shape[1:])
    parts = torch.arange(0, 64, 16, device=x.device)[:, None]
    drawn = chance.bits(keys, stream, -(-count // 4))[:, None] >> parts  # B 4 count/4
    return (drawn & (LEVELS - 1)).to(torch.float32).flatten(1)[:, :count].reshape(x.shape)


def skip(x: Tensor, rate: float, keys: Tensor | None, stream: int) -> Tensor:
    """B N D with whole samples zeroed and the others scaled up: a branch some samples go without."""
    if not rate:
        return x
    keys = fresh_keys(x) if keys is None else keys
    kept = chance.uniform(keys, stream, 1)[:, :, None] >= rate  # B 1 1
    scale = kept.to(torch.promote_types(x.dtype, torch.float32)) / (1 - rate)
    return (x * scale).to(x.dtype)
