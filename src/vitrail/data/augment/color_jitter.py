"""Color jitter: brightness, contrast, saturation and hue changed a little, in an order of each image's own.

torchvision's ColorJitter: a factor is uniform in [max(0, 1 - strength), 1 + strength], a turn of the
hue in [-strength, strength]; a strength of 0 leaves its change out.
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
    """Strengths of brightness, contrast, saturation and hue."""

    def __init__(self, strengths: tuple[float, float, float, float]) -> None:
        named = zip(JITTER_OPERATIONS, strengths, strict=True)
        self.strengths = {name: strength for name, strength in named if strength > 0}

    def draw(self, keys: rng.Seeds) -> HostParams:
        """A number for each change, and for each of its possible places in the order whether it is there."""
        count = len(JITTER_OPERATIONS)
        draws = rng.uniform_np(keys, JITTER, 2 * count).astype(np.float64)
        amounts = dict(zip(JITTER_OPERATIONS, draws[:, :count].T, strict=True))
        places = dict(zip(JITTER_OPERATIONS, draws[:, count:].T, strict=True))
        order = np.argsort(np.stack([places[name] for name in self.strengths], axis=1), axis=1, kind="stable")
        drawn: HostParams = {}
        for number, (name, strength) in enumerate(self.strengths.items()):
            low, high = (-strength, strength) if name == "hue" else (max(0.0, 1 - strength), 1 + strength)
            drawn[name] = (low + (high - low) * amounts[name]).astype(np.float32)
            for place in range(len(self.strengths)):
                drawn[f"{name} {place}"] = order[:, place] == number
        return drawn

    def apply(self, images: Tensor, drawn: DeviceParams) -> Tensor:
        for place in range(len(self.strengths)):
            for name in self.strengths:
                images = apply_to_subset(drawn[f"{name} {place}"], images, JITTER_OPERATIONS[name], drawn[name])
        return images
