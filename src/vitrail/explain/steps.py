"""All explanations of an image from one forward pass, in steps that a caller can interleave with other work."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vitrail.errors import ModelError
from vitrail.explain.attention import AttentionIterator, QueryAttention
from vitrail.explain.gradient import check_targets, relevance_map
from vitrail.explain.occlusion import occlusion_steps
from vitrail.explain.rollout import add_layer, query_row
from vitrail.explain.swin_attention import SwinExplainer, WindowedAttention
from vitrail.models import BiT, Net, Swin
from vitrail.models.base import eval_mode

# B images, H heads, T tokens (prefix tokens first), h rows and w columns of patches

Method = Literal["rollout", "gradient", "attention", "occlusion"]
METHODS: tuple[Method, ...] = ("rollout", "gradient", "attention", "occlusion")
NEEDS_ATTENTION = ("rollout", "gradient", "attention")
"""Methods that a network without attention does not have."""
NEEDS_CLASSES = ("gradient", "occlusion")
"""Methods that explain a class score."""
OCCLUSION_STRIDE = 2
"""Occlusion masks squares of 2 x 2 patches side by side."""


@dataclass(frozen=True)
class LayerAttention:
    """The attention of one layer."""

    layer: int
    """From 0."""
    weights: Tensor | WindowedAttention
    """B H T T; a Swin Transformer's is inside windows."""


@dataclass(frozen=True)
class ForwardResult:
    """The end of the forward pass."""

    logits: Tensor
    """B K; B D where the network has no head."""
    targets: Tensor
    """B: the classes that are explained."""
    pool_attention: Tensor | None = None
    """B H N: attention weights of the attention pool, if there is one."""


@dataclass(frozen=True)
class AttributionMap:
    """The map of one method."""

    method: str
    values: Tensor
    """B h w; larger is more important."""
    known: Tensor | None = None
    """h w: whether the value of a patch is final; None: the map is complete."""
    done: int = 1
    """Number of forward passes of occlusion so far."""
    total: int = 1


ExplainStep = LayerAttention | ForwardResult | AttributionMap


def supported_methods(net: Net, has_classes: bool) -> tuple[Method, ...]:
    """The methods that can explain this network."""
    with_attention = (m for m in METHODS if m not in NEEDS_ATTENTION or not isinstance(net, BiT))
    return tuple(m for m in with_attention if has_classes or m not in NEEDS_CLASSES)


def explain_steps(
    net: Net,
    images: Tensor,
    methods: Sequence[str] = (),
    *,
    targets: Tensor | None = None,
    layers: Collection[int] | None = (),
    multi_label: bool = False,
    max_batch_size: int = 32,
    step_s: float | None = None,
) -> Iterator[ExplainStep]:
    """Run the network once on B C H W and yield attention, logits and attribution maps as they are computed.

    Yields the `LayerAttention` of each layer in `layers` (from 0; None: all), one `ForwardResult`, and for each
    method, in order, its `AttributionMap`; occlusion, of one image only, is preceded by partial maps. `targets` are
    class indices, B; None: the top classes. Gradients add one backward pass, occlusion adds forward passes of at most
    `max_batch_size` masked images, or as many as fit in `step_s` seconds.
    """
    swin: SwinExplainer | None = None
    if isinstance(net, Swin):
        swin, iterator = SwinExplainer(net, images, methods), None
        for layer, attention in enumerate(swin):
            if layers is None or layer in layers:
                yield LayerAttention(layer, attention)
            del attention
        logits = swin.logits
    elif isinstance(net, BiT):
        if needed := [m for m in methods if m in NEEDS_ATTENTION]:
            raise ModelError(f"a BiT has no attention, which {needed[0]} needs; try occlusion.")
        with torch.no_grad(), eval_mode(net):
            logits = net(images)
        iterator = product = last = None
    else:
        depth = len(net.blocks)
        requested = range(depth) if layers is None else layers
        visited = set(range(depth)) if "rollout" in methods else set(requested)
        if "attention" in methods and net.pool is None:
            visited.add(depth - 1)
        iterator = AttentionIterator(net, images, visited, record_blocks="gradient" in methods)
        product = last = None
        for layer, weights in zip(sorted(visited), iterator, strict=True):
            if "rollout" in methods:
                product = add_layer(product, weights)
            if "attention" in methods and layer == depth - 1:
                last = weights
            if layer in requested:
                yield LayerAttention(layer, weights)
            del weights
        logits = iterator.logits
    targets = logits.argmax(-1) if targets is None else targets
    yield ForwardResult(logits, targets, None if iterator is None else iterator.pool_attention)
    for method in methods:
        if method in NEEDS_CLASSES:
            check_targets(net, targets, len(images))
        if method == "occlusion":
            yield from _occlusion_maps(net, images, logits, targets, multi_label, max_batch_size, step_s)
            continue
        if swin is not None:
            yield AttributionMap(method, swin.map(method, targets))
            continue
        assert iterator is not None
        if method == "rollout":
            assert product is not None
            values = query_row(iterator, product)
        elif method == "gradient":
            values = relevance_map(iterator, targets)
        else:
            values = _last_attention_map(iterator, last)
        yield AttributionMap(method, values)


def attribution_maps(
    net: Net,
    images: Tensor,
    methods: Sequence[str],
    *,
    targets: Tensor | None = None,
    multi_label: bool = False,
) -> dict[str, Tensor]:
    """Method -> B h w, from one forward pass; larger is more important."""
    steps = explain_steps(net, images, methods, targets=targets, multi_label=multi_label)
    return {step.method: step.values for step in steps if isinstance(step, AttributionMap)}


def _occlusion_maps(
    net: Net,
    images: Tensor,
    logits: Tensor,
    targets: Tensor,
    multi_label: bool,
    max_batch_size: int,
    step_s: float | None,
) -> Iterator[AttributionMap]:
    """Partial maps of one image, then the complete map of all images."""
    probabilities = logits.float().sigmoid() if multi_label else logits.float().softmax(-1)
    maps = []
    for image, target, row in zip(images, targets.tolist(), probabilities.tolist(), strict=True):
        for partial in occlusion_steps(
            net,
            image,
            target,
            stride=OCCLUSION_STRIDE,
            batch_size=max_batch_size,
            step_s=step_s,
            multi_label=multi_label,
            probability=row[target],
        ):
            if len(images) == 1:
                yield AttributionMap("occlusion", partial.values[None], partial.known, partial.done, partial.total)
        maps.append(partial.values)
    yield AttributionMap("occlusion", torch.stack(maps).float())


def _last_attention_map(iterator: AttentionIterator, attention: Tensor | None) -> Tensor:
    """B h w: attention of the attention pool, or else of the pooled tokens in the last layer, B H T T."""
    if iterator.pool_attention is not None:
        patches = iterator.grid[0] * iterator.grid[1]
        return iterator.pool_attention.mean(1)[:, -patches:].unflatten(1, iterator.grid)
    assert attention is not None
    query = QueryAttention(iterator.net, iterator.images)
    query.add(attention)
    return query.maps()[0][0].mean(1)
