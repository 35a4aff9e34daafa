"""What a network can tell about an image, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from operator import index
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import ModelError, did_you_mean


# B images, T tokens (special ones first), N patches in h rows and w columns, D width, H heads
@dataclass(kw_only=True)
class Output:
    """Only what was wanted is filled in; the rest is None."""

    logits: Tensor | None = None
    """B classes: what `net(images)` returns; B D where the network has no head."""
    head_logits: tuple[Tensor, Tensor] | None = None
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
    """depth + 1 times B T D: what enters the first block, then what leaves each; with `layers`, what leaves those."""
    patch_maps: tuple[Tensor, ...] | None = None
    """For each layer, or of `layers`, B h w D: the patches that leave it, as the grid they lie in."""
    prefix_tokens: tuple[Tensor, ...] | None = None
    """Likewise B P D: the class, distillation and register tokens, in this order."""
    attention: tuple[Tensor, ...] | None = None
    """For each layer, or of `layers`, B H T T: each row sums to 1."""
    pool_attention: Tensor | None = None
    """The attention pool's weights: B H N over the patches (pool='map'), B H T over all tokens (pool='coca')."""
    feature_maps: tuple[Tensor, ...] | None = None
    """Convolutional networks: B C h w after each stage, or after those that `layers` names."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Output:
        """With every tensor passed through `change`."""
        changed: dict[str, Any] = {}
        for name in OUTPUT_NAMES:
            if isinstance(value := getattr(self, name), tuple):
                changed[name] = tuple(map(change, value))
            elif value is not None:
                changed[name] = change(value)
        return Output(**changed)


def concat_outputs(outputs: Sequence[Output]) -> Output:
    """Outputs of batches as that of all their images."""
    if not outputs:
        raise ModelError("there are no images to compute features of; wanted at least one.")
    whole: dict[str, Any] = {}
    for name in OUTPUT_NAMES:
        parts = [getattr(output, name) for output in outputs]
        if isinstance(parts[0], tuple):
            whole[name] = tuple(torch.cat(layer) for layer in zip(*parts, strict=True))
        elif parts[0] is not None:
            whole[name] = torch.cat(parts)
    return Output(**whole)


OUTPUT_NAMES = tuple(f.name for f in fields(Output))
PER_LAYER = frozenset({"tokens", "patch_maps", "prefix_tokens", "attention", "feature_maps"})
"""Outputs of which there is one for each layer: `layers` chooses among these."""


def resolve_outputs(
    outputs: str | Iterable[str] | None, layers: Iterable[int] | None = None, default_layered: str = "tokens"
) -> frozenset[str]:
    """The names asked for, checked; None: the logits, or with `layers` the output called `layered`."""
    if outputs is None:
        return frozenset({"logits" if layers is None else default_layered})
    names = frozenset((outputs,) if isinstance(outputs, str) else outputs)
    for name in names:
        if name not in OUTPUT_NAMES:
            raise ModelError(f"no output is called {name!r}{did_you_mean(name, OUTPUT_NAMES)}")
    if layers is not None and not names & PER_LAYER:
        raise ModelError(
            f"layers chooses among {', '.join(sorted(PER_LAYER))}; got outputs={', '.join(sorted(names))}."
        )
    return names


def resolve_layers(layers: Iterable[int] | None, depth: int) -> tuple[int, ...]:
    """Layers counted from 0, negative ones from the end, as 0 ... depth - 1; None: all of them."""
    try:
        asked = tuple(index(layer) for layer in (range(depth) if layers is None else layers))
    except TypeError:
        raise ModelError(f"layers={layers}: wanted a list of layers, such as [3] or [3, 7, 11].") from None
    for layer in asked:
        if not -depth <= layer < depth:
            raise ModelError(f"there is no layer {layer}; wanted 0 to {depth - 1}, or -1 for the last.")
    if not asked:
        raise ModelError("layers is empty; wanted at least one layer, such as [-1] for the last.")
    return tuple(layer % depth for layer in asked)
