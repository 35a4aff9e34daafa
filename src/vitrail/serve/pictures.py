"""An image from a stranger -> pixels: its header is judged before anything is unpacked."""

from __future__ import annotations

import base64
import binascii
import contextlib
import io
import math
import re
import struct
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
from vitrail.runtime.heap import trim_heap
from vitrail.serve.limits import Limits
from vitrail.serve.problems import Problem, told

# H W C pixels, h rows and w columns of patches

Pixels = npt.NDArray[Any]
Bombs = (Image.DecompressionBombError, Image.DecompressionBombWarning)

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
"""Kinds of files that are read for strangers: what browsers and cameras write. Pillow knows some forty more."""
PNG = b"\x89PNG\r\n\x1a\n"
SCANS, LARGEST_SCANS, USUAL_SCANS = 128, 20, 10
"""Passes of a progressive JPEG, at most, and those of the largest picture that is taken: each costs a walk over the
whole. libjpeg makes ten of a photograph and eighteen of one in CMYK."""
SIZE_OF_AVIF = re.compile(rb"ispe")
MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]", re.S)
"""In a JPEG: anything but data, padding and the restarts within them."""
START_OF_SCAN, END, LONE = 0xDA, 0xD9, (0x01, 0xD8)
SEGMENTS, PADDING = 1024, 64
"""Parts of a JPEG's header, and bytes between two of them, at most, where it is read in a thread of the service."""
CHUNKS, OTHERS, PACKED = 1024, 64, 2
"""Chunks of a PNG or WebP, those of them that hold no pixels, and those of a PNG that are unpacked, likewise."""
PIXEL_CHUNKS = (b"IDAT", b"fdAT", b"ANMF")
SMALL_EXIF = 2**16
"""Bytes of EXIF, likewise: Pillow reads 5,000 entries of it in 20 ms, and its old versions copy all of it for each."""
HEADER_BYTE = 10
"""Pixels that take as long as a byte of a file that may be all header."""
SMALL_PIXELS, SMALL_BYTES, SMALL_ODD = 2_500_000, 4 * 2**20, 2**16
"""What is decoded in a thread of the service: pixels (as `weight` counts them) and bytes of a JPEG, PNG or WebP, and
bytes of any other format, whose headers Pillow reads in Python. That is 70 ms of one core, at most."""
TRIM = 16_000_000
"""Pixels from which an image's memory is given back to the system at once."""


@dataclass(frozen=True, slots=True)
class Opened:
    """An image whose header has been judged."""

    data: bytes
    source: bytes | Image.Image
    """What is decoded: the same bytes, or an image that Pillow has opened and not yet read."""
    pixels: int
    cost: int
    """Its pixels, times what each of them costs compared with a JPEG's."""
    large: bool
    """Whether it is too much for a thread of the service."""


class Pictures:
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
            cost = max(2 * (claimed_pixels(data) or most), HEADER_BYTE * len(data))
            return Opened(data, data, most, min(cost, most), large=True)
        found = jpeg.header(data)
        if found is not None:
            source: bytes | Image.Image = data
            pixels, passes = self._checked(data, found.width, found.height)
            cost = pixels * passes
        else:
            source = self._identified(data)
            pixels, passes = self._checked(data, *source.size)
            cost = pixels * passes * weight(source)
        return Opened(data, source, pixels, cost, large=cost > SMALL_PIXELS or len(data) > SMALL_BYTES)

    def unpack(self, opened: Opened) -> Pixels:
        """The rest of the work."""
        source = opened.source
        try:
            if source is opened.data and jpeg.header(opened.data) is None:  # large, and not yet looked at
                source = self._identified(opened.data)
                self._checked(opened.data, *source.size)
            found = self.preprocess.pixels(source)
        except ImageError as error:
            raise Problem(400, "image_unreadable", told(error, "the picture cannot be read: it is damaged.")) from None
        except Bombs:
            raise self._too_large() from None
        if opened.pixels >= TRIM:
            trim_heap()
        return found

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

    def _identified(self, data: bytes) -> Image.Image:
        """Opened and not yet read."""
        try:
            image = Image.open(io.BytesIO(data), formats=_formats())
        except UnidentifiedImageError:
            raise Problem(400, "image_unreadable", _stranger(data)) from None
        except Bombs:
            raise self._too_large() from None
        except Exception as error:  # damaged data can make a parser raise anything
            raise Problem(400, "image_unreadable", "the picture cannot be read: its header is damaged.") from error
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
                raise Problem(400, "image_unreadable", f"the picture comes in more than {most} scans.")
            passes = max(-(-count // USUAL_SCANS), 1)
        return size, passes

    def _too_large(self, what: str = "too many pixels") -> Problem:
        return Problem(413, "too_many_pixels", f"the picture has {what}: at most {self.limits.pixels:,} are taken.")


def weight(image: Image.Image) -> int:
    """What a pixel of it costs, compared with a JPEG's: measured, and rounded up."""
    if image.mode.startswith("I") or image.mode == "F":
        return 4
    return 2 if image.format in ("WEBP", "AVIF") or image.has_transparency_data else 1


def quick_header(data: bytes) -> bool:
    """Whether reading the header takes little time: readers walk over its parts in Python."""
    if data.startswith(b"\xff\xd8"):
        return _few_segments(data)
    if data.startswith(PNG):
        return _few_chunks(data)
    if data.startswith(b"RIFF"):
        return _few_chunks_of_webp(data)
    return len(data) <= SMALL_ODD


def claimed_pixels(data: bytes) -> int | None:
    """What a header says at first sight, right or wrong: of a file that is opened later, and checked then."""
    sides: Sequence[int] = ()
    with contextlib.suppress(struct.error):
        if data.startswith(PNG):
            sides = struct.unpack_from(">II", data, 16)
        elif data.startswith(b"GIF8"):
            sides = struct.unpack_from("<HH", data, 6)
        elif data.startswith(b"BM"):
            sides = struct.unpack_from("<ii", data, 18)
        elif data.startswith((b"II*\0", b"MM\0*")):
            sides = _sides_of_tiff(data, "<" if data.startswith(b"II") else ">")
        elif data.startswith((b"P5", b"P6")):  # a byte or more for each
            sides = (len(data),)
        elif data[4:8] == b"ftyp":  # of several sizes the largest: others are of its tiles
            found = (
                struct.unpack_from(">II", data, match.end() + 4) for match in SIZE_OF_AVIF.finditer(data, 0, 2**16)
            )
            sides = max(found, key=math.prod, default=())
    return abs(math.prod(sides)) if sides else None


def _sides_of_tiff(data: bytes, order: str) -> tuple[int, ...]:
    (at,) = struct.unpack_from(f"{order}I", data, 4)
    (count,) = struct.unpack_from(f"{order}H", data, at)
    sides = {}
    for start in range(at + 2, at + 2 + 12 * min(count, OTHERS), 12):
        tag, kind = struct.unpack_from(f"{order}HH", data, start)
        if tag in (256, 257):
            (sides[tag],) = struct.unpack_from(f"{order}{'H' if kind == 3 else 'I'}", data, start + 8)
    return tuple(sides.values()) if len(sides) == 2 else ()


def _few_segments(data: bytes) -> bool:
    at, exif = 2, 0
    for _ in range(SEGMENTS):
        found = MARKER.search(data, at, at + PADDING)
        if found is None:
            return data[at : at + 1] != b"\xff"  # what does not go on here is no header
        at, marker = found.end(), data[found.end() - 1]
        if marker == START_OF_SCAN:
            return True
        if marker not in LONE:
            size = max(int.from_bytes(data[at : at + 2], "big"), 2)
            exif += size * (data[at + 2 : at + 6] == b"Exif")  # all such parts are joined
            if exif > SMALL_EXIF:
                return False
            at += size
    return False


def _few_chunks(data: bytes) -> bool:
    at, count, others, packed = len(PNG), 0, 0, 0
    while at < len(data):
        size, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        count += 1
        others += kind not in PIXEL_CHUNKS
        packed += kind in (b"iCCP", b"zTXt", b"iTXt")
        if count > CHUNKS or others > OTHERS or packed > PACKED:
            return False
        if kind in (b"tEXt", b"zTXt", b"iTXt") and data.startswith(b"Raw profile type", at + 8):  # EXIF in text
            return False
        if kind == b"eXIf" and size > SMALL_EXIF:
            return False
        at += 12 + size
    return True


def _few_chunks_of_webp(data: bytes) -> bool:
    """The rest of it is read by a library."""
    at, count, others = 12, 0, 0
    while at < len(data):
        size, kind = int.from_bytes(data[at + 4 : at + 8], "little"), data[at : at + 4]
        count += 1
        others += kind not in PIXEL_CHUNKS
        if count > CHUNKS or others > OTHERS or (kind == b"EXIF" and size > SMALL_EXIF):
            return False
        at += 8 + size + size % 2
    return True


def scans(data: bytes, most: int) -> int:
    """Of a JPEG's main picture, up to its end, counted no further than past `most`; 0: no more than is usual.

    What lies in its metadata (a thumbnail) or follows its end (a phone's video) is not of it.
    """
    if data.count(b"\xff\xda") <= min(
        most, USUAL_SCANS
    ):  # what is looked for, and perhaps more: most pictures need no closer look
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
