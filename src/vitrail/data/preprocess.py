"""Image preprocessing for inference, bit for bit as in the code that each model comes from.

It has two parts, because training, export and serving use the second one alone:

    pixels       decode, resize, crop             one image -> H W C, values 0 to 255
    normalize    / 255, - mean, / std             B C H W on any device -> float32

With antialias (as Pillow resizes: timm, torchvision, Hugging Face) the pixels are uint8. Without it (as
TensorFlow resizes: Google's code) they are float32, because the resized values are not rounded.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeGuard, cast

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from vitrail.config import PreprocessConfig, pair
from vitrail.data.decode import PILLOW_MODES, ImageLike, decode, open_image
from vitrail.errors import ImageError

FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}

# Filter radius, in pixels of the coarser of the two images.
FILTER_RADIUS = {"nearest": 1, "bilinear": 1, "bicubic": 2, "lanczos": 3}

# If the resized image would have more pixels than this, only the part inside the crop is computed:
# a strip of 20,000 x 1 would otherwise become 4,960,000 x 248, five gigabytes.
MAX_WHOLE_PIXELS = 2**24

Size = tuple[int, int]
"""Height and width."""

Span = tuple[int, int]
"""Start and end (exclusive) of a range of rows or columns."""


class Preprocess:
    """Turns images into a network's input: `Preprocess(config)(images)` is float32, B C H W.

    The two values of `crop_rounding` differ by one pixel when the excess is 3, 7, 11, ...
    """

    def __init__(self, config: PreprocessConfig) -> None:
        self.config = config
        self.crop = pair(config.image_size)

    def __repr__(self) -> str:
        return f"Preprocess({self.config!r})"

    def __call__(self, images: ImageLike | Iterable[ImageLike]) -> Tensor:
        """One image or several -> float32, B C H W."""
        image_list: list[ImageLike] = list(images) if is_image_list(images) else [cast(ImageLike, images)]
        batch = np.empty((len(image_list), *self.crop, self.config.channels), self.dtype)
        for row, image in zip(batch, image_list, strict=True):
            row[:] = self.pixels(image)
        return self.normalize(torch.from_numpy(batch).permute(0, 3, 1, 2))

    def prepare(self, image: ImageLike) -> Tensor:
        """One image -> float32, C H W."""
        return self.normalize(torch.from_numpy(self.pixels(image)).permute(2, 0, 1))

    def keeps(self, size: Size) -> bool:
        """Whether `pixels` returns images of this height and width unchanged."""
        whole: list[Span] = [(0, side) for side in size]
        return self.dtype == np.uint8 and self._plan(*size) == (size, whole)

    @property
    def dtype(self) -> type[np.uint8] | type[np.float32]:
        """The dtype that `pixels` returns."""
        return np.uint8 if self.config.antialias or self.config.interpolation in ("nearest", "area") else np.float32

    def pixels(self, image: ImageLike) -> npt.NDArray[Any]:
        """Decode, resize, crop: H W C with values 0 to 255, uint8 or float32 (see `dtype`)."""
        channels = self.config.channels
        if self.dtype == np.float32 or self.config.interpolation == "area":
            return self._resize_tensorflow(decode(image, channels)).astype(self.dtype, copy=False)
        if channels in PILLOW_MODES:
            out = np.array(self._resize_pillow(open_image(image, channels)))
            return out[:, :, None] if out.ndim == 2 else out
        bands = decode(image, channels)  # Pillow has no such mode: one channel at a time
        return np.stack(
            [np.asarray(self._resize_pillow(Image.fromarray(bands[:, :, c]))) for c in range(channels)], axis=2
        )

    def normalize(self, batch: Tensor) -> Tensor:
        """Values 0 to 255 of any dtype, B C H W (or C H W), on any device -> float32 for the network."""
        config = self.config
        if batch.ndim < 3 or batch.shape[-3] != config.channels:
            raise ImageError(f"got a batch of shape {tuple(batch.shape)}, expected B {config.channels} H W.")
        mean, std = _constant(config.mean, batch.device), _constant(config.std, batch.device)
        scaled = batch.to(torch.float32, copy=True, memory_format=torch.contiguous_format).div_(255)
        return scaled.sub_(mean).div_(std)

    def _plan(self, height: int, width: int) -> tuple[Size, list[Span]]:
        """The size to resize to, and the rows and columns of the crop."""
        if self.config.resize == "squash":
            size = self._squash_size()
        elif self.config.resize_to is None and self.crop[0] != self.crop[1]:
            ratio = min(height / self.crop[0], width / self.crop[1])  # the smallest size that covers the crop
            size = round(height / ratio), round(width / ratio)
        else:
            short = self.config.resize_to or self.crop[0]
            to_int = round if self.config.interpolation == "area" else int  # as big_vision, as torchvision
            long = to_int(short * max(height, width) / min(height, width))
            size = (long, short) if width <= height else (short, long)
        return size, [self._span(side, crop) for side, crop in zip(size, self.crop, strict=True)]

    def _squash_size(self) -> Size:
        """The crop's size, scaled so that its short side is `resize_to` (DeiT: 256 x 256, then crop 224)."""
        short = min(self.crop)
        resized = self.config.resize_to or short
        return self.crop[0] * resized // short, self.crop[1] * resized // short

    def _span(self, side: int, crop: int) -> Span:
        """The crop's range along one side; outside 0 to `side` it is black."""
        if self.config.crop_rounding == "floor":
            first = (side - crop) // 2
        else:
            first = round((side - crop) / 2) if side >= crop else -((crop - side) // 2)
        return first, first + crop

    def _resize_pillow(self, image: Image.Image) -> Image.Image:
        """Pillow's resize, then the crop."""
        size, (rows, columns) = self._plan(image.height, image.width)
        name = self.config.interpolation
        if size[0] * size[1] > MAX_WHOLE_PIXELS:
            image = _resize_part(image, size, (_clip_span(rows, size[0]), _clip_span(columns, size[1])), name)
            rows, columns = _relative_span(rows), _relative_span(columns)
        elif image.size != size[::-1]:
            image = image.resize(size[::-1], FILTERS[name])
        box = (columns[0], rows[0], columns[1], rows[1])
        return image if box == (0, 0, *image.size) else image.crop(box)  # Pillow pads with zeros

    def _resize_tensorflow(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """TensorFlow's resize, then the crop; only pixels inside the crop are computed."""
        size, spans = self._plan(*pixels.shape[:2])
        (rows, row_weights), (columns, column_weights) = (
            _taps(source, side, _clip_span(span, side), self.config.interpolation)
            for source, side, span in zip(pixels.shape[:2], size, spans, strict=True)
        )
        left = int(columns.min())
        part = _weighted_sum(pixels[:, left : int(columns.max()) + 1], 0, rows, row_weights)
        part = _weighted_sum(part, 1, columns - left, column_weights)
        before = [max(-span[0], 0) for span in spans]
        after = [crop - b - n for crop, b, n in zip(self.crop, before, part.shape[:2], strict=True)]
        return np.pad(part, [*zip(before, after, strict=True), (0, 0)]) if any(before + after) else part


def is_image_list(images: ImageLike | Iterable[ImageLike]) -> TypeGuard[Iterable[ImageLike]]:
    """Whether this is several images; strings, bytes, arrays and tensors are iterable, but one image each."""
    return isinstance(images, Iterable) and not isinstance(
        images, str | Path | bytes | Image.Image | np.ndarray | Tensor
    )


def _clip_span(span: Span, side: int) -> Span:
    return max(span[0], 0), min(span[1], side)


def _relative_span(span: Span) -> Span:
    """The span relative to the start of its part inside the image."""
    first = min(span[0], 0)
    return first, first + span[1] - span[0]


def _resize_part(image: Image.Image, size: Size, spans: tuple[Span, Span], name: str) -> Image.Image:
    """Some rows and columns of the image resized to `size`, without computing the rest."""
    near, box = [], []
    for source, side, (first, last) in zip((image.height, image.width), size, spans, strict=True):
        scale = source / side
        margin = FILTER_RADIUS[name] * max(scale, 1) + 1
        low, high = max(int(first * scale - margin), 0), min(int(last * scale + margin) + 1, source)
        near.append((low, high))
        box.append((first * scale - low, min(last * scale - low, high - low)))
    (top, bottom), (left, right) = near
    (rows, columns) = spans
    return image.crop((left, top, right, bottom)).resize(
        (columns[1] - columns[0], rows[1] - rows[0]),
        FILTERS[name],
        box=(box[1][0], box[0][0], box[1][1], box[0][1]),
    )


def _taps(source: int, side: int, span: Span, name: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """For some of `side` outputs: the indices of the `source` inputs that each one sums, and their weights.

    As tf.image.resize(antialias=False): pixel centers are at halves, the filter has the width of input pixels
    at any scale, and weights outside the image are redistributed.
    """
    if name == "area":
        return _area_taps(source, side, span)
    half, radius = np.float32(0.5), FILTER_RADIUS[name]
    center = (np.arange(*span, dtype=np.float32) + half) * np.float32(source / side) - half  # float32, as there
    index = np.floor(center).astype(np.int64)[:, None] + np.arange(1 - radius, 1 + radius)
    weight = _kernel(np.abs(center[:, None] - index), name)
    weight[(index < 0) | (index >= source)] = 0
    weight /= weight.sum(axis=1, keepdims=True)
    return index.clip(0, source - 1), weight.astype(np.float32)


def _area_taps(source: int, side: int, span: Span) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """`_taps` for the mean over the area of an output pixel, with fractions of input pixels."""
    scale = source / side
    first = np.arange(*span)[:, None] * scale
    index = np.floor(first).astype(np.int64) + np.arange(int(np.ceil(scale)) + 1)
    weight = np.clip(np.minimum(first + scale, index + 1) - np.maximum(first, index), 0, None)
    weight /= weight.sum(axis=1, keepdims=True)
    return index.clip(0, source - 1), weight.astype(np.float32)


def _kernel(x: npt.NDArray[np.floating[Any]], name: str) -> npt.NDArray[np.floating[Any]]:
    """The filter at distance x >= 0."""
    if name == "bilinear":
        return np.maximum(1 - x, 0)
    if name == "bicubic":  # Keys, a = -0.5
        return np.where(x < 1, (1.5 * x - 2.5) * x**2 + 1, np.where(x < 2, ((-0.5 * x + 2.5) * x - 4) * x + 2, 0))
    return np.where(x < 3, np.sinc(x) * np.sinc(x / 3), 0)


def _weighted_sum(
    pixels: npt.NDArray[Any], axis: int, index: npt.NDArray[np.int64], weight: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Along one axis: out[i] = sum over t of weight[i, t] * pixels[index[i, t]]."""
    weight = weight[:, :, None, None] if axis == 0 else weight[:, :, None]  # against H W C or W C
    terms = (pixels.take(index[:, t], axis).astype(np.float32, copy=False) for t in range(index.shape[1]))
    out = next(terms)
    out *= weight[:, 0]
    for t, term in enumerate(terms, start=1):
        term *= weight[:, t]
        out += term
    return out


def _constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """C 1 1, cached per device: copying it for each batch would make the host wait."""
    if torch.compiler.is_compiling():  # a tensor created while tracing must not outlive the trace
        return torch.tensor(values, dtype=torch.float32, device=device)[:, None, None]
    return _cached_constant(values, device)


@lru_cache(maxsize=64)
def _cached_constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # the first caller's mode must not decide for later ones
        return torch.tensor(values, dtype=torch.float32, device=device)[:, None, None]
