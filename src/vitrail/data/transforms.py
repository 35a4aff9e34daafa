"""Transforms that decode images into rows of a batch, all of one shape.

    RandomResizedCrop    a random crop, resized: training on images of different sizes
    EvalTransform        the pixels that preprocess.py gives
    OriginalPixels       all pixels, for datasets whose images have one size
    SampleReader         reads samples by index and applies one of these: the function that workers run

The crop box is drawn before a JPEG is decoded, so that only the needed rows are decoded, at 1/2, 1/4 or 1/8
of the size if that is still at least the output's size. Resizing is torch's on uint8: Pillow's values to
within rounding, in a third of the time.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from vitrail.config import PreprocessConfig, pair
from vitrail.config.data import AugmentConfig
from vitrail.data.augment.crop import crop_boxes
from vitrail.data.decode import ImageLike, LazyJpeg, decode, open_jpeg
from vitrail.data.jpeg import MIN_SCALED_SIDE, SCALES, Pixels
from vitrail.data.preprocess import Preprocess
from vitrail.data.sampler import Indices
from vitrail.data.sources.base import Sample
from vitrail.data.worker_pool import RowErrorList
from vitrail.errors import ImageError, VitrailError
from vitrail.rng import Seeds
from vitrail.runtime import private_torch

# H W C: an image's rows, columns, channels

Shape = tuple[int, int, int]
RowErrors = dict[int, str]
"""Row of a batch -> why its image could not be read."""
SLOW_FETCH_S = 0.005
"""If fetching takes longer than this per image, images are fetched by several threads."""
FETCH_THREADS = 16
WRONG_SIZE = "its size is "
"""Start of the reason given for an image whose size differs from the others'."""


class Transform(Protocol):
    """Decodes images into rows of a batch, all of one shape."""

    shape: Shape

    @property
    def dtype(self) -> type[np.uint8] | type[np.float32]: ...

    def __call__(self, images: dict[int, ImageLike], seeds: Seeds, out: npt.NDArray[Any], errors: RowErrors) -> None:
        """Fill the rows of `out`; add those that cannot be filled to `errors`."""


class SampleLookup(Protocol):
    """Anything that gives samples by index."""

    def __getitem__(self, index: int, /) -> Sample: ...


class RandomResizedCrop:
    """torchvision's RandomResizedCrop, with the box drawn from each row's seed."""

    dtype = np.uint8

    def __init__(self, preprocess: PreprocessConfig, augment: AugmentConfig) -> None:
        self.size, self.channels = pair(preprocess.image_size), preprocess.channels
        self.shape: Shape = (*self.size, self.channels)
        self.scale, self.ratio, self.interpolation = augment.scale, augment.ratio, augment.interpolation

    def __call__(self, images: dict[int, ImageLike], seeds: Seeds, out: npt.NDArray[Any], errors: RowErrors) -> None:
        jpegs: dict[int, LazyJpeg] = {}
        for row, image in images.items():
            with record_error(errors, row):
                jpeg = open_jpeg(image) if self.channels in (1, 3) else None
                if jpeg is not None:
                    jpegs[row] = jpeg
                    continue
                pixels = decode(image, self.channels)
                box = crop_boxes(seeds[row : row + 1], [pixels.shape[:2]], self.scale, self.ratio)[0].tolist()
                self._write(pixels[box[0] : box[0] + box[2], box[1] : box[1] + box[3]], out[row])
        if not jpegs:
            return
        boxes = crop_boxes(seeds[list(jpegs)], [jpeg.size for jpeg in jpegs.values()], self.scale, self.ratio)
        for (row, jpeg), box in zip(jpegs.items(), boxes.tolist(), strict=True):
            with record_error(errors, row):
                scale = choose_decode_scale(jpeg.size, (box[2], box[3]), self.size)
                self._write(jpeg.crop((box[0], box[1], box[2], box[3]), scale), out[row])

    def _write(self, part: Pixels, out: Pixels) -> None:
        if part.shape[2] == 3 and self.channels == 1:
            part = np.asarray(Image.fromarray(np.ascontiguousarray(part)).convert("L"))[:, :, None]
        elif part.shape[2] == 1 and self.channels == 3:
            part = part.repeat(3, axis=2)
        resize(part, out, self.interpolation)


def choose_decode_scale(size: tuple[int, int], part: tuple[int, int], expected: tuple[int, int]) -> int:
    """The largest factor by which a JPEG may be reduced so that `part` of it is still at least `expected`."""
    if min(size) < MIN_SCALED_SIDE:
        return 1
    enough = (s for s in SCALES if all(side >= s * (w + 1) for side, w in zip(part, expected, strict=True)))
    return next(enough, 1)


def resize(part: Pixels, out: Pixels, interpolation: Literal["bilinear", "bicubic"]) -> None:
    """Resize `part`, H W C, into `out`, H W C, with antialiasing."""
    if part.shape == out.shape:
        out[:] = part
        return
    part = np.ascontiguousarray(part) if part.flags.writeable else part.copy()  # torch warns about read-only arrays
    source, target = (torch.from_numpy(x).permute(2, 0, 1)[None] for x in (part, out))
    private_torch.resize_uint8(source, out.shape[:2], interpolation, target)


class EvalTransform:
    """Evaluation's preprocessing: exactly the pixels of `Preprocess`."""

    def __init__(self, preprocess: PreprocessConfig) -> None:
        self.preprocess = Preprocess(preprocess)
        self.shape: Shape = (*pair(preprocess.image_size), preprocess.channels)
        self.dtype = self.preprocess.dtype

    def __call__(self, images: dict[int, ImageLike], seeds: Seeds, out: npt.NDArray[Any], errors: RowErrors) -> None:
        for row, image in images.items():
            with record_error(errors, row):
                out[row] = self.preprocess.pixels(image)

    def keeps(self, size: tuple[int, int]) -> bool:
        """Whether images of this height and width stay as they are."""
        return self.preprocess.keeps(size)


class OriginalPixels:
    """All pixels, unchanged, of images that have one size."""

    dtype = np.uint8

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    def __call__(self, images: dict[int, ImageLike], seeds: Seeds, out: npt.NDArray[Any], errors: RowErrors) -> None:
        height, width, channels = self.shape
        for row, image in images.items():
            with record_error(errors, row):
                pixels = decode(image, channels)
                if pixels.shape != self.shape:
                    size = f"{pixels.shape[0]} x {pixels.shape[1]}"
                    raise ImageError(f"{WRONG_SIZE}{size}, expected {height} x {width}.")
                out[row] = pixels

    def keeps(self, size: tuple[int, int]) -> bool:
        """Whether the images can have this height and width."""
        return size == self.shape[:2]


class SampleReader:
    """Reads samples by index and transforms them; index -1 and unreadable images give rows of zeros.

    If the source is slow (over a network, say), several images are fetched at once.
    """

    def __init__(self, source: SampleLookup, transform: Transform) -> None:
        self.source, self.transform = source, transform
        self._owner_pid = os.getpid()
        self._threads: ThreadPoolExecutor | None = None

    def __call__(self, indices: Indices, seeds: Seeds, out: npt.NDArray[Any]) -> RowErrorList:
        if os.getpid() != self._owner_pid:
            self.source, self._owner_pid = reopen_after_fork(self.source), os.getpid()
        errors: RowErrors = {}
        out[indices < 0] = 0
        self.transform(self._fetch(indices, errors), seeds, out, errors)
        for row in errors:
            out[row] = 0
        return sorted(errors.items())

    def _fetch(self, indices: Indices, errors: RowErrors) -> dict[int, ImageLike]:
        """Row -> image, not yet decoded."""
        images: dict[int, ImageLike] = {}

        def fetch(row: int) -> None:
            with record_error(errors, row):
                images[row] = self.source[int(indices[row])].image

        rows, start = np.flatnonzero(indices >= 0).tolist(), time.perf_counter()
        for _ in map(fetch, rows) if self._threads is None else self._threads.map(fetch, rows):
            pass
        if self._threads is None and time.perf_counter() - start > SLOW_FETCH_S * len(rows) > 0:
            self._threads = ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="fetch")
        return {row: images[row] for row in rows if row in images}


@contextmanager
def record_error(errors: RowErrors, row: int) -> Iterator[None]:
    """Record errors of an image or its storage under its row; programming errors are raised."""
    try:
        yield
    except (VitrailError, OSError) as error:
        errors[row] = str(error).rstrip(".")


def reopen_after_fork(source: Any) -> Any:
    """In a forked process: a copy of the source that does not share the parent's open files and locks.

    State that pickling drops is created again; arrays are not copied.
    """
    default: Any = object.__getstate__
    if type(source).__getstate__ is default:
        return source
    buffers: list[pickle.PickleBuffer] = []
    return pickle.loads(pickle.dumps(source, protocol=5, buffer_callback=buffers.append), buffers=buffers)
