"""Mixup (arXiv 1710.09412) and CutMix (arXiv 1905.04899), image by image, within groups of the batch.

A global batch is divided into groups of consecutive slots that never span two processes. Partners follow a
random cycle through the group: no image is its own partner, all others of the group are equally likely, and
no process needs images of another. Consecutive slots hold images in random order, so partners are random
pairs of the data. Unreadable images are not mixed into others.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitrail import rng
from vitrail.data.augment.params import DeviceParams, HostParams, per_image
from vitrail.data.augment.random_erasing import box_mask

# b images, C channels, H W pixels, K classes

Slots = npt.NDArray[np.int64]
"""Positions in the global batch."""
MIX, PARTNERS = rng.stream_id("mix"), rng.stream_id("partners")


def mix_groups(slots: Slots, batch_size: int, group_size: int) -> Slots:
    """The group of each slot: `group_size` consecutive slots; the last group includes the remainder of the batch."""
    groups: Slots = np.minimum(slots // group_size, max(batch_size // group_size - 1, 0))
    return groups


def mix_partners(seed: int, step: int, slots: Slots, *, batch_size: int, group_size: int, repeats: int = 1) -> Slots:
    """For each slot the row of its partner in `slots`, which must hold whole groups.

    With `repeats`, consecutive slots hold the same image: the cycle then visits the first copies of the
    group's images, then the second copies, and so on, so that the partner is another image.
    """
    group = mix_groups(slots, batch_size, group_size)
    positions = step * batch_size + slots
    first = np.maximum(slots - positions % repeats, group * group_size)  # the slot of the first copy in this group
    draws = rng.bits_np(rng.sample_seeds(seed, step, first), PARTNERS, 1)[:, 0]
    cycle = np.lexsort((draws, slots - first, group))  # group by group
    starts = np.flatnonzero(np.diff(group[cycle], prepend=-1))
    next_in_cycle = np.arange(1, len(slots) + 1)
    next_in_cycle[np.append(starts[1:], len(slots)) - 1] = starts
    partners = np.empty_like(slots)
    partners[cycle] = cycle[next_in_cycle]
    return partners


def beta_quantile(uniform: npt.NDArray[np.float64], alpha: float) -> npt.NDArray[np.float64]:
    """Beta(alpha, alpha) from uniform numbers in [0, 1), by the inverse of its distribution function."""
    # Imported here because the import is slow and the loader's workers do not need it.
    from scipy.special import betaincinv  # type: ignore[import-untyped]

    out: npt.NDArray[np.float64] = betaincinv(alpha, alpha, uniform + 2**-25)  # the middle of each step
    return out


class MixupCutMix:
    """Mixup or CutMix with probability `prob`, half of it each if both alphas are above 0."""

    def __init__(self, mixup: float, cutmix: float, prob: float, size: tuple[int, int]) -> None:
        self.mixup, self.cutmix, self.prob, self.size = mixup, cutmix, prob, size

    def draw(self, seeds: rng.Seeds, *, disabled: bool = False) -> HostParams:
        """`lam`: weight of the image itself; `boxes`: the part that CutMix replaces (empty for mixup).

        If `disabled`, no image is mixed.
        """
        draws = rng.uniform_np(seeds, MIX, 5).astype(np.float64)
        mixed = draws[:, 0] < (0 if disabled else self.prob)
        cut = mixed & (draws[:, 1] >= (0.5 if self.mixup and self.cutmix else 0.0 if self.cutmix else 1.0))
        blended = mixed & ~cut
        lam = np.ones(len(seeds))
        lam[blended] = beta_quantile(draws[blended, 2], self.mixup) if blended.any() else 1
        boxes = np.zeros((len(seeds), 4), np.int64)
        boxes[cut] = self._boxes(beta_quantile(draws[cut, 2], self.cutmix), draws[cut, 3:]) if cut.any() else 0
        lam[cut] = 1 - boxes[cut, 2] * boxes[cut, 3] / (self.size[0] * self.size[1])
        return {"lam": lam.astype(np.float32), "boxes": boxes, "cut": cut.astype(np.float32)}

    def _boxes(self, lam: npt.NDArray[np.float64], center: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """Boxes with the image's aspect ratio and 1 - lam of its area, around a random pixel, clipped (the paper's)."""
        sides = np.array(self.size)
        half = (sides * np.sqrt(1 - lam)[:, None]).astype(np.int64) // 2
        middle = (center * sides).astype(np.int64)
        first, last = np.maximum(middle - half, 0), np.minimum(middle + half, sides)
        return np.concatenate([first, last - first], axis=1)


def mix_images(images: Tensor, partners: Tensor, readable: Tensor, params: DeviceParams) -> Tensor:
    """Mix images with their partners, b C H W; partners that are not `readable` (b bool) have weight 0."""
    boxes = box_mask(params["boxes"], images.shape[2], images.shape[3])  # b 1 H W
    lam = torch.where(per_image(params["cut"] > 0), (~boxes).to(torch.float32), per_image(params["lam"]))
    lam = torch.where(per_image(readable), lam, 1)
    return images * lam + partners * (1 - lam)


def mix_targets(targets: Tensor, partners: Tensor, readable: Tensor, params: DeviceParams) -> Tensor:
    """`mix_images` for soft targets, b K."""
    lam = torch.where(readable, params["lam"], 1)[:, None]
    return targets * lam + partners * (1 - lam)


def one_hot(targets: Tensor, num_classes: int) -> Tensor:
    """Class indices b -> b K float32, one-hot; no label (-1) is a row of zeros."""
    return (targets[:, None] == torch.arange(num_classes, device=targets.device)).to(torch.float32)
