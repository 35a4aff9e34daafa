"""What a network can tell about an image, by name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from torch import Tensor

from vitrail.errors import ModelError, nearest


# B images, T tokens (special ones first), N patches in h rows and w columns, D width, H heads
@dataclass(kw_only=True)
class Output:
    """Only what was wanted is filled in; the rest is None."""

    logits: Tensor | None = None
    """B classes: what `net(images)` returns; B D where the network has no head."""
    heads: tuple[Tensor, Tensor] | None = None
    """Distilled networks: logits of the class token's head and of the distillation token's."""
    pooled: Tensor | None = None
    """B D: what the head sees, before the pre-training head's tanh layer."""
    pre_logits: Tensor | None = None
    """B R: after that layer (the same as `pooled` without one)."""
    class_token: Tensor | None = None
    """B D: the class token after the last block, and after the final norm where that comes before pooling."""
    patches: Tensor | None = None
    """B h w D: the patches, likewise, as the grid they lie in."""
    tokens: tuple[Tensor, ...] | None = None
    """depth + 1 times B T D: what enters the first block, then what leaves each."""
    attention: tuple[Tensor, ...] | None = None
    """depth times B H T T: each row sums to 1."""
    pool_attention: Tensor | None = None
    """The attention pool's weights: B H N over the patches (pool='map'), B H T over all tokens (pool='coca')."""
    maps: tuple[Tensor, ...] | None = None
    """Convolutional networks: B C h w after each stage."""


NAMES = tuple(f.name for f in fields(Output))


def wanted(want: str | Iterable[str]) -> frozenset[str]:
    """The names asked for, checked."""
    names = frozenset((want,) if isinstance(want, str) else want)
    for name in names:
        if name not in NAMES:
            raise ModelError(f"no output is called {name!r}{nearest(name, NAMES)}")
    return names
