"""Decodes untrusted images. The header is checked before any pixel is decoded."""

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
from vitrail.explain.masking import Fill, mask_patches, replacement_pixels
from vitrail.runtime.malloc import trim_malloc
from vitrail.serve.http_errors import RequestError, public_message
from vitrail.serve.image_headers import USUAL_SCANS, count_scans, is_quick_header
from vitrail.serve.limits import Limits

# H W C pixels, h rows and w columns of patches

Pixels = npt.NDArray[Any]
DECOMPRESSION_BOMBS = (Image.DecompressionBombError, Image.DecompressionBombWarning)

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
"""Formats accepted from clients: those that browsers and cameras write. Pillow supports some forty more."""
MAX_SCANS, MAX_SCANS_OF_LARGEST = 128, 20
"""Maximum number of scans of a progressive JPEG, and of one with the maximum number of pixels. Decoding a scan goes
over all pixels."""
SMALL_PIXELS, SMALL_BYTES = 2_500_000, 4 * 2**20
"""Limits of a small image, which is decoded in a thread of the service if its header is quick: pixels as counted by
`pixel_cost`, and bytes. Decoding one takes at most 70 ms of one core."""
UNREAD_HEADER_DIVISOR = 4
"""An image whose header is not read yet counts as the largest allowed image, divided by this."""
TRIM_PIXELS = 16_000_000
"""Minimum number of pixels for which free memory is returned to the system after decoding."""


@dataclass(frozen=True, slots=True)
class InspectedImage:
    """An encoded image whose cost is known."""

    data: bytes
    source: bytes | Image.Image | None
    """What is decoded: the bytes, or an image opened by Pillow. None: the header is slow to read and is checked
    during decoding."""
    pixels: int
    cost: int
    """Number of pixels times the cost of a pixel relative to a JPEG."""
    large: bool
    """Whether it is decoded in a separate process."""


class ImageDecoder:
    """Image bytes -> pixels at the input size of the network. Raises RequestError for invalid images."""

    def __init__(self, preprocess: Preprocess, limits: Limits, grid: tuple[int, int] | None) -> None:
        self.preprocess, self.limits, self.grid = preprocess, limits, grid

    def decode_bytes(self, data: bytes | str) -> Pixels:
        """Image bytes, or base64 text -> H W C pixels, 0 to 255."""
        return self.decode(self.inspect(data))

    def inspect(self, data: bytes | str) -> InspectedImage:
        """Check the header and estimate the cost. Takes little time for any file."""
        data = _decode_base64(data) if isinstance(data, str) else data
        if not is_quick_header(data):
            limit = self.limits.max_pixels
            return InspectedImage(data, None, limit, limit // UNREAD_HEADER_DIVISOR, large=True)
        source, pixels, cost = self._read_header(data)
        return InspectedImage(data, source, pixels, cost, large=cost > SMALL_PIXELS or len(data) > SMALL_BYTES)

    def decode(self, opened: InspectedImage) -> Pixels:
        """Decode and resize an inspected image: H W C pixels, 0 to 255."""
        source = self._read_header(opened.data)[0] if opened.source is None else opened.source
        try:
            pixels = self.preprocess.pixels(source)
        except ImageError as error:
            raise RequestError(
                400, "image_unreadable", public_message(error, "the image cannot be read: it is damaged.")
            ) from None
        except DECOMPRESSION_BOMBS:
            raise self._too_large() from None
        if opened.pixels >= TRIM_PIXELS:
            trim_malloc()
        return pixels

    def hide_patches(self, pixels: Pixels, hide: Sequence[int], fill: Fill) -> Pixels:
        """Replace the patches `hide` according to `fill`; H W C."""
        mask = self._patch_mask(hide)
        image = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1).float()
        if fill == "zero":  # 0 after normalization
            replacement = (255 * torch.tensor(self.preprocess.config.mean))[:, None, None].expand_as(image)
        else:
            replacement = replacement_pixels(image[None], fill)[0]
        filled = mask_patches(image, replacement, mask[None])[0].permute(1, 2, 0).numpy()
        return filled if pixels.dtype == np.float32 else np.rint(filled).astype(pixels.dtype)

    def check_patches(self, hide: Sequence[int]) -> None:
        """Raise RequestError if an index is not a patch."""
        count = self.grid[0] * self.grid[1] if self.grid else 0
        for number in hide:
            if not 0 <= number < count:
                raise RequestError(400, "patch_out_of_range", f"got patch {number}, expected 0 to {count - 1}.")

    def _patch_mask(self, hide: Sequence[int]) -> torch.Tensor:
        assert self.grid is not None
        mask = torch.zeros(self.grid[0] * self.grid[1], dtype=torch.bool)
        mask[list(hide)] = True
        return mask.view(self.grid)

    def _read_header(self, data: bytes) -> tuple[bytes | Image.Image, int, int]:
        """Source to decode, number of pixels, and cost."""
        header = jpeg.parse_header(data)
        if header is not None:
            pixels, passes = self._check_size(data, header.width, header.height)
            return data, pixels, pixels * passes
        image = self._open_with_pillow(data)
        pixels, passes = self._check_size(data, *image.size)
        return image, pixels, pixels * passes * pixel_cost(image)

    def _open_with_pillow(self, data: bytes) -> Image.Image:
        """Open the image without decoding it."""
        try:
            image = Image.open(io.BytesIO(data), formats=_available_formats())
        except UnidentifiedImageError:
            raise RequestError(400, "image_unreadable", _unsupported_message(data)) from None
        except DECOMPRESSION_BOMBS:
            raise self._too_large() from None
        except Exception as error:  # damaged data can raise any exception
            raise RequestError(400, "image_unreadable", "the image cannot be read: its header is damaged.") from error
        if any(tile[0] in Image.DECODERS for tile in getattr(image, "tile", ())):
            message = f"this variant of {image.format} is not supported; send it as PNG or JPEG."
            raise RequestError(400, "image_unreadable", message)
        return image

    def _check_size(self, data: bytes, width: int, height: int) -> tuple[int, int]:
        """Number of pixels, and cost factor for the scans of a JPEG (1 for the usual number).

        Raises RequestError if there are too many pixels or scans.
        """
        size, passes = width * height, 1
        if size > self.limits.max_pixels:
            raise self._too_large(f"{width} x {height} pixels")
        if data.startswith(b"\xff\xd8"):
            limit = min(MAX_SCANS, MAX_SCANS_OF_LARGEST * self.limits.max_pixels // max(size, 1))
            if (count := count_scans(data, limit)) > limit:
                raise RequestError(400, "image_unreadable", f"the image has more than {limit} scans.")
            passes = max(-(-count // USUAL_SCANS), 1)
        return size, passes

    def _too_large(self, what: str = "too many pixels") -> RequestError:
        return RequestError(
            413, "too_many_pixels", f"the image has {what}; at most {self.limits.max_pixels:,} are allowed."
        )


def pixel_cost(image: Image.Image) -> int:
    """Time to decode a pixel relative to a JPEG: measured, and rounded up."""
    if image.mode.startswith("I") or image.mode == "F":
        return 4
    return 2 if image.format in ("WEBP", "AVIF") or image.has_transparency_data else 1


def limit_pillow_pixels(pixels: int) -> None:
    """Make Pillow itself reject larger images, including embedded ones. Affects the whole process."""
    Image.MAX_IMAGE_PIXELS = max(pixels // 2, 1)  # Pillow warns above this, and raises above twice this
    warnings.filterwarnings("ignore", module=r"PIL\.")


@lru_cache(maxsize=1)
def _available_formats() -> tuple[str, ...]:
    """The FORMATS that the installed Pillow supports."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _decode_base64(text: str) -> bytes:
    """Decode base64 text, with or without a `data:image/png;base64,` prefix."""
    head, comma, encoded = text.partition(",") if text.startswith("data:") else ("", "", text)
    try:
        if comma and not head.endswith(";base64"):
            raise ValueError
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(
            400, "not_base64", "the image is not valid base64; expected the bytes of the file in base64."
        ) from None


def _unsupported_message(data: bytes) -> str:
    if not data:
        return "the image is empty (0 bytes)."
    return (
        f"this is not a supported image: it begins with {data[:8].hex(' ')}; expected JPEG, PNG, WebP, GIF, "
        "BMP, TIFF or AVIF."
    )
