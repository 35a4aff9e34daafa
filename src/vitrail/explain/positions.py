"""What a network knows of places: how alike the positions of its patches are (the paper's Fig. 7, center)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.config import Pair
from vitrail.errors import ModelError
from vitrail.models import BiT, Net, ViT
from vitrail.models.position import AdditivePosition, RelativePosition, RotaryPosition2d

# h rows and w columns of patches, N = h w, D width, K width of a head

Floats = npt.NDArray[np.floating[Any]]

MEANING = {
    "learned-1d": "the cosine between the learned vectors of two places",
    "learned-2d": "the cosine between the learned vectors of two places, a half each for row and column",
    "sincos-2d": "the cosine between the fixed waves of two places",
    "rope-2d": "the mean cosine between a vector turned for one place and the same turned for the other",
    "relative": "the cosine between what is learned for the way from one place to the other and for no way at all",
}
"""What is compared, for each kind of positions."""


@torch.no_grad()
def position_similarity(net: Net, layer: int = 0, image_size: Pair | None = None) -> Floats:
    """h w h w, from -1 to 1: how alike the position of each patch is to that of every other; MEANING says how.

    `layer`, from 0, is for networks that have positions of their own in each. `image` is another
    size than the network's own, for which positions are resampled.
    """
    position = _position(net, layer)
    assert isinstance(net, ViT)
    grid = net.config.grid if image_size is None else net.config.replace(image_size=image_size).grid
    like = next(net.parameters())
    if isinstance(position, AdditivePosition):
        table = F.normalize(position.patch_table(grid, like).double(), dim=1)
        alike = table @ table.T
    elif isinstance(position, RotaryPosition2d):
        cos, sin = (w.double() for w in position.cos_sin(grid, like))
        alike = (cos @ cos.T + sin @ sin.T) / cos.shape[1]
    else:
        assert isinstance(position, RelativePosition)
        alike = _offsets(position, grid)
    return alike.reshape(*grid, *grid).cpu().numpy()


def _position(net: Net, layer: int) -> torch.nn.Module:
    if isinstance(net, BiT):
        raise ModelError("a BiT sees places by convolution: it has no position embeddings.")
    if not net.positions:
        raise ModelError("this model has no positions: to it, an image is a heap of patches in any order.")
    if not 0 <= layer < max(len(net.positions), 1):
        where = f"in layers 1 to {len(net.positions)}" if len(net.positions) > 1 else "once, for all layers"
        raise ModelError(f"there are no positions in layer {layer + 1}: this network has them {where}.")
    return net.positions[layer]


def _offsets(position: RelativePosition, grid: tuple[int, int]) -> Tensor:
    """N N."""
    if grid != position.grid:
        raise ModelError("relative positions cannot be resampled: they exist for the size the model was built for.")
    table = F.normalize(position.offsets.double(), dim=1)
    count = grid[0] * grid[1]
    alike = table @ table[count - 1]  # to no offset
    steps = torch.arange(count, device=alike.device)
    return alike[steps[:, None] - steps[None] + count - 1]
