"""Gradient-weighted rollout (Chefer, Gur and Wolf, 2021): which attention speaks for a class.

Each layer's attention counts as far as the class's score would rise with it, heads are averaged
after negative parts are dropped, and relevance is added to what flows past the layer:

    A' = mean over heads of max(dscore/dA * A, 0)        R <- R + A' R,   from the identity

Only the head's row of R is wanted, and that can be built from the last layer down. So the pass back
goes block by block, each computed once more from its input, and has one layer's attention at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitrail.errors import ModelError
from vitrail.explain.attention import attentive, reading
from vitrail.models import Net, ViT
from vitrail.models.base import eval_mode

# B images, H heads, T tokens (special ones first), N patches in h rows and w columns, D width


def gradient_view(net: Net, images: Tensor, targets: Tensor) -> Tensor:
    """B C H W and B class numbers -> B h w: how much each patch speaks for its image's class; never below 0."""
    net = attentive(net)
    check_targets(net, targets, len(images))
    grid, special = net.config.grid_of((images.shape[2], images.shape[3])), net.config.num_prefix_tokens
    with eval_mode(net), torch.enable_grad():
        entering = _entering(net, images)  # depth + 1 times B T D
        grad, row = _head(net, entering.pop(), targets)
        for i in reversed(range(len(net.blocks))):
            grad, relevance = _back(net, i, entering.pop(), grid, grad)
            row = row + torch.einsum("bt,btu->bu", row, relevance)
    return row[:, special:].unflatten(1, grid).float()


def check_targets(net: Net, targets: Tensor, count: int) -> None:
    """Raise ModelError unless there is a class for each image."""
    classes = net.config.num_classes
    if not classes:
        raise ModelError("this network has no classes to explain a score of; try rollout or attention.")
    if targets.shape != (count,) or bool(((targets < 0) | (targets >= classes)).any()):
        raise ModelError(f"wanted {count} class numbers from 0 to {classes - 1}, one for each image.")


@torch.no_grad()
def _entering(net: ViT, images: Tensor) -> list[Tensor]:
    """What enters each block, before the positions that the block adds, and what leaves the last."""
    x, grid = net.embed(images)
    place: Any = None
    found = []
    for i, block in enumerate(net.blocks):
        found.append(x)
        x, place = net.apply_position(i, x, grid, place)
        x = block(x, place)
    return [*found, x]


def _head(net: ViT, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """From the last block's output: the score's gradient there, B T D, and the first row of relevance, B T."""
    x = x.detach().requires_grad_()
    look: list[Tensor] = []
    logits = net.classify(*net.pool_tokens(net.norm_before_pool(x), look if net.pool is not None else None))
    score = logits.gather(1, targets[:, None].to(logits.device)).sum()
    if not look:
        (grad,) = torch.autograd.grad(score, x)
        return grad, reading(net, grad.float(), x.shape[1] - net.config.num_prefix_tokens)
    grad, by_weight = torch.autograd.grad(score, (x, look[0]))
    pooled = _relevance(look[0], by_weight)[:, 0]  # B N: the pool's own query is nothing that could be kept
    return grad, torch.nn.functional.pad(pooled, (x.shape[1] - pooled.shape[1], 0))


def _back(net: ViT, layer: int, x: Tensor, grid: tuple[int, int], grad: Tensor) -> tuple[Tensor, Tensor]:
    """Through one block, downwards: the gradient at its input, B T D, and its relevance, B T T."""
    x = x.detach().requires_grad_()
    kept: list[Tensor] = []
    # Positions inside the attention are made for each layer anew: they are kept or cheap.
    y, place = net.apply_position(layer, x, grid, None)
    out = net.blocks[layer](y, place, kept)
    # As one number: given a gradient to start from, torch would first import its machinery of symbolic shapes.
    below, by_weight = torch.autograd.grad((out * grad).sum(), (x, kept[0]))
    return below, _relevance(kept[0], by_weight)


def _relevance(attention: Tensor, grad: Tensor) -> Tensor:
    """B H T T and its gradient -> B T T."""
    return (attention.detach().float() * grad.float()).clamp(min=0).mean(1)
