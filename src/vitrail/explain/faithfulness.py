"""Faithfulness of an explanation: deletion and insertion curves (Petsiuk, Das and Saenko, 2018).

Deletion masks patches in order of importance, most important first: the class probability of a faithful explanation
falls quickly. Insertion reveals patches of a blurred image in the same order: the probability rises quickly. The area
under the curve is the score: small is good for deletion, large for insertion. Random orders are the baseline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.explain.masking import Fill, class_probabilities, covered_pixels, mask_patches, replacement_pixels
from vitrail.models import Net

# N patches in h rows and w columns, S + 1 fractions from 0 to 1

Floats = npt.NDArray[np.float64]
RANDOM = "random"
NUM_RANDOM_ORDERS = 4
"""Default number of random orders whose curves are averaged."""


@dataclass(frozen=True)
class Curve:
    """Class probability as patches are masked or revealed."""

    fractions: Floats
    """S + 1, from 0 to 1: fraction of the patches that are masked (deletion) or revealed (insertion)."""
    values: Floats
    """S + 1 class probabilities."""

    @property
    def area(self) -> float:
        """Area under the curve by the trapezoidal rule, 0 to 1."""
        return float(np.trapezoid(self.values, self.fractions))


@dataclass(frozen=True)
class Faithfulness:
    """Deletion and insertion curve of one explanation."""

    deletion: Curve
    insertion: Curve

    @property
    def gain(self) -> float:
        """Insertion area minus deletion area; larger is better."""
        return self.insertion.area - self.deletion.area


def faithfulness(
    net: Net,
    image: Tensor,
    maps: Mapping[str, Tensor],
    target: int,
    *,
    steps: int = 14,
    orders: int = NUM_RANDOM_ORDERS,
    delete_with: Fill = "mean",
    insert_into: Fill = "blur",
    seed: int = 0,
    batch_size: int = 32,
    multi_label: bool = False,
) -> dict[str, Faithfulness]:
    """Image C H W, explanations h w by name and a class index -> curves of each explanation and of random orders.

    Patches are masked in `steps` groups of nearly equal size; ties are broken by position.
    """
    if steps < 1 or orders < 0:
        raise ConfigError(f"steps={steps}, orders={orders}: expected at least 1 step and at least 0 orders.")
    ranked = {name: [torch.argsort(m.flatten().cpu(), descending=True, stable=True)] for name, m in maps.items()}
    grids = {tuple(m.shape) for m in maps.values()}
    if len(grids) != 1:
        raise ConfigError(f"the explanations have grids {sorted(grids)}; expected one grid for all of them.")
    (grid,) = grids
    (image,) = covered_pixels(net, image[None])
    count = grid[0] * grid[1]
    generator = torch.Generator().manual_seed(seed)
    if orders:
        ranked[RANDOM] = [torch.randperm(count, generator=generator) for _ in range(orders)]
    ends = np.unique(np.rint(np.linspace(0, count, steps + 1)).astype(int))
    fractions = ends / count
    replacements = {
        "deletion": (replacement_pixels(image[None], delete_with)[0], False),
        "insertion": (replacement_pixels(image[None], insert_into)[0], True),
    }
    found: dict[str, Faithfulness] = {}
    for name, rankings in ranked.items():
        curves = {}
        for kind, (replacement, inserting) in replacements.items():
            images = _images(image, replacement, rankings, ends.tolist(), grid, inserting)
            values = class_probabilities(net, images, target, batch_size, multi_label=multi_label).double().numpy()
            curves[kind] = Curve(fractions, values.reshape(len(rankings), len(ends)).mean(0))
        found[name] = Faithfulness(**curves)
    return found


def _images(
    image: Tensor, replacement: Tensor, rankings: list[Tensor], ends: list[int], grid: tuple[int, ...], inserting: bool
) -> Iterator[Tensor]:
    for order in rankings:
        for end in ends:
            mask = torch.zeros(order.numel(), dtype=torch.bool)
            mask[order[:end]] = True
            cover = (~mask if inserting else mask).view(1, *grid).to(image.device)
            yield mask_patches(image, replacement, cover)[0]
