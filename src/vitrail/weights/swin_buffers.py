"""The buffers of Swin Transformers that Microsoft's and torchvision's files store."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.config import SwinConfig
from vitrail.models.swin_layers import log_distances, relative_position_index
from vitrail.models.windows import window_plan
from vitrail.weights.swin_names import SwinNaming


def swin_buffers(config: SwinConfig, naming: SwinNaming) -> dict[str, Tensor]:
    """Name -> buffer, so that the library can load the file with strict=True."""
    buffers: dict[str, Tensor] = {}
    like = torch.empty(0)
    for stage, blocks in enumerate(config.depths):
        window, grid = config.table_window(stage), config.stage_grids(config.grid)[stage]
        index = relative_position_index(window, like)
        trained = config.pretrained_window_sizes[stage] if config.pretrained_window_sizes else 0
        rows, columns = (2 * side - 1 for side in window)
        coordinates = log_distances(window, trained, like).view(1, rows, columns, 2)
        for block in range(blocks):
            name = naming.block_name(stage, block)
            attention = f"{name}{naming.attention}"
            buffers[f"{attention}relative_position_index"] = (
                index.flatten() if naming.library == "torchvision" else index
            )
            if config.version == 2:
                buffers[f"{attention}relative_coords_table"] = coordinates
            mask = window_plan(grid, config.window_placement(stage), bool(block % 2), like).mask
            if naming.library == "microsoft" and mask is not None:
                buffers[f"{name}attn_mask"] = torch.zeros(mask.shape).masked_fill_(mask, -100.0)
    return buffers
