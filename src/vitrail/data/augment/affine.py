"""Affine transforms (rotation, shear, translation): one matrix per image, output pixel -> input pixel.

Pixels are squares; the first has its center at (0.5, 0.5). Matrices are computed on the host in float64, with
Pillow's conventions: rotations are about the image's center, shears keep the top left corner.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import grid_sample

# b images, C channels, H W pixels

Numbers = npt.NDArray[np.floating[Any]]
Matrices = npt.NDArray[np.float64]
"""n 2 3: (x, y) of the input = first two columns times (x, y) of the output, plus the third."""


def identity(count: int) -> Matrices:
    return np.tile(np.eye(2, 3), (count, 1, 1))


def rotation(degrees: Numbers, size: tuple[int, int]) -> Matrices:
    """Counterclockwise about the center of images of size (height, width)."""
    turn = np.deg2rad(degrees.astype(np.float64))
    out = np.empty((len(turn), 2, 3))
    out[:, 0, 0] = out[:, 1, 1] = np.cos(turn)
    out[:, 0, 1], out[:, 1, 0] = -np.sin(turn), np.sin(turn)
    middle = np.array([size[1] / 2, size[0] / 2])
    out[:, :, 2] = middle - (out[:, :, :2] * middle).sum(-1)
    return out


def shear(x: Numbers, y: Numbers) -> Matrices:
    """Shift each row by x pixels more than the row above, each column by y more than the column to its left."""
    out = identity(len(x))
    out[:, 0, 1], out[:, 1, 0] = x, y
    return out


def translation(x: Numbers, y: Numbers) -> Matrices:
    """Move left by x and up by y pixels."""
    out = identity(len(x))
    out[:, 0, 2], out[:, 1, 2] = x, y
    return out


def affine(images: Tensor, matrix: Tensor, fill: Tensor) -> Tensor:
    """Transform each image by its matrix (b 2 3, float32), bilinear; outside is the color `fill`, [b] C 1 1."""
    height, width = images.shape[2:]
    x = torch.arange(width, device=images.device) + 0.5
    y = (torch.arange(height, device=images.device) + 0.5)[:, None]
    rows = matrix[:, :, :, None, None]  # b 2 3 1 1
    at = [rows[:, i, 0] * x + rows[:, i, 1] * y + rows[:, i, 2] for i in (0, 1)]  # each b H W
    grid = torch.stack([at[0] * (2 / width) - 1, at[1] * (2 / height) - 1], dim=-1)
    return grid_sample(images - fill, grid, padding_mode="zeros", align_corners=False) + fill
