"""An image from a stranger -> pixels: its header is judged before anything is unpacked."""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
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
from vitrail.runtime.malloc import trim_malloc
from vitrail.serve.image_headers import USUAL_SCANS, quick_header, scans
from vitrail.serve.limits import Limits
from vitrail.serve.problems import Problem, told

# H W C pixels, h rows and w columns of patches

Pixels = npt.NDArray[Any]
Bombs = (Image.DecompressionBombError, Image.DecompressionBombWarning)

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
"""Kinds of files that are read for strangers: what browsers and cameras write. Pillow knows some forty more."""
SCANS, LARGEST_SCANS = 128, 20
"""Passes of a progressive JPEG, at most, and those of the largest image that is taken: each costs a walk over all of
it."""
SMALL_PIXELS, SMALL_BYTES = 2_500_000, 4 * 2**20
"""What is decoded in a thread of the service, if its header is read in little time: pixels, as `weight` counts them,
and bytes. That is 70 ms of one core, at most."""
UNSEEN = 4
"""What an image whose header is not read at once counts for: the largest image, divided by this."""
TRIM = 16_000_000
"""Pixels from which an image's memory is given back to the system at once."""


@dataclass(frozen=True, slots=True)
class Opened:
    """An image whose header has been judged."""

    data: bytes
    source: bytes | Image.Image | None
    """What is decoded: the same bytes, or an image that Pillow has opened and not yet read. None: even the header takes
    long to read, and is judged when the image is decoded."""
    pixels: int
    cost: int
    """Its pixels, times what each of them costs compared with a JPEG's."""
    large: bool
    """Whether it is too much for a thread of the service."""


class Images:
    """Bytes -> pixels as the network wants them; every refusal is a `Problem`."""

    def __init__(self, preprocess: Preprocess, limits: Limits, grid: tuple[int, int] | None) -> None:
        self.preprocess, self.limits, self.grid = preprocess, limits, grid

    def pixels(self, data: bytes | str) -> Pixels:
        """H W C, 0 to 255; text is base64."""
        return self.unpack(self.open(data))

    def open(self, data: bytes | str) -> Opened:
        """Judge the header, in little time whatever the file holds."""
        data = _unwrapped(data) if isinstance(data, str) else data
        if not quick_header(data):
            most = self.limits.pixels
            return Opened(data, None, most, most // UNSEEN, large=True)
        source, pixels, cost = self._judged(data)
        return Opened(data, source, pixels, cost, large=cost > SMALL_PIXELS or len(data) > SMALL_BYTES)

    def unpack(self, opened: Opened) -> Pixels:
        """The rest of the work."""
        source = self._judged(opened.data)[0] if opened.source is None else opened.source
        try:
            found = self.preprocess.pixels(source)
        except ImageError as error:
            raise Problem(400, "image_unreadable", told(error, "the image cannot be read: it is damaged.")) from None
        except Bombs:
            raise self._too_large() from None
        if opened.pixels >= TRIM:
            trim_malloc()
        return found

    def without(self, pixels: Pixels, hide: Sequence[int], fill: Fill) -> Pixels:
        """The same with some patches hidden."""
        mask = self._mask(hide)
        image = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1).float()
        if fill == "zero":  # what is zero after normalization
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

    def _judged(self, data: bytes) -> tuple[bytes | Image.Image, int, int]:
        """What is to be decoded, its pixels and its cost."""
        found = jpeg.parse_header(data)
        if found is not None:
            pixels, passes = self._checked(data, found.width, found.height)
            return data, pixels, pixels * passes
        image = self._identified(data)
        pixels, passes = self._checked(data, *image.size)
        return image, pixels, pixels * passes * weight(image)

    def _identified(self, data: bytes) -> Image.Image:
        """Opened and not yet read."""
        try:
            image = Image.open(io.BytesIO(data), formats=_formats())
        except UnidentifiedImageError:
            raise Problem(400, "image_unreadable", _stranger(data)) from None
        except Bombs:
            raise self._too_large() from None
        except Exception as error:  # damaged data can make a parser raise anything
            raise Problem(400, "image_unreadable", "the image cannot be read: its header is damaged.") from error
        if any(tile[0] in Image.DECODERS for tile in getattr(image, "tile", ())):
            message = f"this kind of {image.format} is not read here; send it as PNG or JPEG."
            raise Problem(400, "image_unreadable", message)
        return image

    def _checked(self, data: bytes, width: int, height: int) -> tuple[int, int]:
        """How many pixels there are, if they are not too many, and a JPEG not in too many scans.

        And what a pixel of a JPEG costs for its scans: the usual number of them counts 1.
        """
        size, passes = width * height, 1
        if size > self.limits.pixels:
            raise self._too_large(f"{width} x {height} pixels")
        if data.startswith(b"\xff\xd8"):
            most = min(SCANS, LARGEST_SCANS * self.limits.pixels // max(size, 1))
            if (count := scans(data, most)) > most:
                raise Problem(400, "image_unreadable", f"the image comes in more than {most} scans.")
            passes = max(-(-count // USUAL_SCANS), 1)
        return size, passes

    def _too_large(self, what: str = "too many pixels") -> Problem:
        return Problem(413, "too_many_pixels", f"the image has {what}: at most {self.limits.pixels:,} are taken.")


def weight(image: Image.Image) -> int:
    """What a pixel of it costs, compared with a JPEG's: measured, and rounded up."""
    if image.mode.startswith("I") or image.mode == "F":
        return 4
    return 2 if image.format in ("WEBP", "AVIF") or image.has_transparency_data else 1


def bound_pillow(pixels: int) -> None:
    """For a process that only serves: Pillow itself refuses more pixels, also in images within images."""
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
        raise Problem(400, "not_base64", "the image is not base64: wanted the file's bytes in base64.") from None


def _stranger(data: bytes) -> str:
    if not data:
        return "the image is empty (0 bytes)."
    return (
        f"this is no image that is read here: it begins with {data[:8].hex(' ')}; wanted JPEG, PNG, WebP, GIF, "
        "BMP, TIFF or AVIF."
    )
