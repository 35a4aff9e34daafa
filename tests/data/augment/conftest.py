"""Photographs, as batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_sample_image
from torch import Tensor


@pytest.fixture(scope="session")
def photos() -> Tensor:
    """Parts of two photographs with little and much in them: 16 x 3 x 40 x 56, uint8."""
    corners = [(20 + 40 * i, 30 + 60 * j) for i in range(4) for j in range(2)]
    parts = [
        load_sample_image(name)[top : top + 40, left : left + 56]
        for name in ("china.jpg", "flower.jpg")
        for top, left in corners
    ]
    return torch.from_numpy(np.stack(parts)).permute(0, 3, 1, 2).contiguous()


@pytest.fixture(scope="session")
def images(photos: Tensor) -> Tensor:
    """The same, float32 in [0, 1]."""
    return photos / 255
