"""A value that a compiled graph computes once.

Inductor inlines cheap arithmetic wherever its result is read. A chain of 64-bit mixing that gives one
number for an image would so be done anew for each of the image's 150,000 activations, forward and
backward, in every layer, and compiled as often.
"""

from __future__ import annotations

import torch
from torch import Tensor


def materialize(x: Tensor) -> Tensor:
    """The same numbers; in a compiled graph they are in memory from here on."""
    if not torch.compiler.is_compiling():
        return x
    found: Tensor = torch.ops.vitrail.materialize(x)
    return found


@torch.library.custom_op("vitrail::materialize", mutates_args=(), schema="(Tensor x) -> Tensor")
def _copied(x: Tensor) -> Tensor:
    return x.clone()


@_copied.register_fake
def _shaped(x: Tensor) -> Tensor:
    return torch.empty_like(x)
