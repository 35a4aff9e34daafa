"""Color jitter: random changes of brightness, contrast, saturation and hue, in a random order per image.

As torchvision's ColorJitter: factors are uniform in [max(0, 1 - strength), 1 + strength], the hue's shift in
[-strength, strength]; strength 0 disables an operation.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from vitrail import rng
from vitrail.data.augment import color
from vitrail.data.augment.params import DeviceParams, HostParams, apply_to_subset

JITTER = rng.stream_id("jitter")

JITTER_OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "brightness": color.brightness,
    "contrast": color.contrast,
    "saturation": color.saturation,
    "hue": color.hue,
}


class ColorJitter:
    """Color jitter with the strengths of brightness, contrast, saturation and hue."""

    def __init__(self, strengths: tuple[float, float, float, float]) -> None:
        named = zip(JITTER_OPERATIONS, strengths, strict=True)
        self.strengths = {name: strength for name, strength in named if strength > 0}

    def draw(self, seeds: rng.Seeds) -> HostParams:
        """For each operation its amount, and for each position in the order whether it is applied there."""
        count = len(JITTER_OPERATIONS)
        draws = rng.uniform_np(seeds, JITTER, 2 * count).astype(np.float64)
        amounts = dict(zip(JITTER_OPERATIONS, draws[:, :count].T, strict=True))
        sort_keys = dict(zip(JITTER_OPERATIONS, draws[:, count:].T, strict=True))
        order = np.argsort(np.stack([sort_keys[name] for name in self.strengths], axis=1), axis=1, kind="stable")
        params: HostParams = {}
        for number, (name, strength) in enumerate(self.strengths.items()):
            low, high = (-strength, strength) if name == "hue" else (max(0.0, 1 - strength), 1 + strength)
            params[name] = (low + (high - low) * amounts[name]).astype(np.float32)
            for position in range(len(self.strengths)):
                params[f"{name} {position}"] = order[:, position] == number
        return params

    def apply(self, images: Tensor, params: DeviceParams) -> Tensor:
        for position in range(len(self.strengths)):
            for name in self.strengths:
                images = apply_to_subset(params[f"{name} {position}"], images, JITTER_OPERATIONS[name], params[name])
        return images
