"""What a network knows of places: how alike the positions of its patches are (the paper's Fig. 7, centre)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vitrail.errors import ModelError
from vitrail.models import BiT, Net
from vitrail.models.position import Additive

# h rows and w columns of patches

Floats = npt.NDArray[np.floating[Any]]


@torch.no_grad()
def position_similarity(net: Net) -> Floats:
    """h w h w: the cosine between the position of each patch and that of every other (the paper's Fig. 7)."""
    if isinstance(net, BiT):
        raise ModelError("a BiT sees places by convolution: it has no position embeddings.")
    if not net.positions:
        raise ModelError("this model has no positions: to it, a picture is a heap of patches in any order.")
    first = net.positions[0]
    if not isinstance(first, Additive):
        kind = {"relative": "offsets between patches", "rope-2d": "angles that turn queries and keys"}
        raise ModelError(f"its positions are {kind[net.config.position]}, not vectors that could be compared.")
    grid = net.config.grid
    like = next(net.parameters())
    table = first.patches(grid, like).double()
    table = torch.nn.functional.normalize(table, dim=1)
    return (table @ table.T).reshape(*grid, *grid).cpu().numpy()
