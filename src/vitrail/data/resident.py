"""Small data sets: decoded once, and from then on a tensor of bytes on the device.

    choose      the view in which a source's images can stay there, or None
    load        all images through that view

Images that are all of one size stay as they are (CIFAR: 32 x 32), and random parts of them are
taken on the device. Where nothing is cropped from them, they stay as evaluation sees them.
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
from vitrail.data.view import ODD_SIZE, Evaluated, Native, Reading, View, noting
from vitrail.data.workers import make_pool
from vitrail.errors import ConfigError

# N images, C channels, H rows, W columns

SHARE = 4
"""At most one part in so many of the free memory is taken without being asked to."""
DECODED = 2 << 30
"""Bytes that images which are still to be decoded may take: it must not keep anybody waiting."""
LARGER = 4
"""Images of more than so many times the area that is wanted are not cut up on the device."""
ON_CPU = 64
"""On a CPU, neither those nor what is made of them may be wider: above, workers are quicker."""
LOOKED_AT = 32
"""So many images of one size are taken to mean that all are, until one is found that is not."""
CHUNK = 4096
BAR_AFTER = 1.0
"""Seconds before progress is shown."""


@dataclass(frozen=True)
class Resident:
    """All images of a source, on the device."""

    images: Tensor
    """N C H W, uint8, or float32 where the preprocessing never rounds."""
    bad: dict[int, str]
    """Number of an image that could not be read -> why; it is zero."""


def choose(
    source: Source,
    *,
    config: DataConfig,
    augment: AugmentConfig,
    preprocess: PreprocessConfig,
    device: torch.device,
    sharers: int = 1,
) -> View | None:
    """How the images would stay on the device, if they fit there, shared with so many processes like this one."""
    if config.resident is False:
        return None
    view = _view(source, augment, preprocess, device, asked=config.resident is True)
    if view is None:
        return None
    size, free = size_of(view, len(source)), free_memory(device) // sharers
    if config.resident:
        if size > free:
            raise ConfigError(
                f"data.resident=true needs {gib(size)} for {source.name}, and {device} has {gib(free)} free; "
                "leave it out, and images are read as they are needed."
            )
        return view
    return view if size <= free // SHARE and (source.pixels is not None or size <= DECODED) else None


def _view(
    source: Source, augment: AugmentConfig, preprocess: PreprocessConfig, device: torch.device, *, asked: bool
) -> View | None:
    if augment.crop != "resized":
        return Evaluated(preprocess)
    pixels, wanted = source.pixels, pair(preprocess.image_size)
    most = LARGER * wanted[0] * wanted[1]
    size = pixels.shape[1:3] if pixels is not None else common_size(source, most)
    if size is not None and size[0] * size[1] <= most:
        quick = device.type != "cpu" or max(*size, *wanted) <= ON_CPU
        if quick or asked:
            return Native((*size, preprocess.channels))
    return Evaluated(preprocess) if asked else None


def common_size(source: Source, most: int) -> tuple[int, int] | None:
    """Height and width of a few of the images, if they are all alike and have at most so many pixels."""
    size = None
    for index in np.linspace(0, len(source) - 1, min(LOOKED_AT, len(source))).astype(int).tolist():
        with noting({}, 0):
            image = source[index].image
            jpeg = open_jpeg(image)
            found = jpeg.size if jpeg is not None else decode(image).shape[:2]
            if found != (size or found) or found[0] * found[1] > most:
                return None
            size = found
    return size


def size_of(view: View, count: int) -> int:
    """Bytes of so many images."""
    return count * int(np.prod(view.shape)) * np.dtype(view.dtype).itemsize


def gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def load(
    source: Source, view: View, device: torch.device, workers: int, numbers: npt.NDArray[np.int64]
) -> Resident | None:
    """These images of a source; None where one turns out to be of another size than the rest."""
    pixels = source.pixels
    if pixels is not None and isinstance(view, Native) and pixels.shape[3] in (1, view.shape[2]):
        given = pixels if len(numbers) == len(pixels) else pixels[numbers]
        return Resident(_placed(given, view.shape[2], device), {})
    read = _decoded(source, view, workers, numbers)
    if read is None:
        return None
    images, bad = read
    return Resident(_placed(images, view.shape[2], device), bad)


def _decoded(
    source: Source, view: View, workers: int, numbers: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[Any], dict[int, str]] | None:
    count, start = len(numbers), time.monotonic()
    pool = make_pool(Reading(source, view), rows=count, shape=view.shape, dtype=view.dtype, workers=workers, depth=1)
    with ExitStack() as stack:
        stack.callback(pool.close)
        shown, before = None, 0

        def progress(done: int) -> None:
            nonlocal shown, before
            if shown is None and time.monotonic() - start > BAR_AFTER:
                shown = stack.enter_context(progress_bar(f"decoding {source.name}", count))
            if shown is not None:
                shown(min(done, count) - before)
                before = min(done, count)

        pool.ask(numbers, np.zeros(count, np.uint64))
        taken = pool.take(progress)
    if any(reason.startswith(ODD_SIZE) for _, reason in taken.problems):
        return None
    return taken.images, {int(numbers[row]): reason for row, reason in taken.problems}


def _placed(images: npt.NDArray[Any], channels: int, device: torch.device) -> Tensor:
    """N H W C in memory -> N C H W on the device; gray is repeated where more channels are wanted."""
    n, height, width, _ = images.shape
    dtype = torch.uint8 if images.dtype == np.uint8 else torch.float32
    out = torch.empty(n, channels, height, width, dtype=dtype, device=device)
    for first in range(0, n, CHUNK):
        chunk = np.array(images[first : first + CHUNK].transpose(0, 3, 1, 2), order="C")  # a copy: writable
        out[first : first + CHUNK] = torch.from_numpy(chunk).to(device)  # broadcast over channels
    return out


def free_memory(device: torch.device) -> int:
    """Bytes that could be taken on the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return min(_of_machine(), _of_container())


def _of_machine() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            available = next(line for line in lines if line.startswith("MemAvailable"))
            return int(available.split()[1]) << 10
    except (OSError, StopIteration):
        pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}) else None
        return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE") if pages else 4 << 30


def _of_container() -> int:
    """What a container's limit leaves; without one, no limit."""
    try:
        most, used, stat = (Path("/sys/fs/cgroup", f"memory.{name}").read_text() for name in ("max", "current", "stat"))
        cached = dict(line.split() for line in stat.splitlines()).get("inactive_file", "0")  # given back when needed
        return max(int(most) - int(used) + int(cached), 0)
    except (OSError, ValueError):  # no such group, or "max"
        return 1 << 62


_kept: dict[int, dict[Any, Resident]] = {}


def kept(source: Source, key: Any) -> Resident | None:
    """What `keep` was given for this source, for as long as the source is there."""
    return _kept.get(id(source), {}).get(key)


def keep(source: Source, key: Any, found: Resident) -> None:
    try:
        weakref.finalize(source, _kept.pop, id(source), None).atexit = False
    except TypeError:  # a source that cannot be watched might be gone, and another stand in its place
        return
    _kept.setdefault(id(source), {})[key] = found
