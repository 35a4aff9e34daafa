"""Weight initialization, as JAX's initializers do it."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor, nn

# Standard deviation of a unit normal truncated at two standard deviations; flax divides by it.
_TRUNCATED_STD = 0.87962566103423978


def generator_for(parameter: Tensor, seed: int | None) -> Generator | None:
    """A generator for this seed; None: torch's global generator."""
    return None if seed is None else Generator(parameter.device).manual_seed(seed)


@torch.no_grad()
def lecun_normal_(weight: Tensor, generator: Generator | None = None, *, fan_in: int | None = None) -> None:
    """Truncated normal with variance 1 / fan_in; fan_in is all but the first dimension."""
    fan_in = fan_in or math.prod(weight.shape[1:])
    std = math.sqrt(1 / fan_in) / _TRUNCATED_STD
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std, generator=generator)


@torch.no_grad()
def xavier_uniform_(weight: Tensor, generator: Generator | None = None, *, parts: int = 1) -> None:
    """Xavier uniform; a weight that stacks `parts` matrices has the fan_out of one.

    Filled in one call: slices of a sharded tensor would be copies, and the weight would not change.
    """
    fan_out, fan_in = weight.shape[0] // parts, weight.shape[1]
    bound = math.sqrt(6 / (fan_in + fan_out))
    weight.uniform_(-bound, bound, generator=generator)


@torch.no_grad()
def normal_(weight: Tensor, std: float, generator: Generator | None = None) -> None:
    nn.init.normal_(weight, std=std, generator=generator)


def is_meta(module: nn.Module) -> bool:
    """Whether a module is on the meta device, without storage to initialize."""
    return any(p.is_meta for p in module.parameters())
