"""JPEG files without Pillow: the same pixels sooner, and fewer of them where fewer will do.

    header     a file's bytes -> its size and kind, or None where Pillow has to judge
    pixels     the picture as it is stored, whole or at 1/2, 1/4 or 1/8 of its size
    turned     and upright

simplejpeg (`pip install vitrail[fast]`) wraps the library that Pillow's own JPEG reader wraps, so
that whole pictures have the same pixels; it is used only once it has shown that here. Whatever is
unusual (CMYK, 12 bits, arithmetic coding, rare chroma layouts), and whatever that library so much
as warns about, is left to Pillow, which alone decides what can be read.

One core of a Xeon, 500 x 375 pictures in pixels a second: Pillow 64 million, simplejpeg 180 million.
Smaller sizes are computed in the frequency domain: most of the arithmetic, though none of the
unpacking, is never done.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

try:
    import simplejpeg
except ImportError:  # an extra
    simplejpeg = None

Pixels = npt.NDArray[np.uint8]

SCALES = (8, 4, 2)
"""A picture can be decoded at one over these of its size."""
SMALLEST = 64
"""Pictures with a shorter side are decoded whole: several scales would give them one size."""

# What each value of the EXIF orientation tag asks to be done to the stored pixels.
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
ORIENTATION = 0x0112
SIDEWAYS = {UPRIGHT[orientation] for orientation in (5, 6, 7, 8)}

START, SCAN, EXIF = 0xD8, 0xDA, 0xE1
FRAMES = range(0xC0, 0xD0)
NO_FRAMES = (0xC4, 0xC8, 0xCC)  # tables and a reserved marker, numbered among the frames
KNOWN_FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended, progressive: all Huffman-coded
LAYOUTS = (0x11, 0x21, 0x22)  # luma samples across and down for one of chroma: 4:4:4, 4:2:2, 4:2:0


@dataclass(frozen=True, slots=True)
class Header:
    """What the start of a JPEG file says."""

    data: bytes
    """The whole file."""
    height: int
    width: int
    grey: bool
    tagged: bool
    """Whether there is a block that may say which way up it goes."""


def header(data: bytes) -> Header | None:
    """Size and kind of a JPEG that `pixels` can decode; None for any other and for what is no JPEG."""
    at, tagged, frame = 2, False, None
    if data[:2] != b"\xff\xd8":
        return None
    while at + 4 <= len(data):
        if data[at] != 0xFF:
            return None
        marker = data[at + 1]
        if marker == 0xFF:  # padding
            at += 1
            continue
        if marker == SCAN:
            return None if frame is None else Header(data, *frame, tagged)
        if marker == START or marker < 0xC0 or 0xD0 <= marker <= 0xD9:  # what has no place before the scan
            return None
        if marker == EXIF:
            tagged = True
        elif marker in FRAMES and marker not in NO_FRAMES:
            frame = _frame(data, at) if frame is None and marker in KNOWN_FRAMES else None
            if frame is None:
                return None
        at += 2 + (data[at + 2] << 8 | data[at + 3])
    return None


def _frame(data: bytes, at: int) -> tuple[int, int, bool] | None:
    """Height, width and whether it is grey, where it is of a usual kind."""
    frame = data[at + 4 : at + 19]  # bits, height, width, components; for each: its name, layout, table
    if len(frame) < 9 or frame[0] != 8:
        return None
    height, width, components = frame[1] << 8 | frame[2], frame[3] << 8 | frame[4], frame[5]
    if height == 0 or width == 0:
        return None
    if components == 1:
        return height, width, True
    usual = components == 3 and len(frame) == 15 and frame[7] in LAYOUTS and frame[10] == frame[13] == 0x11
    return (height, width, False) if usual else None


def pixels(jpeg: Header, scale: int = 1) -> Pixels | None:
    """uint8 H W C, C = 1 or 3, as stored: not yet upright. None where Pillow has to try.

    At a scale of 2, 4 or 8 the sides are divided by it and rounded up.
    """
    library = trusted() if _allowed(jpeg) else None
    if library is None:
        return None
    height, width = (-(-jpeg.height // scale), -(-jpeg.width // scale)) if scale > 1 else (0, 0)
    try:
        decoded: Pixels = library.decode_jpeg(
            jpeg.data, "GRAY" if jpeg.grey else "RGB", min_height=height, min_width=width, strict=True
        )
    except ValueError:  # truncated or damaged, if only a little
        return None
    return decoded


def turned(pixels: Pixels, turn: Image.Transpose | None) -> Pixels:
    """Pillow's transpose for an array H W C: a view, nothing is copied."""
    if turn is None:
        return pixels
    down, right = {
        Image.Transpose.FLIP_LEFT_RIGHT: (1, -1),
        Image.Transpose.ROTATE_180: (-1, -1),
        Image.Transpose.FLIP_TOP_BOTTOM: (-1, 1),
        Image.Transpose.TRANSPOSE: (1, 1),
        Image.Transpose.ROTATE_270: (-1, 1),
        Image.Transpose.TRANSVERSE: (-1, -1),
        Image.Transpose.ROTATE_90: (1, -1),
    }[turn]
    pixels = pixels[::down, ::right]
    return pixels.swapaxes(0, 1) if turn in SIDEWAYS else pixels


def _allowed(jpeg: Header) -> bool:
    """Pillow refuses twice its limit, with a reason."""
    return Image.MAX_IMAGE_PIXELS is None or jpeg.height * jpeg.width <= 2 * Image.MAX_IMAGE_PIXELS


@lru_cache(maxsize=1)
def trusted() -> ModuleType | None:
    """simplejpeg, if it is installed and decodes to the very pixels that this Pillow does."""
    if simplejpeg is None:
        return None
    noise = (np.arange(21 * 35 * 3) ** 2 % 251).astype(np.uint8).reshape(21, 35, 3)
    image = Image.fromarray(noise).resize((70, 42))
    try:
        agree = all(
            _agree(image.convert(mode), subsampling=layout, progressive=progressive)
            for mode in ("L", "RGB")
            for layout in (0, 1, 2)
            for progressive in (False, True)
        )
    except Exception:  # whatever is the matter: Pillow does without it
        return None
    return simplejpeg if agree else None


def _agree(image: Image.Image, **options: Any) -> bool:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90, **options)
    ours = simplejpeg.decode_jpeg(file.getvalue(), "GRAY" if image.mode == "L" else "RGB")
    return np.array_equal(ours.squeeze(), np.asarray(Image.open(file)))
