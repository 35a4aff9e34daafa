"""The augmentation pipeline: crop, flip, policy, color jitter, normalize, random erasing, mixup or CutMix."""

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
"""On a CPU, images are processed in chunks of about this many bytes, which stay in the cache."""


class Augment:
    """Augments and normalizes training batches: `images, targets = augment(batch)`.

    Three steps, of which the first runs on the host and the other two may be compiled:

        draw         step, slots -> all random parameters, as arrays
        transform    uint8 images -> cropped, color-augmented, normalized, erased float32 images
        mix          images and targets with those of their partners -> images and soft targets

    cropped: the loader's workers have already made the resized crop. mix_until_step: from this step on images
    are not mixed; targets stay soft, so that shapes do not change. repeats: number of consecutive slots with
    the same image. compile: static shapes, with every operation on the whole batch, which suits a GPU and
    small images; otherwise each operation runs on the images it was drawn for.
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
        """Images, float32 b C H W, and targets: b class indices, or b K if mixed or multi-label.

        `batch.slots`, from which the seeds are derived, should be on the CPU: reading them from a GPU would
        make the host wait.
        """
        slots = batch.slots.cpu().numpy()
        self._check_batch(batch, slots)
        params = self.draw(batch.step, slots, (batch.images.shape[2], batch.images.shape[3]))
        device = batch.images.device
        mixing = params.pop("mix", None)
        if device.type == "cpu" and not self.static_shapes:
            images = self._transform_in_chunks(batch.images, params)
        else:
            images = self._transform_batch(batch.images, params)
        if mixing is None:
            return images, batch.targets
        return self._mix(
            images, batch.targets, batch.weights, to_device({"mix": mixing}, device, self.static_shapes)["mix"]
        )

    def draw(self, step: int, slots: Slots, size: tuple[int, int]) -> dict[str, HostParams]:
        """All random parameters for these slots of the global batch; `size` is that of the input images."""
        config, seeds = self.config, rng.sample_seeds(self.seed, step, slots)
        params: dict[str, HostParams] = {"geometry": {}}
        if self.resizes:
            params["geometry"]["boxes"] = crop_boxes(seeds, np.tile(size, (len(seeds), 1)), config.scale, config.ratio)
        elif config.crop == "pad" and config.pad:
            params["geometry"]["shift"] = sample_shifts(seeds, config.pad)
        if config.flip:
            params["geometry"]["flip"] = sample_flips(seeds, config.flip)
        parts = {"policy": self.policy, "jitter": self.jitter, "erase": self.erase}
        params |= {name: part.draw(seeds) for name, part in parts.items() if part is not None}
        if self.mixer is not None:
            params["mix"] = self.mixer.draw(
                seeds, disabled=self.mix_until_step is not None and step >= self.mix_until_step
            )
            params["mix"]["partners"] = mix_partners(
                self.seed, step, slots, batch_size=self.batch_size, group_size=config.mix_group, repeats=self.repeats
            )
        return params

    def _transform_batch(self, images: Tensor, params: dict[str, HostParams], out: Tensor | None = None) -> Tensor:
        device = images.device
        if device not in self._normalization:
            constants = {"mean": self.preprocess.mean, "std": self.preprocess.std}
            arrays = {name: np.array(values, np.float32)[:, None, None] for name, values in constants.items()}
            self._normalization |= {device: to_device({"normalize": arrays}, device, self.static_shapes)}
        parameters = to_device(params, device, self.static_shapes) | self._normalization[device]
        if self.erase is not None:
            parameters["erase"]["quantiles"] = rng.normal_quantiles(device)
        return self._transform(images, parameters, out)

    def _transform_in_chunks(self, images: Tensor, params: dict[str, HostParams]) -> Tensor:
        """`_transform_batch` in chunks that stay in the CPU's cache between operations."""
        size = (self.preprocess.channels, *self.image_size)
        out = torch.empty(len(images), *size)
        chunk_size = max(1, CACHE_BYTES // (4 * math.prod(size) * torch.get_num_threads()) * torch.get_num_threads())
        for first in range(0, len(images), chunk_size):
            part, chunk_out = slice(first, first + chunk_size), out[first : first + chunk_size]
            rows = {name: {key: a[part] for key, a in arrays.items()} for name, arrays in params.items()}
            done = self._transform_batch(images[part], rows, chunk_out)
            if done is not chunk_out:
                chunk_out.copy_(done)
        return out

    def transform(self, images: Tensor, params: dict[str, DeviceParams], out: Tensor | None = None) -> Tensor:
        """All operations on single images, without synchronization or branches on values.

        Works in `out`, of the result's shape, if possible.
        """
        geometry = params["geometry"]
        if "boxes" in geometry:
            images = resized_crop(images, geometry["boxes"], self.image_size, self.config.interpolation)
        elif "shift" in geometry:
            images = shift(images, geometry["shift"])
        out = torch.empty(images.shape, device=images.device) if out is None else out
        images = out.copy_(images).div_(255)  # from here on, operations may work in place
        if "boxes" in geometry and self.config.interpolation == "bicubic":
            images = images.clamp(0, 1)
        if "flip" in geometry:
            images = apply_to_subset(geometry["flip"], images, flip)
        if self.policy is not None:
            images = self.policy.apply(images, params["policy"])
        if self.jitter is not None:
            images = self.jitter.apply(images, params["jitter"])
        images = images.sub_(params["normalize"]["mean"]).div_(params["normalize"]["std"])
        return images if self.erase is None else self.erase.apply(images, params["erase"])

    def mix(self, images: Tensor, targets: Tensor, weights: Tensor, params: DeviceParams) -> tuple[Tensor, Tensor]:
        """Mix images and targets with those of their partners, which are rows of the same tensors."""
        rows = params["partners"]
        readable = weights.index_select(0, rows) > 0
        if targets.ndim == 1:
            targets = one_hot(targets, self.num_classes)
        mixed = mix_images(images, images.index_select(0, rows), readable, params)
        return mixed, mix_targets(targets, targets.index_select(0, rows), readable, params)

    def _check_batch(self, batch: Batch, slots: Slots) -> None:
        size = tuple(batch.images.shape[2:])
        if not self.resizes and size != self.image_size:
            raise DataError(
                f"got images of {size[0]} x {size[1]}, expected {self.image_size[0]} x {self.image_size[1]}; "
                "only crop='resized' changes their size."
            )
        if self.mixer is None or len(slots) == self.batch_size:
            return
        group = self.config.mix_group
        first, last = int(slots.min()), int(slots.max()) + 1
        if first % group or len(slots) != last - first or len(slots) % group:
            raise DataError(
                f"got {len(slots)} of {self.batch_size} images of a batch, expected whole groups of {group} to mix; "
                f"try augment.mix_group={math.gcd(group, len(slots), first)}."
            )


def _check_config(config: AugmentConfig, image_size: tuple[int, int], channels: int) -> None:
    if config.crop == "pad" and config.pad >= min(image_size):
        raise ConfigError(
            f"got augment.pad={config.pad}, expected less than the side of {image_size[0]} x {image_size[1]} images."
        )
    if channels not in (1, 3) and (any(config.color_jitter) or config.policy != "none"):
        raise ConfigError(f"color_jitter and policy need 1 or 3 channels, not {channels} channels; turn them off.")
