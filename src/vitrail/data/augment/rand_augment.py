"""RandAugment (arXiv 1909.13719) as timm's `rand-m9-inc1`, which DeiT was trained with.

Each image gets `num_ops` operations. Each is one of fifteen, equally likely, applied with probability 1/2 at a
magnitude m of 10 that may vary normally, with a random sign if it has two directions. The ranges at m = 10:

    rotate             +-30 degrees            brightness, contrast    factor 1 +- 0.9, at least 0.1
    shear x, shear y   +-0.3                   color, sharpness       the same
    translate x, y     +-0.45 of the side      posterize               1 bit of 8, where m = 0 has 4
    solarize           all levels              auto-contrast           whole
    solarize-add       +110 of 255             equalize, invert        whole

Pixels from outside the image have the mean color. timm chooses between bilinear and bicubic at random; here
it is bilinear. timm's posterize keeps no bits at m = 10; here it keeps one.
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

# Color operations, with one amount per image.
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


# The amount, from a strength of 0 to 1 and a sign. Invert is solarize with threshold 0.
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
    """RandAugment with `num_ops` operations per image at `magnitude` of 10."""

    def __init__(
        self, num_ops: int, magnitude: float, magnitude_std: float, *, size: tuple[int, int], fill: tuple[float, ...]
    ) -> None:
        self.num_ops, self.magnitude, self.magnitude_std, self.size = num_ops, magnitude, magnitude_std, size
        self.fill = np.array(fill, np.float32)

    def draw(self, seeds: rng.Seeds) -> HostParams:
        draws = rng.uniform_np(seeds, RAND, 3 * self.num_ops).astype(np.float64).reshape(len(seeds), -1, 3)
        spread = rng.normal_np(seeds, STRENGTH, self.num_ops)
        strength = np.clip(self.magnitude + self.magnitude_std * spread.astype(np.float64), 0, 10) / 10
        params: HostParams = {"fill": self.fill_for(len(seeds))}
        for layer in range(self.num_ops):
            apply_draw, choice, sign = draws[:, layer].T
            operation = np.where(apply_draw < APPLY_PROB, (len(OPERATIONS) * choice).astype(np.int64), -1)
            named = self._layer(operation, strength[:, layer], np.where(sign < 0.5, -1.0, 1.0))
            params |= {f"{name} {layer}": array for name, array in named.items()}
        return params

    def fill_for(self, count: int) -> npt.NDArray[np.float32]:
        """The color of pixels from outside the image: count C 1 1."""
        return np.tile(self.fill[:, None, None], (count, 1, 1, 1))

    def _layer(self, operation: npt.NDArray[np.int64], strength: Amount, sign: Amount) -> HostParams:
        """For each color operation its images, one amount per image, and one matrix for the geometric operations."""
        is_operation = {name: operation == number for number, name in enumerate(OPERATIONS)}
        amount = np.zeros_like(strength)
        for name, make in AMOUNTS.items():
            amount = np.where(is_operation[name], make(strength, sign), amount)
        params: HostParams = {name: is_operation[name] for name in COLOR_OPERATIONS}
        params["solarize"] = is_operation["solarize"] | is_operation["invert"]
        params["amount"] = amount.astype(np.float32)
        params["affine"] = operation >= len(AMOUNTS)
        params["matrix"] = self._matrices(is_operation, strength * sign).astype(np.float32)
        return params

    def _matrices(self, is_operation: dict[str, npt.NDArray[np.bool_]], by: Amount) -> npt.NDArray[np.float64]:
        zeros = np.zeros_like(by)
        by_name = {
            "rotate": rotation(30 * by, self.size),
            "shear x": shear(0.3 * by, zeros),
            "shear y": shear(zeros, 0.3 * by),
            "translate x": translation(0.45 * by * self.size[1], zeros),
            "translate y": translation(zeros, 0.45 * by * self.size[0]),
        }
        out = identity(len(by))
        for name, matrices in by_name.items():
            out = np.where(is_operation[name][:, None, None], matrices, out)
        return out

    def apply(self, images: Tensor, params: DeviceParams) -> Tensor:
        for layer in range(self.num_ops):
            images = apply_to_subset(
                params[f"affine {layer}"], images, affine, params[f"matrix {layer}"], params["fill"]
            )
            for name, operation in COLOR_OPERATIONS.items():
                images = apply_to_subset(params[f"{name} {layer}"], images, operation, params[f"amount {layer}"])
        return images
