"""Settings of the training data and its augmentation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitrail.config.base import Config
from vitrail.config.duration import Duration, steps
from vitrail.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class DataConfig(Config):
    """The data source, its split and how it is read."""

    source: str = "digits"
    """A built-in name (`digits`, `cifar10`, ...), `folder:photos/`, `table:labels.csv`,
    `shards:train-{00000..00063}.tar`, `stream:...` (shards without an index), `hf:user/name`, or a
    plain path, whose type is detected."""
    validation: str | None = None
    """Another source for validation, in the same notation; None: a split of `source`."""
    held_out: float | None = None
    """Fraction of the training images held out for validation. None: the data's own validation
    split, else its test split, else a tenth of the training images."""
    fraction: float | tuple[float, float] | None = None
    """Part of the training images to use, after those for validation are held out: 0.1 for a tenth of each class, or
    0.5,1 for its second half, in an order given by a hash of the images' names; None: all."""
    groups: str | None = None
    """Keeps related images in one split: a table's column, or a regular expression for relative paths. Images with
    the same match (or first capture group) form a group."""
    root: str | None = None
    """Folder with built-in datasets, searched before the cache and the system's folder."""
    image_column: str | None = None
    """A table's column of paths or bytes; None: detected by name and type."""
    label_column: str | None = None
    """A table's column of labels; None: detected by name. Lists, or words separated by `|`, are
    multi-label."""
    class_names: tuple[str, ...] | None = None
    """Names of the classes, in order; None: the data's own, else sorted."""

    order: Literal["shuffled", "balanced"] = "shuffled"
    """shuffled: each image once per epoch; balanced: each class equally often."""
    repeats: int = 1
    """Repeated augmentation: number of times each image appears in a row (3 in DeiT)."""
    resident: bool | None = None
    """Decode the data once and keep it on the device; None: if it is small enough."""
    workers: int | None = None
    """Number of worker processes that read and decode; 0: none; None: the number of spare cores."""
    max_bad_fraction: float = 0.01
    """Fraction of unreadable images above which training stops and lists them."""
    skip_bad: bool = False
    """Exclude unreadable images from an evaluation instead of failing."""

    def check(self) -> None:
        if self.held_out is not None and not 0 < self.held_out < 1:
            raise ConfigError(f"held_out={self.held_out}: expected a fraction of the images, between 0 and 1.")
        low, high = self.fraction_range
        if not 0 <= low < high <= 1:
            raise ConfigError(f"fraction={self.fraction}: expected 0.1, or a range such as 0.5,1.")
        if not 0 <= self.max_bad_fraction <= 1:
            raise ConfigError(f"max_bad_fraction={self.max_bad_fraction}: expected a fraction from 0 to 1.")
        if self.repeats < 1:
            raise ConfigError(f"repeats={self.repeats}: expected 1 or more.")
        if self.workers is not None and self.workers < 0:
            raise ConfigError(f"workers={self.workers}: expected 0 or more.")

    @property
    def fraction_range(self) -> tuple[float, float]:
        """`fraction` as a range."""
        if self.fraction is None:
            return 0.0, 1.0
        return self.fraction if isinstance(self.fraction, tuple) else (0.0, self.fraction)


@dataclass(frozen=True, kw_only=True)
class AugmentConfig(Config):
    """Augmentation of the training images. By default only crop and flip are on."""

    crop: Literal["resized", "pad", "none"] = "resized"
    """resized: random resized crop; pad: random shift by up to `pad` pixels; none: as in evaluation."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Range of the crop's area as a fraction of the image; 0.05 to 1 in the paper's code."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Range of the crop's aspect ratio, width / height."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """Interpolation of the resized crop; always antialiased."""
    pad: int = 4
    """Largest shift for crop='pad', in pixels, with reflection padding."""
    flip: float = 0.5
    """Probability of a horizontal flip."""
    color_jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """Strength of random brightness, contrast, saturation and hue, in random order; 0.4 is common."""
    policy: Literal["none", "three", "rand"] = "none"
    """3-Augment (DeiT III: gray, solarize or blur) or RandAugment."""
    num_ops: int = 2
    """Operations that RandAugment applies to an image."""
    magnitude: float = 9.0
    """Magnitude of the operations, from 0 to 10."""
    magnitude_std: float = 0.0
    """Standard deviation of the magnitude (0.5 in timm)."""
    erase: float = 0.0
    """Probability of random erasing."""
    erase_scale: tuple[float, float] = (0.02, 1 / 3)
    """Range of the erased area as a fraction of the image."""
    mixup: float = 0.0
    """Mixup's alpha (Beta distribution); 0: off."""
    cutmix: float = 0.0
    """CutMix's alpha; 0: off."""
    mix_prob: float = 1.0
    """Probability that an image is mixed; if mixup and CutMix are both on, each is used for half of these images."""
    mix_group: int = 8
    """Size of the groups of consecutive images within which images are mixed. It must divide
    each process's part of the batch; the result does not depend on the number of processes."""
    mix_off: Duration = steps(0)
    """Length of the final part of the run without mixup and CutMix, to match the unmixed images of evaluation."""

    def check(self) -> None:
        for name in ("flip", "erase", "mix_prob"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)}: expected a probability from 0 to 1.")
        for name in ("scale", "ratio", "erase_scale"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise ConfigError(f"{name}={low}, {high}: expected two positive numbers, the smaller one first.")
        if self.scale[1] > 1 or self.erase_scale[1] > 1:
            raise ConfigError(
                f"scale={self.scale}, erase_scale={self.erase_scale}: expected fractions of the area, at most 1."
            )
        if min(*self.color_jitter, self.mixup, self.cutmix, self.magnitude_std, self.pad, self.num_ops) < 0:
            raise ConfigError("color_jitter, mixup, cutmix, magnitude_std, pad and num_ops must be 0 or more.")
        if self.mix_group < 2:
            raise ConfigError(f"mix_group={self.mix_group}: expected 2 or more images.")
        if self.color_jitter[3] > 0.5:
            raise ConfigError(f"color_jitter's hue {self.color_jitter[3]}: expected at most 0.5 (of the color circle).")
        if not 0 <= self.magnitude <= 10:
            raise ConfigError(f"magnitude={self.magnitude}: expected 0 to 10.")

    @property
    def mixes(self) -> bool:
        return self.mix_prob > 0 and (self.mixup > 0 or self.cutmix > 0)
