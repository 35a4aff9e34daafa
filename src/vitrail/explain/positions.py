"""Similarity of the position embeddings of all pairs of patches (the paper's Fig. 7, center)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.config import Pair
from vitrail.errors import ModelError
from vitrail.models import BiT, Net, Swin, ViT
from vitrail.models.position import AdditivePosition, RelativePosition, RotaryPosition2d

# h rows and w columns of patches, N = h w, D width, K width of a head

Floats = npt.NDArray[np.floating[Any]]

SIMILARITY_MEANING = {
    "learned-1d": "cosine similarity of the learned embeddings",
    "learned-2d": "cosine similarity of the learned embeddings (half for the row, half for the column)",
    "sincos-2d": "cosine similarity of the sine-cosine embeddings",
    "rope-2d": "mean cosine between a vector rotated for one position and for the other",
    "relative": "cosine similarity to the embedding of offset 0",
}
"""What the similarity is, for each kind of position embedding."""


@torch.no_grad()
def position_similarity(net: Net, layer: int = 0, image_size: Pair | None = None) -> Floats:
    """h w h w, from -1 to 1: similarity of the positions of each pair of patches (see SIMILARITY_MEANING).

    `layer` is 0-based, for networks with separate positions in each layer. `image_size`: resample the positions for
    this size first.
    """
    position = _position(net, layer)
    assert isinstance(net, ViT)
    grid = net.config.grid if image_size is None else net.config.replace(image_size=image_size).grid
    like = next(net.parameters())
    if isinstance(position, AdditivePosition):
        table = F.normalize(position.patch_table(grid, like).double(), dim=1)
        similarity = table @ table.T
    elif isinstance(position, RotaryPosition2d):
        cos, sin = (w.double() for w in position.cos_sin(grid, like))
        similarity = (cos @ cos.T + sin @ sin.T) / cos.shape[1]
    else:
        assert isinstance(position, RelativePosition)
        similarity = _offsets(position, grid)
    return similarity.reshape(*grid, *grid).cpu().numpy()


def _position(net: Net, layer: int) -> torch.nn.Module:
    if isinstance(net, BiT):
        raise ModelError("a BiT has no position embeddings.")
    if isinstance(net, Swin):
        raise ModelError("a Swin Transformer has no position embeddings, but biases for distances inside windows.")
    if not net.positions:
        raise ModelError("this model has no position embeddings.")
    if not 0 <= layer < max(len(net.positions), 1):
        where = f"in layers 1 to {len(net.positions)}" if len(net.positions) > 1 else "once, for all layers"
        raise ModelError(f"there are no position embeddings in layer {layer + 1}: this network has them {where}.")
    return net.positions[layer]


def _offsets(position: RelativePosition, grid: tuple[int, int]) -> Tensor:
    """N N."""
    if grid != position.grid:
        raise ModelError("relative positions cannot be resampled to another image size.")
    table = F.normalize(position.offsets.double(), dim=1)
    count = grid[0] * grid[1]
    similarity = table @ table[count - 1]  # offset 0
    steps = torch.arange(count, device=similarity.device)
    return similarity[steps[:, None] - steps[None] + count - 1]
