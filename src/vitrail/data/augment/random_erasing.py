"""Random erasing (arXiv 1708.04896): replaces a rectangle by noise, as timm's `pixel` mode does.

It follows normalization, where standard normal noise has about the distribution of an image's values. The
rectangle's height over width is log-uniform between 0.3 and 1 / 0.3; up to ten tries to fit, else none.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vitrail import rng
from vitrail.data.augment.crop import sample_boxes
from vitrail.data.augment.params import DeviceParams, HostParams, apply_to_subset

ERASE, WHERE, NOISE = (rng.stream_id(name) for name in ("erase", "erase where", "erase noise"))
RATIO = (0.3, 1 / 0.3)


class RandomErasing:
    """Erases with probability `prob` a fraction of the area within `scale`, in images of one size."""

    def __init__(self, prob: float, scale: tuple[float, float], size: tuple[int, int]) -> None:
        self.prob, self.scale, self.size = prob, scale, size

    def draw(self, seeds: rng.Seeds) -> HostParams:
        sizes = np.tile(np.array(self.size, np.int64), (len(seeds), 1))
        boxes, fits = sample_boxes(seeds, WHERE, sizes, self.scale, RATIO, margin=1)
        selected = rng.uniform_np(seeds, ERASE, 1)[:, 0] < self.prob
        return {"which": selected & fits, "boxes": boxes, "seeds": seeds.view(np.int64)}

    def apply(self, images: Tensor, params: DeviceParams) -> Tensor:
        def noisy(images: Tensor, boxes: Tensor, seeds: Tensor) -> Tensor:
            noise = rng.normal(seeds, NOISE, images[0].numel(), params["quantiles"])
            return erase(images, boxes, noise.view_as(images))

        return apply_to_subset(params["which"], images, noisy, params["boxes"], params["seeds"])


def erase(images: Tensor, boxes: Tensor, noise: Tensor) -> Tensor:
    """Fill the box (b 4: top, left, height, width) of each image from `noise`, b C H W."""
    return torch.where(box_mask(boxes, images.shape[2], images.shape[3]), noise, images)


def box_mask(boxes: Tensor, height: int, width: int) -> Tensor:
    """b 1 H W: whether a pixel is inside its image's box."""
    top, left, h, w = (side[:, None] for side in boxes.unbind(1))
    rows, columns = torch.arange(height, device=boxes.device), torch.arange(width, device=boxes.device)
    down, across = (rows >= top) & (rows < top + h), (columns >= left) & (columns < left + w)  # b H, b W
    return (down[:, :, None] & across[:, None])[:, None]
