"""Principal components of the patch embedding filters (the paper's Fig. 7, left)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vitrail.errors import ModelError
from vitrail.models import BiT, Net, ViT

# n components; D width, C channels, p x q pixels of a patch

Floats = npt.NDArray[np.floating[Any]]


@torch.no_grad()
def filter_components(net: Net, max_components: int = 28) -> tuple[Floats, Floats]:
    """Principal components of the patch embedding filters, n p q C, and the fraction of the variance of each, n."""
    if isinstance(net, BiT) or (isinstance(net, ViT) and net.stem is not None):
        raise ModelError("the first filters of this model are those of a ResNet (7 × 7 pixels), not patch filters.")
    weight = net.patch.weight.detach().double().cpu()  # D C p q
    matrix = weight.flatten(1)
    _, sizes, patterns = torch.linalg.svd(matrix - matrix.mean(0), full_matrices=False)
    count = min(max_components, len(sizes))
    shares = sizes.square() / sizes.square().sum().clamp(min=1e-30)
    shaped = patterns[:count].unflatten(1, weight.shape[1:]).permute(0, 2, 3, 1)
    return shaped.numpy(), shares[:count].numpy()


def filter_images(patterns: Floats) -> list[npt.NDArray[np.uint8]]:
    """n p q C -> n RGB images p q 3; gray is zero."""
    if patterns.shape[3] not in (1, 3):
        patterns = patterns.mean(3, keepdims=True)
    reach = np.abs(patterns).max(axis=(1, 2, 3), keepdims=True)
    levels = np.rint(127.5 + 127.5 * patterns / np.maximum(reach, 1e-12)).astype(np.uint8)
    return [np.repeat(p, 3, axis=2) if p.shape[2] == 1 else p for p in levels]
