"""Preprocessing: from a decoded image to the model's input. Stored with every model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from vitrail.config.base import Config, Pair, pair
from vitrail.errors import ConfigError

Triple = tuple[float, ...]

HALF: Triple = (0.5, 0.5, 0.5)
IMAGENET_MEAN: Triple = (0.485, 0.456, 0.406)
IMAGENET_STD: Triple = (0.229, 0.224, 0.225)
CLIP_MEAN: Triple = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Triple = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, kw_only=True)
class PreprocessConfig(Config):
    """Resize, crop, scale to [0, 1], normalize. The defaults are the original ViT's."""

    image_size: Pair = 224
    """Height and width of the model's input."""
    resize: Literal["squash", "short"] = "squash"
    """squash: resize without keeping the aspect ratio; short: resize the short side."""
    resize_to: int | None = None
    """Size of the short side before the center crop; None: that of the crop."""
    crop_rounding: Literal["round", "floor"] = "round"
    """Rounding of the crop's offset when an odd number of pixels is cropped: torchvision and timm round half to
    even, Hugging Face rounds down."""
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos", "area"] = "bilinear"
    """Resampling filter; area: the mean over each output pixel, rounded down, as in big_vision."""
    antialias: bool = True
    """Widen the filter when shrinking, as Pillow does; TensorFlow's resize, which the original
    code uses, does not."""
    mean: Triple = HALF
    """Subtracted from values in [0, 1], per channel."""
    std: Triple = HALF
    """Standard deviation of each channel, by which values are divided after subtracting `mean`."""

    def check(self) -> None:
        object.__setattr__(self, "image_size", pair(self.image_size))
        if len(self.mean) != len(self.std):
            raise ConfigError(f"mean has {len(self.mean)} channels and std {len(self.std)}; they must agree.")
        if any(s <= 0 for s in self.std):
            raise ConfigError(f"std must be positive, got {self.std}.")
        if min(pair(self.image_size)) < 1 or (self.resize_to is not None and self.resize_to < 1):
            raise ConfigError(f"sizes must be positive, got image_size={self.image_size}, resize_to={self.resize_to}.")

    def summary(self) -> str:
        """A one-line description."""
        height, width = pair(self.image_size)
        if self.resize == "short":
            first = f"short side to {self.resize_to or min(height, width)}, crop {height}x{width}"
        elif self.resize_to:
            first = f"squashed to a short side of {self.resize_to}, crop {height}x{width}"
        else:
            first = f"squashed to {height}x{width}"
        how = self.interpolation if self.antialias else f"{self.interpolation} without antialias"
        mean, std = (" ".join(f"{v:.3g}" for v in dict.fromkeys(values)) for values in (self.mean, self.std))
        return f"{first}, {how}, mean {mean}, std {std}"

    @property
    def channels(self) -> int:
        """1 gray, 3 RGB, 4 RGBA."""
        return len(self.mean)


def preprocess_for_size(
    preprocess: PreprocessConfig, size: tuple[int, int], channels: int, crop: Callable[[int], float] | None = None
) -> PreprocessConfig:
    """Adapt preprocessing to an image size and number of channels.

    `crop` gives the crop ratio for a side length; without it, the current ratio is kept. For a crop that is not square,
    the image is resized to just cover it: resizing the short side alone would require padding.
    """
    if preprocess.resize == "short" and size[0] != size[1]:
        preprocess = preprocess.replace(resize_to=None)
    elif preprocess.resize_to is not None:
        crop_ratio = crop(min(size)) if crop else min(pair(preprocess.image_size)) / preprocess.resize_to
        preprocess = preprocess.replace(resize_to=max(int(min(size) / crop_ratio + 1e-9), 1))
    return preprocess_for_channels(preprocess.replace(image_size=size), channels)


def preprocess_for_channels(preprocess: PreprocessConfig, channels: int) -> PreprocessConfig:
    """Adapt mean and std to a number of channels: averaged for one channel, repeated in turn for more than three."""
    mean, std = preprocess.mean, preprocess.std
    if channels == len(mean):
        return preprocess
    if channels == 1:
        return preprocess.replace(mean=(sum(mean) / len(mean),), std=(sum(std) / len(std),))
    turns = [i % len(mean) for i in range(channels)]
    return preprocess.replace(mean=tuple(mean[i] for i in turns), std=tuple(std[i] for i in turns))
