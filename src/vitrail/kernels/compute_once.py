"""Make a compiled graph compute a value once.

Inductor inlines cheap arithmetic wherever its result is used. A chain of 64-bit mixing that gives one
number per image would be recomputed for each of the image's 150,000 activations, forward and backward,
in every layer, and compiled as often.
"""

from __future__ import annotations

import torch
from torch import Tensor


def compute_once(x: Tensor) -> Tensor:
    """The identity; in a compiled graph the value is written to memory here."""
    if not torch.compiler.is_compiling():
        return x
    copy: Tensor = torch.ops.vitrail.compute_once(x)
    return copy


@torch.library.custom_op("vitrail::compute_once", mutates_args=(), schema="(Tensor x) -> Tensor")
def _compute_once(x: Tensor) -> Tensor:
    return x.clone()


@_compute_once.register_fake
def _fake(x: Tensor) -> Tensor:
    return torch.empty_like(x)
