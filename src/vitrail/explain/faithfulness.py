"""Whether an explanation can be trusted: deletion and insertion curves (Petsiuk, Das and Saenko, 2018).

Patches are hidden in the order in which the explanation holds them important, most important first;
if it is right, the class's probability falls at once (deletion). Or they are uncovered in the same
order on an image out of focus, and it rises at once (insertion). The area under the curve sums it
up: small is good for deletion, large for insertion. A random order is what to beat.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.explain.hiding import Fill, filling, hidden, scores, seen
from vitrail.models import Net

# N patches in h rows and w columns, S + 1 shares from 0 to 1

Floats = npt.NDArray[np.float64]
RANDOM = "random"
ORDERS = 4
"""Random orders whose curves are averaged, where nothing else is asked for."""


@dataclass(frozen=True)
class Curve:
    """The class's probability while patches are hidden or uncovered."""

    shares: Floats
    """S + 1, from 0 to 1: of the patches that are hidden (deletion) or shown (insertion)."""
    values: Floats
    """S + 1: the class's probability."""

    @property
    def area(self) -> float:
        """Under the curve, by trapezia: 0 to 1."""
        return float(np.trapezoid(self.values, self.shares))


@dataclass(frozen=True)
class Faithfulness:
    """Both curves of one explanation."""

    deletion: Curve
    insertion: Curve

    @property
    def gain(self) -> float:
        """Insertion's area less deletion's: larger is better."""
        return self.insertion.area - self.deletion.area


def faithfulness(
    net: Net,
    image: Tensor,
    maps: Mapping[str, Tensor],
    target: int,
    *,
    steps: int = 14,
    orders: int = ORDERS,
    delete_with: Fill = "mean",
    insert_into: Fill = "blur",
    seed: int = 0,
    batch_size: int = 32,
    multi_label: bool = False,
) -> dict[str, Faithfulness]:
    """One image C H W, explanations h w by name and a class number -> both curves of each, and of chance.

    Patches go in `steps` portions that are as equal as can be; of equally important ones the first goes
    first. several: an image may have several of the classes.
    """
    if steps < 1 or orders < 0:
        raise ConfigError(f"steps={steps}, orders={orders}: wanted one step or more, and no fewer than 0 orders.")
    ranked = {name: [torch.argsort(m.flatten().cpu(), descending=True, stable=True)] for name, m in maps.items()}
    grids = {tuple(m.shape) for m in maps.values()}
    if len(grids) != 1:
        raise ConfigError(f"the explanations have grids {sorted(grids)}; wanted one grid for all of them.")
    (grid,) = grids
    (image,) = seen(net, image[None])
    count = grid[0] * grid[1]
    generator = torch.Generator().manual_seed(seed)
    if orders:
        ranked[RANDOM] = [torch.randperm(count, generator=generator) for _ in range(orders)]
    ends = np.unique(np.rint(np.linspace(0, count, steps + 1)).astype(int))
    shares = ends / count
    ways = {
        "deletion": (filling(image[None], delete_with)[0], False),
        "insertion": (filling(image[None], insert_into)[0], True),
    }
    found: dict[str, Faithfulness] = {}
    for name, tries in ranked.items():
        curves = {}
        for way, (instead, inserting) in ways.items():
            images = _images(image, instead, tries, ends.tolist(), grid, inserting)
            values = scores(net, images, target, batch_size, multi_label=multi_label).double().numpy()
            curves[way] = Curve(shares, values.reshape(len(tries), len(ends)).mean(0))
        found[name] = Faithfulness(**curves)
    return found


def _images(
    image: Tensor, instead: Tensor, ranked: list[Tensor], ends: list[int], grid: tuple[int, ...], inserting: bool
) -> Iterator[Tensor]:
    for order in ranked:
        for end in ends:
            mask = torch.zeros(order.numel(), dtype=torch.bool)
            mask[order[:end]] = True
            cover = (~mask if inserting else mask).view(1, *grid).to(image.device)
            yield hidden(image, instead, cover)[0]
