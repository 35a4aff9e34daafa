"""Fused Linear and tanh-GELU on a CPU.

PyTorch computes the exact GELU on a CPU with oneDNN, and the tanh form with its own loop, five times
slower. oneDNN can apply the tanh form as it writes the product: for 8 images of ViT-Ti/16 on two cores,
3.3 ms for the reference and 2.2 ms fused, of which the product alone takes 1.8
(`python benchmarks/kernels.py`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.runtime import private_torch


def linear_gelu_tanh_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """tanh-GELU of x weight^T + bias."""
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def linear_gelu_tanh(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same, fused if this torch has the operator; requires `can_fuse_linear_gelu`."""
    fused = private_torch.linear_gelu_tanh() or linear_gelu_tanh_reference
    return fused(x, weight, bias)


def can_fuse_linear_gelu(layer: nn.Module, x: Tensor) -> bool:
    """Whether the fused kernel applies: nn.Linear without hooks, float32 on a CPU, no gradients, tracing or modes."""
    if type(x) is not Tensor or not private_torch.is_plain_eager():
        return False
    if type(layer) is not nn.Linear or private_torch.has_hooks(layer):
        return False
    weight = layer.weight
    if torch.is_autocast_enabled("cpu") or (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)):
        return False
    plain = x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu" and x.numel() > 0
    ours = type(weight) in (Tensor, nn.Parameter)  # not sharded, fake or wrapped
    return plain and ours and private_torch.linear_gelu_tanh() is not None
