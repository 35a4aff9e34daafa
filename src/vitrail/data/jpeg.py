"""JPEG decoding with simplejpeg: Pillow's pixels in less time, and only the needed ones for training.

    parse_header     a file's bytes -> its size and layout, or None if Pillow has to decode it
    decode_pixels    the image as stored, at full size or at 1/2, 1/4 or 1/8 of it
    transposed       pixels -> upright pixels
    stored_box       a box of the upright image -> its position in the stored image

simplejpeg (`pip install vitrail[fast]`) wraps the same library as Pillow's JPEG reader, so that full images
have the same pixels; this is verified before it is used. Unusual files (CMYK, 12 bits, arithmetic coding,
rare chroma subsampling) and files with any warning are left to Pillow, which decides what can be read.

For training, smaller sizes are computed in the frequency domain, which skips most of the arithmetic, and
entropy decoding stops below the last needed row. The decoded pixels do not change, and truncated files are
still detected. 12 megapixels on one core of a Xeon: Pillow 83 ms; simplejpeg at full size 55 ms, at 1/8 of
the size 29 ms, the upper half of that 16 ms.
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
"""An image can be decoded at 1/8, 1/4 or 1/2 of its size."""
MCU_ROWS = 16
"""Largest height of a minimum coded unit."""
MIN_SAVING = 1.05
"""Decoding stops early only if the image has at least this many times the needed rows."""
UNREAD_DATA = re.compile(r"Corrupt JPEG data: \d+ extraneous bytes before marker 0xd9")
MIN_SCALED_SIDE = 64
"""Images with a shorter side are decoded at full size: several scales would give them the same size."""

# EXIF orientation -> transpose that makes the stored pixels upright.
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
AXIS_STEPS = {  # step along rows and columns, before the axes are swapped
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
NOT_FRAME_MARKERS = (0xC4, 0xC8, 0xCC)  # tables and a reserved marker, in the same range
SUPPORTED_FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended, progressive: all Huffman-coded
PROGRESSIVE = 0xC2
SUBSAMPLINGS = (0x11, 0x21, 0x22)  # luma samples per chroma sample, across and down: 4:4:4, 4:2:2, 4:2:0


@dataclass(frozen=True, slots=True)
class JpegHeader:
    """A JPEG file and what its header states."""

    data: bytes
    """The whole file."""
    height: int
    width: int
    gray: bool
    has_exif: bool
    """Whether there is an EXIF segment, which may hold an orientation."""
    height_offset: int
    """Offset of the height in the file, if decoding may stop early (one scan from top to bottom); else 0."""


def parse_header(data: bytes) -> JpegHeader | None:
    """The header of a JPEG that `decode_pixels` supports; None for any other data."""
    offset, has_exif, height_offset, frame = 2, False, 0, None
    if data[:2] != b"\xff\xd8":
        return None
    while offset + 4 <= len(data):
        if data[offset] != 0xFF:
            return None
        marker = data[offset + 1]
        if marker == 0xFF:  # padding
            offset += 1
            continue
        if marker == START_OF_SCAN:
            return None if frame is None else JpegHeader(data, *frame, has_exif, max(height_offset, 0))
        if marker == START_OF_IMAGE or marker < 0xC0 or 0xD0 <= marker <= 0xD9:  # not allowed before the scan
            return None
        if marker == EXIF_SEGMENT:
            has_exif = True
        elif marker == RESTART_INTERVAL:  # restart markers inside the data hide where it ends
            height_offset = -1
        elif marker in FRAME_MARKERS and marker not in NOT_FRAME_MARKERS:
            frame = _parse_frame(data, offset) if frame is None and marker in SUPPORTED_FRAMES else None
            if frame is None:
                return None
            if marker != PROGRESSIVE and height_offset == 0:
                height_offset = offset + 5
        offset += 2 + (data[offset + 2] << 8 | data[offset + 3])
    return None


def _parse_frame(data: bytes, offset: int) -> tuple[int, int, bool] | None:
    """Height, width and whether the image is gray; None if the frame is not supported."""
    frame = data[offset + 4 : offset + 19]  # bits, height, width, components; for each its id, sampling, table
    if len(frame) < 9 or frame[0] != 8:
        return None
    height, width, components = frame[1] << 8 | frame[2], frame[3] << 8 | frame[4], frame[5]
    if height == 0 or width == 0:
        return None
    if components == 1:
        return height, width, True
    supported = components == 3 and len(frame) == 15 and frame[7] in SUBSAMPLINGS and frame[10] == frame[13] == 0x11
    return (height, width, False) if supported else None


def decode_pixels(header: JpegHeader, scale: int = 1, rows: int | None = None) -> Pixels | None:
    """uint8 H W C, C = 1 or 3, as stored, not yet upright; None if Pillow has to decode it.

    At scale 2, 4 or 8 the sides are divided by it and rounded up. With `rows` (at full size), rows below
    them may be missing.
    """
    library = verified_simplejpeg() if _within_pixel_limit(header) else None
    if library is None:
        return None
    if rows is not None and header.height_offset:
        first_rows = _decode_first_rows(library, header, scale, rows)
        if first_rows is not None:
            return first_rows
    height, width = (-(-header.height // scale), -(-header.width // scale)) if scale > 1 else (0, 0)
    try:
        decoded: Pixels = library.decode_jpeg(
            header.data, "GRAY" if header.gray else "RGB", min_height=height, min_width=width, strict=True
        )
    except ValueError:  # truncated or damaged, even slightly
        return None
    return decoded


def _decode_first_rows(library: ModuleType, header: JpegHeader, scale: int, rows: int) -> Pixels | None:
    """The first rows, decoded from a copy of the file whose header states a smaller height.

    The library then reports unread data before the end marker. It reports the first error only, so if that
    is the error, the decoded part is undamaged and the end marker is in place.
    """
    height = (-(-rows // MCU_ROWS) + 1) * MCU_ROWS  # one MCU row more: its chroma is interpolated into the last row
    if height * MIN_SAVING > header.height:
        return None
    data = bytearray(header.data)
    data[header.height_offset : header.height_offset + 2] = height.to_bytes(2, "big")
    out = np.empty((-(-height // scale), -(-header.width // scale), 1 if header.gray else 3), np.uint8)
    try:
        library.decode_jpeg(
            data,
            "GRAY" if header.gray else "RGB",
            min_height=out.shape[0] if scale > 1 else 0,
            min_width=out.shape[1] if scale > 1 else 0,
            buffer=out,
            strict=True,
        )
    except ValueError as error:
        return out if UNREAD_DATA.fullmatch(str(error)) else None
    return None


def transposed(pixels: Pixels, transpose: Image.Transpose | None) -> Pixels:
    """Pillow's transpose for an array H W C, as a view."""
    if transpose is None:
        return pixels
    down, right = AXIS_STEPS[transpose]
    pixels = pixels[::down, ::right]
    return pixels.swapaxes(0, 1) if transpose in SWAPS_AXES else pixels


def stored_box(box: Box, header: JpegHeader, transpose: Image.Transpose | None) -> Box:
    """A box of the upright image in the coordinates of the stored image."""
    if transpose is None:
        return box
    top, left, height, width = (box[1], box[0], box[3], box[2]) if transpose in SWAPS_AXES else box
    down, right = AXIS_STEPS[transpose]
    return (
        top if down > 0 else header.height - top - height,
        left if right > 0 else header.width - left - width,
        height,
        width,
    )


def _within_pixel_limit(header: JpegHeader) -> bool:
    """Above twice MAX_IMAGE_PIXELS Pillow raises the error."""
    return Image.MAX_IMAGE_PIXELS is None or header.height * header.width <= 2 * Image.MAX_IMAGE_PIXELS


@lru_cache(maxsize=1)
def verified_simplejpeg() -> ModuleType | None:
    """simplejpeg, if it is installed and gives exactly the pixels of the installed Pillow."""
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
    except Exception:  # then Pillow decodes everything
        return None
    return simplejpeg if agree else None


def _same_pixels(image: Image.Image, **options: Any) -> bool:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90, **options)
    ours = simplejpeg.decode_jpeg(file.getvalue(), "GRAY" if image.mode == "L" else "RGB")
    return np.array_equal(ours.squeeze(), np.asarray(Image.open(file)))
