"""Mixup (arXiv 1710.09412) and CutMix (arXiv 1905.04899), image by image, within groups of the batch.

A global batch is cut into groups of consecutive slots that never span two processes. The partners in a
group are a random cycle through it: no image is its own partner, every other one of the group is equally
likely, and no process needs the images of another. Consecutive slots hold images in random order, so
partners are random pairs of the data. An image that could not be read is mixed into none.
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
"""Places in the global batch."""
MIX, PARTNERS = rng.stream_id("mix"), rng.stream_id("partners")


def mix_groups(slots: Slots, batch_size: int, group_size: int) -> Slots:
    """The group of each slot: `size` consecutive ones; the last group takes the remainder of the batch too."""
    found: Slots = np.minimum(slots // group_size, max(batch_size // group_size - 1, 0))
    return found


def mix_partners(seed: int, step: int, slots: Slots, *, batch_size: int, group_size: int, repeats: int = 1) -> Slots:
    """For each slot the row, in `slots`, of its partner; whole groups only.

    With `repeats`, consecutive slots hold the same image: the cycle then goes through the first copy of
    each image of the group, the second ones, and so on, so that the partner is another image.
    """
    group = mix_groups(slots, batch_size, group_size)
    places = step * batch_size + slots
    first = np.maximum(slots - places % repeats, group * group_size)  # the slot of the first copy in this group
    draws = rng.bits_np(rng.sample_seeds(seed, step, first), PARTNERS, 1)[:, 0]
    circle = np.lexsort((draws, slots - first, group))  # group by group
    starts = np.flatnonzero(np.diff(group[circle], prepend=-1))
    following = np.arange(1, len(slots) + 1)
    following[np.append(starts[1:], len(slots)) - 1] = starts
    partners = np.empty_like(slots)
    partners[circle] = circle[following]
    return partners


def beta_quantile(uniform: npt.NDArray[np.float64], alpha: float) -> npt.NDArray[np.float64]:
    """Beta(alpha, alpha) from numbers uniform in [0, 1), by the inverse of its distribution function."""
    # Here, because it is slow to import and the loader's workers never need it.
    from scipy.special import betaincinv  # type: ignore[import-untyped]

    out: npt.NDArray[np.float64] = betaincinv(alpha, alpha, uniform + 2**-25)  # the middle of each step
    return out


class MixupCutMix:
    """With chance `prob`: mixup or CutMix, half and half where both have an alpha above 0."""

    def __init__(self, mixup: float, cutmix: float, prob: float, size: tuple[int, int]) -> None:
        self.mixup, self.cutmix, self.prob, self.size = mixup, cutmix, prob, size

    def draw(self, keys: rng.Seeds, *, disabled: bool = False) -> HostParams:
        """`own`: what an image keeps of itself; `boxes`: what is cut out of it, 0 by 0 for mixup.

        While it `disabled`, every image is left whole.
        """
        draws = rng.uniform_np(keys, MIX, 5).astype(np.float64)
        mixed = draws[:, 0] < (0 if disabled else self.prob)
        cut = mixed & (draws[:, 1] >= (0.5 if self.mixup and self.cutmix else 0.0 if self.cutmix else 1.0))
        blended = mixed & ~cut
        own = np.ones(len(keys))
        own[blended] = beta_quantile(draws[blended, 2], self.mixup) if blended.any() else 1
        boxes = np.zeros((len(keys), 4), np.int64)
        boxes[cut] = self._boxes(beta_quantile(draws[cut, 2], self.cutmix), draws[cut, 3:]) if cut.any() else 0
        own[cut] = 1 - boxes[cut, 2] * boxes[cut, 3] / (self.size[0] * self.size[1])
        return {"own": own.astype(np.float32), "boxes": boxes, "cut": cut.astype(np.float32)}

    def _boxes(self, own: npt.NDArray[np.float64], center: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """Of the image's shape and 1 - own of its area, around any pixel, clipped: the paper's own code."""
        sides = np.array(self.size)
        half = (sides * np.sqrt(1 - own)[:, None]).astype(np.int64) // 2
        middle = (center * sides).astype(np.int64)
        first, last = np.maximum(middle - half, 0), np.minimum(middle + half, sides)
        return np.concatenate([first, last - first], axis=1)


def mix_images(images: Tensor, partners: Tensor, readable: Tensor, drawn: DeviceParams) -> Tensor:
    """Images and their partners, b C H W, into one; a partner that is not `readable` (b bool) leaves no trace."""
    boxes = box_mask(drawn["boxes"], images.shape[2], images.shape[3])  # b 1 H W
    own = torch.where(per_image(drawn["cut"] > 0), (~boxes).to(torch.float32), per_image(drawn["own"]))
    own = torch.where(per_image(readable), own, 1)
    return images * own + partners * (1 - own)


def mix_targets(targets: Tensor, partners: Tensor, readable: Tensor, drawn: DeviceParams) -> Tensor:
    """The same for soft targets, b K."""
    own = torch.where(readable, drawn["own"], 1)[:, None]
    return targets * own + partners * (1 - own)


def one_hot(targets: Tensor, num_classes: int) -> Tensor:
    """Class numbers b -> b K float32, a 1 in each row; no label (-1) is a row of zeros."""
    return (targets[:, None] == torch.arange(num_classes, device=targets.device)).to(torch.float32)
