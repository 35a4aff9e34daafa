"""First values of weights, as JAX's initializers draw them."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor, nn

# A normal cut at two standard deviations has 0.8796 of its spread; flax divides by that.
_CUT_SPREAD = 0.87962566103423978


def generator_for(parameter: Tensor, seed: int | None) -> Generator | None:
    """A generator of its own for a seed; None follows torch's global one."""
    return None if seed is None else Generator(parameter.device).manual_seed(seed)


@torch.no_grad()
def lecun_normal_(weight: Tensor, generator: Generator | None = None, *, fan_in: int | None = None) -> None:
    """Truncated normal with variance 1 / fan_in; fan_in is all but the first dimension."""
    fan_in = fan_in or math.prod(weight.shape[1:])
    std = math.sqrt(1 / fan_in) / _CUT_SPREAD
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std, generator=generator)


@torch.no_grad()
def xavier_uniform_(weight: Tensor, generator: Generator | None = None, *, parts: int = 1) -> None:
    """Uniform by fan_in + fan_out, where a matrix that stacks several counts as that many.

    In one draw over the whole: pieces of a sharded matrix would be copies, and stay as they were.
    """
    fan_out, fan_in = weight.shape[0] // parts, weight.shape[1]
    bound = math.sqrt(6 / (fan_in + fan_out))
    weight.uniform_(-bound, bound, generator=generator)


@torch.no_grad()
def normal_(weight: Tensor, std: float, generator: Generator | None = None) -> None:
    nn.init.normal_(weight, std=std, generator=generator)


def is_meta(module: nn.Module) -> bool:
    """True for a skeleton without storage, which has no first values."""
    return any(p.is_meta for p in module.parameters())
