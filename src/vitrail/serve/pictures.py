"""A picture from a stranger -> pixels: its header is judged before anything is unpacked."""

from __future__ import annotations

import base64
import binascii
import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, UnidentifiedImageError

from vitrail.data import jpeg
from vitrail.data.preprocess import Preprocess
from vitrail.errors import ImageError
from vitrail.explain.hiding import Fill, filling, hidden
from vitrail.runtime.heap import trim_heap
from vitrail.serve.budget import Budget
from vitrail.serve.limits import Limits
from vitrail.serve.problems import Problem, told

# H W C pixels, h rows and w columns of patches

Pixels = npt.NDArray[Any]
Bombs = (Image.DecompressionBombError, Image.DecompressionBombWarning)

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
"""Kinds of files that are read for strangers: what browsers and cameras write. Pillow knows some forty more."""
SCANS, LARGEST_SCANS = 128, 20
"""Passes of a progressive JPEG, at most, and those of the largest picture that is taken: each costs a walk over the
whole. libjpeg makes ten of a photograph and eighteen of one in CMYK."""
MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]", re.S)
"""In a JPEG: anything but data, padding and the restarts within them."""
START_OF_SCAN, END, LONE = 0xDA, 0xD9, (0x01, 0xD8)
AT_A_TIME = 12_500_000
"""Pixels that are unpacked at a time for each decoder, if no single picture has more: about ten bytes each."""
SMALL, LARGE = 1_000_000, 16_000_000
"""Pixels up to which a picture's memory is not worth a count, and from which it is given back at once."""


class Pictures:
    """Bytes -> pixels as the network wants them; every refusal is a `Problem`."""

    def __init__(self, preprocess: Preprocess, limits: Limits, grid: tuple[int, int] | None, decoders: int = 1) -> None:
        """`decoders`: threads that will ask for pixels."""
        self.preprocess, self.limits, self.grid = preprocess, limits, grid
        self.budget = Budget(max(limits.pixels, decoders * AT_A_TIME))

    def pixels(self, data: bytes | str) -> Pixels:
        """H W C, 0 to 255; text is base64."""
        whole = _unwrapped(data) if isinstance(data, str) else data
        try:
            opened, size = self._opened(whole)
            with self._room(size):
                return self.preprocess.pixels(opened)
        except ImageError as error:
            raise Problem(400, "image_unreadable", told(error, "the picture cannot be read: it is damaged.")) from None
        except Bombs:
            raise self._too_large() from None

    @contextmanager
    def _room(self, size: int) -> Iterator[None]:
        """Inside, so many pixels may be unpacked."""
        if size <= SMALL:
            yield
            return
        with self.budget.taken(size):
            yield
        if size >= LARGE:
            trim_heap()

    def without(self, pixels: Pixels, hide: Sequence[int], fill: Fill) -> Pixels:
        """The same with some patches hidden."""
        mask = self._mask(hide)
        image = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1).float()
        if fill == "zero":  # what is zero after normalisation
            instead = (255 * torch.tensor(self.preprocess.config.mean))[:, None, None].expand_as(image)
        else:
            instead = filling(image[None], fill)[0]
        left = hidden(image, instead, mask[None])[0].permute(1, 2, 0).numpy()
        return left if pixels.dtype == np.float32 else np.rint(left).astype(pixels.dtype)

    def check_hidden(self, hide: Sequence[int]) -> None:
        """Raise Problem unless these are patches."""
        count = self.grid[0] * self.grid[1] if self.grid else 0
        for number in hide:
            if not 0 <= number < count:
                raise Problem(400, "no_such_patch", f"there is no patch {number}: wanted 0 to {count - 1}.")

    def _mask(self, hide: Sequence[int]) -> torch.Tensor:
        assert self.grid is not None
        mask = torch.zeros(self.grid[0] * self.grid[1], dtype=torch.bool)
        mask[list(hide)] = True
        return mask.view(self.grid)

    def _opened(self, data: bytes) -> tuple[bytes | Image.Image, int]:
        """What is safe to unpack, and its pixels' number: a usual JPEG as it is, all else opened and not yet read."""
        found = jpeg.header(data)
        if found is not None:
            return data, self._checked(data, found.width, found.height)
        try:
            image = Image.open(io.BytesIO(data), formats=_formats())
        except UnidentifiedImageError:
            raise Problem(400, "image_unreadable", _stranger(data)) from None
        except Bombs:
            raise self._too_large() from None
        except Exception as error:  # damaged data can make a parser raise anything
            raise Problem(400, "image_unreadable", "the picture cannot be read: its header is damaged.") from error
        return image, self._checked(data, *image.size)

    def _checked(self, data: bytes, width: int, height: int) -> int:
        """How many pixels there are, if they are not too many, and a JPEG not in too many scans."""
        size = width * height
        if size > self.limits.pixels:
            raise self._too_large(f"{width} x {height} pixels")
        if data.startswith(b"\xff\xd8"):
            most = min(SCANS, LARGEST_SCANS * self.limits.pixels // max(size, 1))
            if scans(data, most) > most:
                raise Problem(400, "image_unreadable", f"the picture comes in more than {most} scans.")
        return size

    def _too_large(self, what: str = "too many pixels") -> Problem:
        return Problem(413, "too_many_pixels", f"the picture has {what}: at most {self.limits.pixels:,} are taken.")


def scans(data: bytes, most: int) -> int:
    """Of a JPEG's main picture, up to its end, counted no further than past `most`.

    What lies in its metadata (a thumbnail) or follows its end (a phone's video) is not of it.
    """
    if data.count(b"\xff\xda") <= most:  # what is looked for, and perhaps more: most pictures need no closer look
        return 0
    at, count = 2, 0
    while count <= most and (found := MARKER.search(data, at)) is not None:
        at, marker = found.end(), data[found.end() - 1]
        if marker == END:
            break
        if marker not in LONE:  # all others say how long they are
            count += marker == START_OF_SCAN
            at += max(int.from_bytes(data[at : at + 2], "big"), 2)
    return count


def bound_pillow(pixels: int) -> None:
    """For a process that only serves: Pillow itself refuses more pixels, also in pictures within pictures."""
    Image.MAX_IMAGE_PIXELS = max(pixels // 2, 1)  # it warns above that, and refuses above twice that
    warnings.filterwarnings("ignore", module=r"PIL\.")


@lru_cache(maxsize=1)
def _formats() -> tuple[str, ...]:
    """Those that this Pillow was built with."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _unwrapped(text: str) -> bytes:
    """base64, with or without `data:image/png;base64,` before it."""
    head, comma, rest = text.partition(",") if text.startswith("data:") else ("", "", text)
    try:
        if comma and not head.endswith(";base64"):
            raise ValueError
        return base64.b64decode(rest, validate=True)
    except (binascii.Error, ValueError):
        raise Problem(400, "not_base64", "the picture is not base64: wanted the file's bytes in base64.") from None


def _stranger(data: bytes) -> str:
    if not data:
        return "the picture is empty (0 bytes)."
    return (
        f"this is no picture that is read here: it begins with {data[:8].hex(' ')}; wanted JPEG, PNG, WebP, GIF, "
        "BMP, TIFF or AVIF."
    )
