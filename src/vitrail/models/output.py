"""Named outputs of a model, and the selection of outputs and layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from operator import index
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import ModelError, did_you_mean


# B images, T tokens (P prefix tokens first), N patches in h rows and w columns, D width, H heads
@dataclass(kw_only=True)
class Output:
    """Outputs of `net.features`: those requested; the others are None."""

    logits: Tensor | None = None
    """B num_classes: what `net(images)` returns; B D for a model without a head."""
    head_logits: tuple[Tensor, Tensor] | None = None
    """Distilled models: logits of the class token's head and of the distillation token's head."""
    pooled: Tensor | None = None
    """B D: the input of the head, before the pre-logits layer."""
    pre_logits: Tensor | None = None
    """B R: after the pre-logits layer; equal to `pooled` without one."""
    class_token: Tensor | None = None
    """B D: the class token after the last block, and after the final norm where that comes before pooling."""
    patches: Tensor | None = None
    """B h w D: the patch tokens, likewise, on their grid."""
    tokens: tuple[Tensor, ...] | None = None
    """B T D each: the input of the first block, then each block's output; with `layers`, only those outputs."""
    patch_maps: tuple[Tensor, ...] | None = None
    """B h w D for each block, or each of `layers`: its output patch tokens on their grid."""
    prefix_tokens: tuple[Tensor, ...] | None = None
    """B P D for each block, or each of `layers`: class, distillation and register tokens, in this order."""
    attention: tuple[Tensor, ...] | None = None
    """B H T T for each block, or each of `layers`: attention weights; each row sums to 1."""
    pool_attention: Tensor | None = None
    """The attention pool's weights: B H N over the patches (pool='map'), B H T over all tokens (pool='coca')."""
    feature_maps: tuple[Tensor, ...] | None = None
    """Convolutional models: B C h w after each stage, or each of `layers`."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Output:
        """Apply a function to every tensor."""
        changed: dict[str, Any] = {}
        for name in OUTPUT_NAMES:
            if isinstance(value := getattr(self, name), tuple):
                changed[name] = tuple(map(function, value))
            elif value is not None:
                changed[name] = function(value)
        return Output(**changed)


def concat_outputs(outputs: Sequence[Output]) -> Output:
    """Concatenate the outputs of several batches."""
    if not outputs:
        raise ModelError("got no images to compute features of; expected at least one.")
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
"""Outputs with one value per layer: `layers` selects among these."""
POOLED = frozenset({"logits", "head_logits", "pooled", "pre_logits", "class_token"})
"""Outputs that depend only on the tokens that are pooled."""


def resolve_outputs(
    outputs: str | Iterable[str] | None, layers: Iterable[int] | None = None, default_layered: str = "tokens"
) -> frozenset[str]:
    """Check the names of the requested outputs; None: the logits, or with `layers`, `default_layered`."""
    if outputs is None:
        return frozenset({"logits" if layers is None else default_layered})
    names = frozenset((outputs,) if isinstance(outputs, str) else outputs)
    for name in names:
        if name not in OUTPUT_NAMES:
            raise ModelError(f"unknown output {name!r}{did_you_mean(name, OUTPUT_NAMES)}")
    if layers is not None and not names & PER_LAYER:
        raise ModelError(
            f"layers applies only to {', '.join(sorted(PER_LAYER))}; got outputs={', '.join(sorted(names))}."
        )
    return names


def resolve_layers(layers: Iterable[int] | None, depth: int) -> tuple[int, ...]:
    """Layer indices, negative ones from the end, as 0 ... depth - 1; None: all."""
    try:
        resolved = tuple(index(layer) for layer in (range(depth) if layers is None else layers))
    except TypeError:
        raise ModelError(f"layers={layers}: expected a list of layers, such as [3] or [3, 7, 11].") from None
    for layer in resolved:
        if not -depth <= layer < depth:
            raise ModelError(f"there is no layer {layer}; expected 0 to {depth - 1}, or -1 for the last.")
    if not resolved:
        raise ModelError("layers is empty; expected at least one layer, such as [-1] for the last.")
    return tuple(layer % depth for layer in resolved)
