"""3-Augment (DeiT III, arXiv 2204.07118): each image is converted to grayscale, solarized or blurred.

The paper's parameters: solarize inverts levels of 128 and above; the blur's standard deviation is uniform
between 0.1 and 2 pixels. Pillow, which the paper's code uses, approximates the Gaussian by box filters; here
it is exact, truncated at 6 pixels (three standard deviations of the widest).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from vitrail import rng
from vitrail.data.augment import color
from vitrail.data.augment.params import DeviceParams, HostParams, apply_to_subset

THREE = rng.stream_id("three")
SOLARIZE_THRESHOLD = 128.0
BLUR_STD = (0.1, 2.0)
BLUR_RADIUS = 6


class ThreeAugment:
    def draw(self, seeds: rng.Seeds) -> HostParams:
        draws = rng.uniform_np(seeds, THREE, 2).astype(np.float64)
        choice = (3 * draws[:, 0]).astype(np.int64)
        return {
            "gray": choice == 0,
            "solarize": choice == 1,
            "threshold": np.full(len(seeds), SOLARIZE_THRESHOLD, np.float32),
            "blur": choice == 2,
            "weights": gaussian_weights(BLUR_STD[0] + (BLUR_STD[1] - BLUR_STD[0]) * draws[:, 1], BLUR_RADIUS),
        }

    def apply(self, images: Tensor, params: DeviceParams) -> Tensor:
        images = apply_to_subset(params["gray"], images, color.grayscale)
        images = apply_to_subset(params["solarize"], images, color.solarize, params["threshold"])
        return apply_to_subset(params["blur"], images, color.blur, params["weights"])


def gaussian_weights(std: npt.NDArray[np.float64], radius: int) -> npt.NDArray[np.float32]:
    """Gaussian weights at distance 0 to `radius`, n radius + 1; both sides together sum to 1."""
    weights = np.exp(-0.5 * (np.arange(radius + 1) / std[:, None]) ** 2)
    return (weights / (weights[:, :1] + 2 * weights[:, 1:].sum(1, keepdims=True))).astype(np.float32)
