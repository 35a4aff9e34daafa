"""Small datasets: decoded once and kept on the device as one uint8 tensor.

    choose_resident_transform    the transform to decode a source's images with, or None if they should not be kept
    load                decode all images with that transform

Images of one size are kept unchanged (CIFAR: 32 x 32), and random crops are taken on the device. Without
random crops they are kept with evaluation's preprocessing.
"""

from __future__ import annotations

import os
import time
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vitrail.config import DataConfig, PreprocessConfig, pair
from vitrail.config.data import AugmentConfig
from vitrail.data.decode import decode, open_jpeg
from vitrail.data.sources.base import Source
from vitrail.data.sources.progress import progress_bar
from vitrail.data.transforms import WRONG_SIZE, EvalTransform, OriginalPixels, SampleReader, Transform, record_error
from vitrail.data.worker_pool import make_pool
from vitrail.errors import ConfigError

# N images, C channels, H rows, W columns

MEMORY_DIVISOR = 4
"""Unless data.resident=true, at most 1 / MEMORY_DIVISOR of the free memory is used."""
MAX_DECODED_BYTES = 2 << 30
"""Larger datasets are not decoded in advance, because that takes too long."""
MAX_AREA_RATIO = 4
"""Images with more than this many times the area of the output are not cropped on the device."""
MAX_CPU_SIDE = 64
"""On a CPU, larger images or outputs are left to workers, which are faster."""
SIZE_SAMPLES = 32
"""If this many images have one size, all are assumed to have it until one is found that differs."""
COPY_CHUNK = 4096
PROGRESS_BAR_AFTER_S = 1.0
"""Seconds before a progress bar is shown."""


@dataclass(frozen=True)
class ResidentImages:
    """All images of a source, on the device."""

    images: Tensor
    """N C H W, uint8, or float32 if the preprocessing does not round."""
    bad: dict[int, str]
    """Index of each unreadable image -> reason; its pixels are zero."""


def choose_resident_transform(
    source: Source,
    *,
    config: DataConfig,
    augment: AugmentConfig,
    preprocess: PreprocessConfig,
    device: torch.device,
    num_sharing: int = 1,
) -> EvalTransform | OriginalPixels | None:
    """The transform to load all images with, or None if they should not stay on the device.

    `num_sharing` processes like this one share the device's memory.
    """
    if config.resident is False:
        return None
    transform = _fitting_transform(source, augment, preprocess, device, forced=config.resident is True)
    if transform is None:
        return None
    size, free = num_bytes(transform, len(source)), free_memory(device) // num_sharing
    if config.resident:
        if size > free:
            raise ConfigError(
                f"data.resident=true needs {format_bytes(size)} for {source.name}, and {device} has "
                f"{format_bytes(free)} free; without data.resident, images are read as they are needed."
            )
        return transform
    fits = size <= free // MEMORY_DIVISOR and (source.pixels is not None or size <= MAX_DECODED_BYTES)
    return transform if fits else None


def _fitting_transform(
    source: Source, augment: AugmentConfig, preprocess: PreprocessConfig, device: torch.device, *, forced: bool
) -> EvalTransform | OriginalPixels | None:
    if augment.crop != "resized":
        return EvalTransform(preprocess)
    pixels, expected = source.pixels, pair(preprocess.image_size)
    max_pixels = MAX_AREA_RATIO * expected[0] * expected[1]
    size = pixels.shape[1:3] if pixels is not None else common_size(source, max_pixels)
    if size is not None and size[0] * size[1] <= max_pixels:
        fast = device.type != "cpu" or max(*size, *expected) <= MAX_CPU_SIDE
        if fast or forced:
            return OriginalPixels((*size, preprocess.channels))
    return EvalTransform(preprocess) if forced else None


def common_size(source: Source, max_pixels: int) -> tuple[int, int] | None:
    """Height and width of a sample of the images, if they all agree and have at most `max_pixels` pixels."""
    size = None
    for index in np.linspace(0, len(source) - 1, min(SIZE_SAMPLES, len(source))).astype(int).tolist():
        with record_error({}, 0):
            image = source[index].image
            jpeg = open_jpeg(image)
            image_size = jpeg.size if jpeg is not None else decode(image).shape[:2]
            if image_size != (size or image_size) or image_size[0] * image_size[1] > max_pixels:
                return None
            size = image_size
    return size


def num_bytes(transform: Transform, count: int) -> int:
    """Size in bytes of `count` transformed images."""
    return count * int(np.prod(transform.shape)) * np.dtype(transform.dtype).itemsize


def format_bytes(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def load(
    source: Source,
    transform: EvalTransform | OriginalPixels,
    device: torch.device,
    workers: int,
    indices: npt.NDArray[np.int64],
) -> ResidentImages | None:
    """Decode these images of a source and copy them to the device; None if their sizes differ."""
    pixels = source.pixels
    channels = transform.shape[2]
    if pixels is not None and pixels.shape[3] in (1, channels) and transform.keeps(pixels.shape[1:3]):
        selected = pixels if len(indices) == len(pixels) else pixels[indices]
        return ResidentImages(_to_device(selected, channels, device), {})
    decoded = _decode_all(source, transform, workers, indices)
    if decoded is None:
        return None
    images, bad = decoded
    return ResidentImages(_to_device(images, channels, device), bad)


def _decode_all(
    source: Source, transform: Transform, workers: int, indices: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[Any], dict[int, str]] | None:
    count, start = len(indices), time.monotonic()
    pool = make_pool(
        SampleReader(source, transform),
        rows=count,
        shape=transform.shape,
        dtype=transform.dtype,
        workers=workers,
        depth=1,
    )
    with ExitStack() as stack:
        stack.callback(pool.close)
        advance, before = None, 0

        def progress(done: int) -> None:
            nonlocal advance, before
            if advance is None and time.monotonic() - start > PROGRESS_BAR_AFTER_S:
                advance = stack.enter_context(progress_bar(f"decoding {source.name}", count))
            if advance is not None:
                advance(min(done, count) - before)
                before = min(done, count)

        pool.submit(indices, np.zeros(count, np.uint64))
        finished = pool.get(progress)
    if any(reason.startswith(WRONG_SIZE) for _, reason in finished.errors):
        return None
    return finished.images, {int(indices[row]): reason for row, reason in finished.errors}


def _to_device(images: npt.NDArray[Any], channels: int, device: torch.device) -> Tensor:
    """N H W C in memory -> N C H W on the device; a single channel is repeated `channels` times."""
    n, height, width, _ = images.shape
    dtype = torch.uint8 if images.dtype == np.uint8 else torch.float32
    out = torch.empty(n, channels, height, width, dtype=dtype, device=device)
    for first in range(0, n, COPY_CHUNK):
        chunk = np.array(images[first : first + COPY_CHUNK].transpose(0, 3, 1, 2), order="C")  # a writable copy
        out[first : first + COPY_CHUNK] = torch.from_numpy(chunk).to(device)  # broadcast over channels
    return out


def free_memory(device: torch.device) -> int:
    """Free memory of the device in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return min(_machine_memory(), _container_memory())


def _machine_memory() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            available = next(line for line in lines if line.startswith("MemAvailable"))
            return int(available.split()[1]) << 10
    except (OSError, StopIteration):
        pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}) else None
        return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE") if pages else 4 << 30


def _container_memory() -> int:
    """Memory that the container's limit leaves; without a limit, a huge number."""
    try:
        limit, used, stat = (
            Path("/sys/fs/cgroup", f"memory.{name}").read_text() for name in ("max", "current", "stat")
        )
        cached = dict(line.split() for line in stat.splitlines()).get("inactive_file", "0")  # reclaimed when needed
        return max(int(limit) - int(used) + int(cached), 0)
    except (OSError, ValueError):  # no such group, or "max"
        return 1 << 62


_cache: dict[int, dict[Any, ResidentImages]] = {}


def get_cached(source: Source, key: Any) -> ResidentImages | None:
    """The images that `add_cached` stored for this source; dropped with the source."""
    return _cache.get(id(source), {}).get(key)


def add_cached(source: Source, key: Any, images: ResidentImages) -> None:
    try:
        weakref.finalize(source, _cache.pop, id(source), None).atexit = False
    except TypeError:  # without a weak reference, another source could get the same id
        return
    _cache.setdefault(id(source), {})[key] = images
