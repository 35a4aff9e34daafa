"""All of it in order: crop, flip, policy, color jitter, normalize, erase, mix."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from vitrail import rng
from vitrail.config import AugmentConfig, PreprocessConfig
from vitrail.data.augment.color_jitter import ColorJitter
from vitrail.data.augment.crop import crop_boxes, flip, resized_crop, sample_flips, sample_shifts, shift
from vitrail.data.augment.mix import MixupCutMix, Slots, mix_images, mix_partners, mix_targets, one_hot
from vitrail.data.augment.params import DeviceParams, HostParams, apply_to_subset, to_device
from vitrail.data.augment.rand_augment import RandAugment
from vitrail.data.augment.random_erasing import RandomErasing
from vitrail.data.augment.three_augment import ThreeAugment
from vitrail.data.batch import Batch
from vitrail.errors import ConfigError, DataError

# b images of this process's part of the global batch, C channels, H W pixels, K classes

CACHE_BYTES = 1 << 20
"""Bytes of float32 images that operations on a CPU pass on to one another without going to memory."""


class Augment:
    """Training's half of the preprocessing: `images, targets = augment(batch)`.

    Three steps, of which the first is on the host and the other two may be compiled:

        draw       step, slots -> everything random, as arrays
        change     images, uint8 -> cropped, colored, normalized, erased: float32
        mix        those and their partners -> images and soft targets

    `cropped` says that the loader's workers have made the resized crop already; shifts, which need
    no more than the image, are always made here. From the step `mix_until_step` on, images are left
    whole and targets stay soft, in the same shapes. `repeats` is how often in a row the batches show the
    same image. With `compile`, shapes are static and every
    operation runs on the whole batch: right for a GPU and small images. Without it, each runs on
    the images it was drawn for.
    """

    def __init__(
        self,
        config: AugmentConfig,
        *,
        preprocess: PreprocessConfig,
        image_size: tuple[int, int],
        num_classes: int,
        batch_size: int,
        seed: int,
        cropped: bool = False,
        mix_until_step: int | None = None,
        repeats: int = 1,
        compile: bool = False,
    ) -> None:
        _check_config(config, image_size, preprocess.channels)
        self.config, self.preprocess, self.image_size, self.num_classes = config, preprocess, image_size, num_classes
        self.batch_size, self.seed, self.mix_until_step, self.repeats = batch_size, seed, mix_until_step, repeats
        self.resizes = config.crop == "resized" and not cropped
        self.policy: RandAugment | ThreeAugment | None = None
        if config.policy == "three":
            self.policy = ThreeAugment()
        elif config.policy == "rand" and config.num_ops:
            strength = (config.magnitude, config.magnitude_std)
            self.policy = RandAugment(config.num_ops, *strength, size=image_size, fill=preprocess.mean)
        self.jitter = ColorJitter(config.color_jitter) if any(config.color_jitter) else None
        self.erase = RandomErasing(config.erase, config.erase_scale, image_size) if config.erase else None
        self.mixer = MixupCutMix(config.mixup, config.cutmix, config.mix_prob, image_size) if config.mixes else None
        self.static_shapes = compile
        self._normalization: dict[torch.device, dict[str, DeviceParams]] = {}
        self._transform, self._mix = self.transform, self.mix
        if compile:
            self._transform = torch.compile(self.transform, fullgraph=True, dynamic=False)
            self._mix = torch.compile(self.mix, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Float32 b C H W for the network, and targets: b class numbers, or b K where they are mixed or several.

        Chance is keyed by `batch.step` and `batch.slots`, which should lie on the CPU: reading them
        from a GPU would make the host wait.
        """
        slots = batch.slots.cpu().numpy()
        self._check_batch(batch, slots)
        drawn = self.draw(batch.step, slots, (batch.images.shape[2], batch.images.shape[3]))
        device = batch.images.device
        mixing = drawn.pop("mix", None)
        if device.type == "cpu" and not self.static_shapes:
            images = self._transform_in_chunks(batch.images, drawn)
        else:
            images = self._transform_batch(batch.images, drawn)
        if mixing is None:
            return images, batch.targets
        return self._mix(
            images, batch.targets, batch.weights, to_device({"mix": mixing}, device, self.static_shapes)["mix"]
        )

    def draw(self, step: int, slots: Slots, size: tuple[int, int]) -> dict[str, HostParams]:
        """Everything random about these places in the global batch; images are of `size`."""
        config, keys = self.config, rng.sample_seeds(self.seed, step, slots)
        drawn: dict[str, HostParams] = {"view": {}}
        if self.resizes:
            drawn["view"]["boxes"] = crop_boxes(keys, np.tile(size, (len(keys), 1)), config.scale, config.ratio)
        elif config.crop == "pad" and config.pad:
            drawn["view"]["shift"] = sample_shifts(keys, config.pad)
        if config.flip:
            drawn["view"]["flip"] = sample_flips(keys, config.flip)
        parts = {"policy": self.policy, "jitter": self.jitter, "erase": self.erase}
        drawn |= {name: part.draw(keys) for name, part in parts.items() if part is not None}
        if self.mixer is not None:
            drawn["mix"] = self.mixer.draw(
                keys, disabled=self.mix_until_step is not None and step >= self.mix_until_step
            )
            drawn["mix"]["partners"] = mix_partners(
                self.seed, step, slots, batch_size=self.batch_size, group_size=config.mix_group, repeats=self.repeats
            )
        return drawn

    def _transform_batch(self, images: Tensor, drawn: dict[str, HostParams], out: Tensor | None = None) -> Tensor:
        device = images.device
        if device not in self._normalization:
            colors = {"mean": self.preprocess.mean, "std": self.preprocess.std}
            arrays = {name: np.array(values, np.float32)[:, None, None] for name, values in colors.items()}
            self._normalization |= {device: to_device({"normalize": arrays}, device, self.static_shapes)}
        parameters = to_device(drawn, device, self.static_shapes) | self._normalization[device]
        if self.erase is not None:
            parameters["erase"]["quantiles"] = rng.normal_quantiles(device)
        return self._transform(images, parameters, out)

    def _transform_in_chunks(self, images: Tensor, drawn: dict[str, HostParams]) -> Tensor:
        """The same, a few images at a time: what lies between two operations then stays in a core's cache."""
        size = (self.preprocess.channels, *self.image_size)
        out = torch.empty(len(images), *size)
        few = max(1, CACHE_BYTES // (4 * math.prod(size) * torch.get_num_threads()) * torch.get_num_threads())
        for first in range(0, len(images), few):
            part, room = slice(first, first + few), out[first : first + few]
            rows = {name: {key: a[part] for key, a in arrays.items()} for name, arrays in drawn.items()}
            done = self._transform_batch(images[part], rows, room)
            if done is not room:
                room.copy_(done)
        return out

    def transform(self, images: Tensor, drawn: dict[str, DeviceParams], out: Tensor | None = None) -> Tensor:
        """What happens to each image by itself; a function of its arguments, without waiting or branching on them.

        It works in `out`, of the result's shape, where it can.
        """
        view = drawn["view"]
        if "boxes" in view:
            images = resized_crop(images, view["boxes"], self.image_size, self.config.interpolation)
        elif "shift" in view:
            images = shift(images, view["shift"])
        room = torch.empty(images.shape, device=images.device) if out is None else out
        images = room.copy_(images).div_(255)  # from here on it may be written to
        if "boxes" in view and self.config.interpolation == "bicubic":
            images = images.clamp(0, 1)
        if "flip" in view:
            images = apply_to_subset(view["flip"], images, flip)
        if self.policy is not None:
            images = self.policy.apply(images, drawn["policy"])
        if self.jitter is not None:
            images = self.jitter.apply(images, drawn["jitter"])
        images = images.sub_(drawn["normalize"]["mean"]).div_(drawn["normalize"]["std"])
        return images if self.erase is None else self.erase.apply(images, drawn["erase"])

    def mix(self, images: Tensor, targets: Tensor, weights: Tensor, drawn: DeviceParams) -> tuple[Tensor, Tensor]:
        """Images and soft targets with those of their partners, which are rows of the same tensors."""
        rows = drawn["partners"]
        readable = weights.index_select(0, rows) > 0
        if targets.ndim == 1:
            targets = one_hot(targets, self.num_classes)
        mixed = mix_images(images, images.index_select(0, rows), readable, drawn)
        return mixed, mix_targets(targets, targets.index_select(0, rows), readable, drawn)

    def _check_batch(self, batch: Batch, slots: Slots) -> None:
        size = tuple(batch.images.shape[2:])
        if not self.resizes and size != self.image_size:
            raise DataError(
                f"got images of {size[0]} x {size[1]}, wanted {self.image_size[0]} x {self.image_size[1]}; "
                "only crop='resized' changes their size."
            )
        if self.mixer is None or len(slots) == self.batch_size:
            return
        group = self.config.mix_group
        first, last = int(slots.min()), int(slots.max()) + 1
        if first % group or len(slots) != last - first or len(slots) % group:
            raise DataError(
                f"got {len(slots)} of {self.batch_size} images of a batch, wanted whole groups of {group} to mix; "
                f"try augment.mix_group={math.gcd(group, len(slots), first)}."
            )


def _check_config(config: AugmentConfig, image_size: tuple[int, int], channels: int) -> None:
    if config.crop == "pad" and config.pad >= min(image_size):
        raise ConfigError(
            f"pad={config.pad} mirrors more than images of {image_size[0]} x {image_size[1]} have; try less."
        )
    if channels not in (1, 3) and (any(config.color_jitter) or config.policy != "none"):
        raise ConfigError(f"jitter and policy know gray and RGB, not {channels} channels; turn them off.")
