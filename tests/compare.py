"""Comparing networks: weights that hide nothing, and errors as one number."""

from __future__ import annotations

import torch
from torch import Tensor, nn


@torch.no_grad()
def randomized(net: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter drawn anew, norms, biases, tokens and scales included, in evaluation mode.

    Fresh networks have zeros and ones in places where a wrong name or order would go unseen.
    Matrices keep the size of their outputs; vectors that scale stay around one.
    """
    if any(p.is_meta for p in net.parameters()):
        net = net.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in net.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim >= 2 and not any(part in name for part in ("token", "position", "pos_embed", "register")):
            noise = noise / parameter[0].numel() ** 0.5
        elif "norm" in name and name.endswith("weight"):
            noise = 1 + 0.2 * noise
        else:
            noise = 0.3 * noise
        parameter.copy_(noise)
    return net.eval()


def relative(got: Tensor, expected: Tensor) -> float:
    """|got - expected| / |expected|, over all elements."""
    assert got.shape == expected.shape, (got.shape, expected.shape)
    return float((got.detach().double() - expected.detach().double()).norm() / expected.detach().double().norm())
