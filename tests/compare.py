"""Random weights for comparing networks, and the relative error of two tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn


@torch.no_grad()
def randomized(net: nn.Module, seed: int = 0) -> nn.Module:
    """Fill every parameter with random values, also norms, biases and tokens, and set evaluation mode.

    A new network has parameters of zeros and ones, with which a wrong name or order would go undetected.
    The outputs of matrices keep their scale; norm weights stay around one.
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
    """Relative error over all elements: |got - expected| / |expected|."""
    assert got.shape == expected.shape, (got.shape, expected.shape)
    return float((got.detach().double() - expected.detach().double()).norm() / expected.detach().double().norm())
