"""Gradient-weighted attention rollout (Chefer, Gur and Wolf, 2021).

Attention is weighted by the gradient of the class score, negative values are dropped, heads are averaged, and the
relevance R is accumulated over the residual connections:

    A' = mean over heads of max(dscore/dA * A, 0)        R <- R + A' R,   from the identity

Only the head's row of R is needed, which can be computed from the last layer down, one block at a time. Blocks whose
attention would take too much memory are computed again from their inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.errors import ModelError
from vitrail.explain.attention import AttentionIterator, BlockRecord, pooling_weights
from vitrail.explain.swin_attention import SwinExplainer
from vitrail.models import Net, Swin, ViT
from vitrail.models.base import eval_mode

# B images, H heads, T tokens (prefix tokens first), N patches in h rows and w columns, D width


def gradient_rollout(net: Net, images: Tensor, targets: Tensor) -> Tensor:
    """B C H W and B class indices -> B h w: relevance of each patch for its image's class, 0 or more."""
    check_targets(net, targets, len(images))
    if isinstance(net, Swin):
        return SwinExplainer(net, images, ("gradient",)).run().relevance(targets)
    return relevance_map(AttentionIterator(net, images, layers=(), record_blocks=True).run(), targets)


def relevance_map(iterator: AttentionIterator, targets: Tensor) -> Tensor:
    """B class indices -> B h w, by a backward pass through the recorded blocks of a finished forward pass.

    The records are consumed.
    """
    net, num_prefix = iterator.net, iterator.net.config.num_prefix_tokens
    with eval_mode(net), torch.enable_grad():
        grad, row = _head_backward(net, iterator.last_tokens, targets)
        for i in reversed(range(len(net.blocks))):
            grad, relevance = _block_backward(net, i, iterator.block_records.pop(), iterator.grid, grad)
            row = row + torch.einsum("bt,btu->bu", row, relevance)
    return row[:, num_prefix:].unflatten(1, iterator.grid).float()


def check_targets(net: Net, targets: Tensor, count: int) -> None:
    """Raise ModelError unless there is one valid class index per image."""
    classes = net.config.num_classes
    if not classes:
        raise ModelError("this network has no classes, so no class score to explain; try rollout or attention.")
    if targets.shape != (count,) or bool(((targets < 0) | (targets >= classes)).any()):
        raise ModelError(f"expected {count} class indices from 0 to {classes - 1}, one for each image.")


def _head_backward(net: ViT, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of the score at the last block's output, B T D, and the initial relevance row, B T."""
    x = x.detach().requires_grad_()
    pooled: list[Tensor] = []
    logits = net.classify(*net.pool_tokens(net.norm_before_pool(x), pooled if net.pool is not None else None))
    score = logits.gather(1, targets[:, None].to(logits.device)).sum()
    if not pooled:
        (grad,) = torch.autograd.grad(score, x)
        return grad, pooling_weights(net, grad.float(), x.shape[1] - net.config.num_prefix_tokens)
    grad, by_weight = torch.autograd.grad(score, (x, pooled[0]))
    row = _relevance(pooled[0], by_weight)[:, 0]  # B N: no residual, the pool's query is not a token
    return grad, torch.nn.functional.pad(row, (x.shape[1] - row.shape[1], 0))


def _block_backward(
    net: ViT, layer: int, record: BlockRecord, grid: tuple[int, int], grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Backward pass of one block: the gradient at its input, B T D, and its relevance, B T T."""
    output, attention = record.output, record.attention
    if output is None or attention is None:
        weights: list[Tensor] = []
        # Positions inside the attention are computed for each layer again; they are cached or cheap.
        x, state = net.apply_position(layer, record.input, grid, None)
        output = net.blocks[layer](x, state, weights)
        attention = weights[0]
    # A scalar: with a gradient to start from, autograd would first import its machinery for symbolic shapes.
    below, attention_grad = torch.autograd.grad((output * grad).sum(), (record.input, attention))
    return below, _relevance(attention, attention_grad)


def _relevance(attention: Tensor, grad: Tensor) -> Tensor:
    """B H T T and its gradient -> B T T."""
    return (attention.detach().float() * grad.float()).clamp(min=0).mean(1)
