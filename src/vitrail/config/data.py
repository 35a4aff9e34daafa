"""What is learned from, and what happens to an image before it is learned from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitrail.config.base import Config
from vitrail.config.duration import Duration, steps
from vitrail.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class DataConfig(Config):
    """A source of labeled images, how it is split, and how it is read."""

    source: str = "digits"
    """A built-in name (`digits`, `cifar10`, ...), `folder:photos/`, `table:labels.csv`,
    `shards:train-{00000..00063}.tar`, `stream:...` (shards without an index), `hf:user/name`, or a
    plain path, recognized for what it is."""
    validation: str | None = None
    """Another source to measure on, named the same way; None: what `source` itself offers."""
    held_out: float | None = None
    """Share of the training images kept aside to measure on. None: the data's own validation
    split, else its test split, else a tenth of the training images."""
    groups: str | None = None
    """What keeps images on one side of that split: a table's column, or a regular expression over
    an image's relative path, whose match (its first group, where it has one) names the group."""
    root: str | None = None
    """A folder to look for built-in data in, before the cache and the system's own."""
    image_column: str | None = None
    """A table's column of paths or bytes; None: found by its name and kind."""
    label_column: str | None = None
    """A table's column of labels; None: found by its name. Lists, or words with `|` between them,
    are several labels to an image."""
    class_names: tuple[str, ...] | None = None
    """Names of the classes, in order; None: those the data knows, else sorted."""

    order: Literal["shuffled", "balanced"] = "shuffled"
    """Each image once an epoch, or each class equally often."""
    repeats: int = 1
    """The same image so many times in a row, augmented differently each time (DeiT has 3)."""
    resident: bool | None = None
    """Decode everything once and keep it on the device; None: where it fits easily."""
    workers: int | None = None
    """Processes that read and decode; 0 for none; None: as many as there are cores to spare."""
    max_bad_fraction: float = 0.01
    """The share of images that may be unreadable before training stops with their list."""
    skip_bad: bool = False
    """Leave unreadable images out of a measurement instead of refusing it."""

    def check(self) -> None:
        if self.held_out is not None and not 0 < self.held_out < 1:
            raise ConfigError(f"held_out={self.held_out} is a share of the images: between 0 and 1.")
        if not 0 <= self.max_bad_fraction <= 1:
            raise ConfigError(f"max_bad_fraction={self.max_bad_fraction} is a share: from 0 to 1.")
        if self.repeats < 1:
            raise ConfigError(f"repeats={self.repeats}: an image is seen at least once.")
        if self.workers is not None and self.workers < 0:
            raise ConfigError(f"workers={self.workers}: 0 or more.")


@dataclass(frozen=True, kw_only=True)
class AugmentConfig(Config):
    """What is done to training images. The defaults leave everything but crop and flip off."""

    crop: Literal["resized", "pad", "none"] = "resized"
    """A random part resized to the image's size; the whole shifted by up to `pad` pixels; or the
    view that evaluation has."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Share of the image's area that a resized crop takes; the paper's code has 0.05 to 1."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Width over height of that crop."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """How a crop is resized; always antialiased."""
    pad: int = 4
    """Pixels that crop='pad' shifts by, mirrored in from the image."""
    flip: float = 0.5
    """Chance of a mirror image."""
    color_jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """Strength of random brightness, contrast, saturation and hue, in random order; 0.4 is common."""
    policy: Literal["none", "three", "rand"] = "none"
    """3-Augment (DeiT III: gray, solarize or blur) or RandAugment."""
    num_ops: int = 2
    """Operations that RandAugment applies to an image."""
    magnitude: float = 9.0
    """Their strength, of 10."""
    magnitude_std: float = 0.0
    """Spread of that strength from one operation to the next (timm has 0.5)."""
    erase: float = 0.0
    """Chance that a rectangle is replaced by noise."""
    erase_scale: tuple[float, float] = (0.02, 1 / 3)
    """Share of the area that is erased."""
    mixup: float = 0.0
    """alpha of the Beta distribution that blends two images; 0 for none."""
    cutmix: float = 0.0
    """alpha of the one that pastes a part of one image into another; 0 for none."""
    mix_prob: float = 1.0
    """Chance that an image is mixed at all; with both kinds on, each has half of it."""
    mix_group: int = 8
    """An image is mixed with another of its group: so many consecutive ones of the batch. It must divide
    each process's share of the batch; the result does not depend on the number of processes."""
    mix_off: Duration = steps(0)
    """The end of the run that sees its images whole: mixed ones are not what it is measured on."""

    def check(self) -> None:
        for name in ("flip", "erase", "mix_prob"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)} is a chance: from 0 to 1.")
        for name in ("scale", "ratio", "erase_scale"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise ConfigError(f"{name}={low}, {high}: wanted two positive numbers, the smaller one first.")
        if self.scale[1] > 1 or self.erase_scale[1] > 1:
            raise ConfigError("scale and erase_scale are shares of the area: at most 1.")
        if min(*self.color_jitter, self.mixup, self.cutmix, self.magnitude_std, self.pad, self.num_ops) < 0:
            raise ConfigError("jitter, mixup, cutmix, magnitude_std, pad and layers are 0 or more.")
        if self.mix_group < 2:
            raise ConfigError(f"mix_group={self.mix_group}: two images or more, to mix one with another.")
        if self.color_jitter[3] > 0.5:
            raise ConfigError(f"jitter's hue {self.color_jitter[3]} is a share of the color circle: at most 0.5.")
        if not 0 <= self.magnitude <= 10:
            raise ConfigError(f"magnitude={self.magnitude} is out of 10.")

    @property
    def mixes(self) -> bool:
        return self.mix_prob > 0 and (self.mixup > 0 or self.cutmix > 0)
