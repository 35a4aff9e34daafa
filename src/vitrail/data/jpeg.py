"""JPEG files without Pillow: the same pixels sooner, and fewer of them where fewer will do.

    header     a file's bytes -> its size and kind, or None where Pillow has to judge
    pixels     the image as it is stored, whole or at 1/2, 1/4 or 1/8 of its size
    transposed     pixels made upright;   `stored_box`: a box of the upright image where it is stored

simplejpeg (`pip install vitrail[fast]`) wraps the library that Pillow's own JPEG reader wraps, so
that whole images have the same pixels; it is used only once it has shown that here. Whatever is
unusual (CMYK, 12 bits, arithmetic coding, rare chroma layouts), and whatever that library so much
as warns about, is left to Pillow, which alone decides what can be read.

For training less will do. Smaller sizes are computed in the frequency domain, where most of the
arithmetic is never done, and unpacking height_offset below the last row that is wanted. What is then decoded
has the pixels it would have had, and a file that is cut off is still found out. 12 megapixels on one
core of a Xeon: Pillow 83 ms; simplejpeg whole 55, at 1/8 of the size 29, the upper half of that 16.
"""

from __future__ import annotations

import io
import re
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
Box = tuple[int, int, int, int]
"""Top, left, height, width."""

SCALES = (8, 4, 2)
"""An image can be decoded at one over these of its size."""
MCU_ROWS = 16
"""Rows that are coded together, at most."""
MIN_SAVING = 1.05
"""So many times the rows that are unpacked there must be for stopping to be worth it."""
UNREAD_DATA = re.compile(r"Corrupt JPEG data: \d+ extraneous bytes before marker 0xd9")
MIN_SCALED_SIDE = 64
"""Images with a shorter side are decoded whole: several scales would give them one size."""

# What each value of the EXIF orientation tag asks to be done to the stored pixels.
EXIF_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
EXIF_ORIENTATION = 0x0112
SWAPS_AXES = {EXIF_TRANSPOSE[orientation] for orientation in (5, 6, 7, 8)}
AXIS_STEPS = {  # which way its rows and columns are read, before rows become columns where it lay sideways
    Image.Transpose.FLIP_LEFT_RIGHT: (1, -1),
    Image.Transpose.ROTATE_180: (-1, -1),
    Image.Transpose.FLIP_TOP_BOTTOM: (-1, 1),
    Image.Transpose.TRANSPOSE: (1, 1),
    Image.Transpose.ROTATE_270: (-1, 1),
    Image.Transpose.TRANSVERSE: (-1, -1),
    Image.Transpose.ROTATE_90: (1, -1),
}

START_OF_IMAGE, START_OF_SCAN, RESTART_INTERVAL, EXIF_SEGMENT = 0xD8, 0xDA, 0xDD, 0xE1
FRAME_MARKERS = range(0xC0, 0xD0)
NOT_FRAME_MARKERS = (0xC4, 0xC8, 0xCC)  # tables and a reserved marker, numbered among the frames
SUPPORTED_FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended, progressive: all Huffman-coded
PROGRESSIVE = 0xC2
SUBSAMPLINGS = (0x11, 0x21, 0x22)  # luma samples across and down for one of chroma: 4:4:4, 4:2:2, 4:2:0


@dataclass(frozen=True, slots=True)
class JpegHeader:
    """What the start of a JPEG file says."""

    data: bytes
    """The whole file."""
    height: int
    width: int
    gray: bool
    has_exif: bool
    """Whether there is a block that may say which way up it goes."""
    height_offset: int
    """Where its height stands, if unpacking may stop at another: it has one scan from top to bottom.
    Else 0."""


def parse_header(data: bytes) -> JpegHeader | None:
    """Size and kind of a JPEG that `pixels` can decode; None for any other and for what is no JPEG."""
    at, has_exif, height_offset, frame = 2, False, 0, None
    if data[:2] != b"\xff\xd8":
        return None
    while at + 4 <= len(data):
        if data[at] != 0xFF:
            return None
        marker = data[at + 1]
        if marker == 0xFF:  # padding
            at += 1
            continue
        if marker == START_OF_SCAN:
            return None if frame is None else JpegHeader(data, *frame, has_exif, max(height_offset, 0))
        if marker == START_OF_IMAGE or marker < 0xC0 or 0xD0 <= marker <= 0xD9:  # what has no place before the scan
            return None
        if marker == EXIF_SEGMENT:
            has_exif = True
        elif marker == RESTART_INTERVAL:  # in the middle of the data, they hide where those end
            height_offset = -1
        elif marker in FRAME_MARKERS and marker not in NOT_FRAME_MARKERS:
            frame = _parse_frame(data, at) if frame is None and marker in SUPPORTED_FRAMES else None
            if frame is None:
                return None
            if marker != PROGRESSIVE and height_offset == 0:
                height_offset = at + 5
        at += 2 + (data[at + 2] << 8 | data[at + 3])
    return None


def _parse_frame(data: bytes, at: int) -> tuple[int, int, bool] | None:
    """Height, width and whether it is gray, where it is of a usual kind."""
    frame = data[at + 4 : at + 19]  # bits, height, width, components; for each: its name, layout, table
    if len(frame) < 9 or frame[0] != 8:
        return None
    height, width, components = frame[1] << 8 | frame[2], frame[3] << 8 | frame[4], frame[5]
    if height == 0 or width == 0:
        return None
    if components == 1:
        return height, width, True
    usual = components == 3 and len(frame) == 15 and frame[7] in SUBSAMPLINGS and frame[10] == frame[13] == 0x11
    return (height, width, False) if usual else None


def decode_pixels(jpeg: JpegHeader, scale: int = 1, rows: int | None = None) -> Pixels | None:
    """uint8 H W C, C = 1 or 3, as stored: not yet upright. None where Pillow has to try.

    At a scale of 2, 4 or 8 the sides are divided by it and rounded up. Below the first `rows`,
    counted at full size, some may be missing.
    """
    library = verified_simplejpeg() if _within_pixel_limit(jpeg) else None
    if library is None:
        return None
    if (
        rows is not None
        and jpeg.height_offset
        and (first := _decode_first_rows(library, jpeg, scale, rows)) is not None
    ):
        return first
    height, width = (-(-jpeg.height // scale), -(-jpeg.width // scale)) if scale > 1 else (0, 0)
    try:
        decoded: Pixels = library.decode_jpeg(
            jpeg.data, "GRAY" if jpeg.gray else "RGB", min_height=height, min_width=width, strict=True
        )
    except ValueError:  # truncated or damaged, if only a little
        return None
    return decoded


def _decode_first_rows(library: ModuleType, jpeg: JpegHeader, scale: int, rows: int) -> Pixels | None:
    """The first rows, decoded from a file that says it has no more.

    The library then minds that there are data left before the end marker. If that is all it minds
    (it tells what it came upon first), then all was well up to there, and the end marker is in place.
    """
    height = (-(-rows // MCU_ROWS) + 1) * MCU_ROWS  # one row of blocks more: its colors reach into the last one
    if height * MIN_SAVING > jpeg.height:
        return None
    data = bytearray(jpeg.data)
    data[jpeg.height_offset : jpeg.height_offset + 2] = height.to_bytes(2, "big")
    out = np.empty((-(-height // scale), -(-jpeg.width // scale), 1 if jpeg.gray else 3), np.uint8)
    try:
        library.decode_jpeg(
            data,
            "GRAY" if jpeg.gray else "RGB",
            min_height=out.shape[0] if scale > 1 else 0,
            min_width=out.shape[1] if scale > 1 else 0,
            buffer=out,
            strict=True,
        )
    except ValueError as error:
        return out if UNREAD_DATA.fullmatch(str(error)) else None
    return None


def transposed(pixels: Pixels, turn: Image.Transpose | None) -> Pixels:
    """Pillow's transpose for an array H W C: a view, nothing is copied."""
    if turn is None:
        return pixels
    down, right = AXIS_STEPS[turn]
    pixels = pixels[::down, ::right]
    return pixels.swapaxes(0, 1) if turn in SWAPS_AXES else pixels


def stored_box(box: Box, jpeg: JpegHeader, turn: Image.Transpose | None) -> Box:
    """Where a box of the upright image lies in the stored one."""
    if turn is None:
        return box
    top, left, height, width = (box[1], box[0], box[3], box[2]) if turn in SWAPS_AXES else box
    down, right = AXIS_STEPS[turn]
    return (
        top if down > 0 else jpeg.height - top - height,
        left if right > 0 else jpeg.width - left - width,
        height,
        width,
    )


def _within_pixel_limit(jpeg: JpegHeader) -> bool:
    """Pillow refuses twice its limit, with a reason."""
    return Image.MAX_IMAGE_PIXELS is None or jpeg.height * jpeg.width <= 2 * Image.MAX_IMAGE_PIXELS


@lru_cache(maxsize=1)
def verified_simplejpeg() -> ModuleType | None:
    """simplejpeg, if it is installed and decodes to the very pixels that this Pillow does."""
    if simplejpeg is None:
        return None
    noise = (np.arange(21 * 35 * 3) ** 2 % 251).astype(np.uint8).reshape(21, 35, 3)
    image = Image.fromarray(noise).resize((70, 42))
    try:
        agree = all(
            _same_pixels(image.convert(mode), subsampling=layout, progressive=progressive)
            for mode in ("L", "RGB")
            for layout in (0, 1, 2)
            for progressive in (False, True)
        )
    except Exception:  # whatever is the matter: Pillow does without it
        return None
    return simplejpeg if agree else None


def _same_pixels(image: Image.Image, **options: Any) -> bool:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90, **options)
    ours = simplejpeg.decode_jpeg(file.getvalue(), "GRAY" if image.mode == "L" else "RGB")
    return np.array_equal(ours.squeeze(), np.asarray(Image.open(file)))
