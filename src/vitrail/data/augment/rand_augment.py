"""RandAugment (arXiv 1909.13719), as timm's `rand-m9-inc1` has it, with which DeiT was trained.

To each image so many times: one of fifteen operations, all alike, with a chance of a half, at a
strength m of 10 that may vary normally, and a random sign where it has two directions. The ranges,
at m = 10:

    rotate             +-30 degrees            brightness, contrast    factor 1 +- 0.9, at least 0.1
    shear x, shear y   +-0.3                   color, sharpness       the same
    translate x, y     +-0.45 of the side      posterize               1 bit of 8, where m = 0 has 4
    solarize           all levels              auto-contrast           whole
    solarize-add       +110 of 255             equalize, invert        whole

Where an image is moved, the color of the mean comes in. timm mixes bilinear and bicubic at random
there; here it is bilinear. timm's posterize keeps no bit at all at m = 10; here it leaves one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from vitrail import rng
from vitrail.data.augment import color
from vitrail.data.augment.affine import affine, identity, rotation, shear, translation
from vitrail.data.augment.params import DeviceParams, HostParams, apply_to_subset

RAND, STRENGTH = rng.stream_id("rand"), rng.stream_id("strength")
APPLY_PROB = 0.5

Amount = npt.NDArray[np.float64]

# What is done to the colors, given one number for each image.
COLOR_OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "brightness": color.brightness,
    "contrast": color.contrast,
    "color": color.saturation,
    "sharpness": color.sharpness,
    "posterize": color.posterize,
    "solarize": color.solarize,
    "solarize-add": color.solarize_add,
    "auto-contrast": lambda images, _: color.auto_contrast(images),
    "equalize": lambda images, _: color.equalize(images),
}


def _enhance_factor(strength: Amount, sign: Amount) -> Amount:
    return np.maximum(0.1, 1 + 0.9 * strength * sign)


# That number, from a strength of 0 to 1 and a sign. To invert is to solarize from level 0 on.
AMOUNTS: dict[str, Callable[[Amount, Amount], Amount]] = {
    "brightness": _enhance_factor,
    "contrast": _enhance_factor,
    "color": _enhance_factor,
    "sharpness": _enhance_factor,
    "posterize": lambda strength, _: np.maximum(1, 4 - np.floor(4 * strength)),
    "solarize": lambda strength, _: 256 - np.floor(256 * strength),
    "solarize-add": lambda strength, _: np.floor(110 * strength),
    "invert": lambda strength, _: np.zeros_like(strength),
    "auto-contrast": lambda strength, _: strength,
    "equalize": lambda strength, _: strength,
}

GEOMETRIC_OPERATIONS = ("rotate", "shear x", "shear y", "translate x", "translate y")
OPERATIONS = (*AMOUNTS, *GEOMETRIC_OPERATIONS)


class RandAugment:
    """`layers` operations to an image, of strength `magnitude` of 10."""

    def __init__(
        self, layers: int, magnitude: float, magnitude_std: float, *, size: tuple[int, int], fill: tuple[float, ...]
    ) -> None:
        self.layers, self.magnitude, self.magnitude_std, self.size = layers, magnitude, magnitude_std, size
        self.fill = np.array(fill, np.float32)

    def draw(self, keys: rng.Seeds) -> HostParams:
        draws = rng.uniform_np(keys, RAND, 3 * self.layers).astype(np.float64).reshape(len(keys), -1, 3)
        spread = rng.normal_np(keys, STRENGTH, self.layers)
        strength = np.clip(self.magnitude + self.magnitude_std * spread.astype(np.float64), 0, 10) / 10
        drawn: HostParams = {"fill": self.fill_for(len(keys))}
        for layer in range(self.layers):
            happens, choice, sign = draws[:, layer].T
            operation = np.where(happens < APPLY_PROB, (len(OPERATIONS) * choice).astype(np.int64), -1)
            named = self._layer(operation, strength[:, layer], np.where(sign < 0.5, -1.0, 1.0))
            drawn |= {f"{name} {layer}": array for name, array in named.items()}
        return drawn

    def fill_for(self, count: int) -> npt.NDArray[np.float32]:
        """The color that comes in: count C 1 1."""
        return np.tile(self.fill[:, None, None], (count, 1, 1, 1))

    def _layer(self, operation: npt.NDArray[np.int64], strength: Amount, sign: Amount) -> HostParams:
        """Who has which change, with what amount; and one matrix for all moves together."""
        chosen = {name: operation == number for number, name in enumerate(OPERATIONS)}
        amount = np.zeros_like(strength)
        for name, make in AMOUNTS.items():
            amount = np.where(chosen[name], make(strength, sign), amount)
        drawn: HostParams = {name: chosen[name] for name in COLOR_OPERATIONS}
        drawn["solarize"] = chosen["solarize"] | chosen["invert"]
        drawn["amount"] = amount.astype(np.float32)
        drawn["move"] = operation >= len(AMOUNTS)
        drawn["matrix"] = self._matrices(chosen, strength * sign).astype(np.float32)
        return drawn

    def _matrices(self, chosen: dict[str, npt.NDArray[np.bool_]], by: Amount) -> npt.NDArray[np.float64]:
        none = np.zeros_like(by)
        made = {
            "rotate": rotation(30 * by, self.size),
            "shear x": shear(0.3 * by, none),
            "shear y": shear(none, 0.3 * by),
            "translate x": translation(0.45 * by * self.size[1], none),
            "translate y": translation(none, 0.45 * by * self.size[0]),
        }
        out = identity(len(by))
        for name, matrices in made.items():
            out = np.where(chosen[name][:, None, None], matrices, out)
        return out

    def apply(self, images: Tensor, drawn: DeviceParams) -> Tensor:
        for layer in range(self.layers):
            images = apply_to_subset(drawn[f"move {layer}"], images, affine, drawn[f"matrix {layer}"], drawn["fill"])
            for name, change in COLOR_OPERATIONS.items():
                images = apply_to_subset(drawn[f"{name} {layer}"], images, change, drawn[f"amount {layer}"])
        return images
