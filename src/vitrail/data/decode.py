"""Decodes images (files, bytes, arrays, Pillow images) to uint8 pixels, H W C.

Images are decoded as a viewer shows them: upright (EXIF), the first frame of an animation, transparency on white,
16-bit gray scaled by its full range. An image that cannot be decoded completely raises an `ImageError` with the reason.

    decode         any image -> array
    open_image     any image -> Pillow image, for resizing with Pillow
    open_jpeg      a JPEG whose size is known at once and whose pixels are decoded later, in part on request

JPEGs are decoded with simplejpeg if that gives Pillow's pixels (jpeg.py), everything else with Pillow."""

from __future__ import annotations

import importlib
import io
import os
import re
import stat
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageCms, ImageFile, UnidentifiedImageError
from torch import Tensor

from vitrail.data import jpeg
from vitrail.data.jpeg import EXIF_ORIENTATION, EXIF_TRANSPOSE, SWAPS_AXES, Box, Pixels, stored_box, transposed
from vitrail.errors import ImageError, NotFoundError

ImageLike = str | Path | bytes | Image.Image | np.ndarray[Any, Any] | Tensor
"""A path, an encoded file's bytes, a Pillow image, an array H W or H W C or a tensor C H W of uint8."""

PILLOW_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""Number of channels -> Pillow mode."""

# Formats that are programs, which Pillow would have another program run (Ghostscript, Windows).
SCRIPT_FORMATS = {"EPS", "WMF"}

# Pattern of a file's first bytes, format, Pillow plugin, package to install.
PLUGINS = [
    (re.compile(rb"....ftypavi[fs]", re.S), "AVIF", "pillow_avif", "pillow-avif-plugin"),
    (re.compile(rb"....ftyp(hei[cxms]|hev[cxms]|mif1|msf1)", re.S), "HEIC", "pillow_heif", "pillow-heif"),
    (re.compile(rb"\xff\x0a|\0\0\0\x0cJXL ", re.S), "JPEG XL", "pillow_jxl", "pillow-jxl-plugin"),
]

# Pattern of a file's first bytes -> what the file is, for files that are often named like images.
NOT_IMAGES = [
    (re.compile(rb"\s*<(!doctype html|html)", re.I), "it is a web page, perhaps from a failed download"),
    (re.compile(rb"version https://git-lfs"), "it is a Git LFS pointer: run git lfs pull"),
    (re.compile(rb"\s*<(\?xml|svg)", re.I), "it looks like SVG, a drawing: convert it to PNG"),
    (re.compile(rb"%PDF"), "it is a PDF: convert its page to PNG"),
    (
        re.compile(rb"II[*+]\0|MM\0[*+]"),
        "it is a TIFF, damaged or of a kind Pillow does not read: convert it to 8 bits",
    ),
    (re.compile(rb"\xff\xd8|\x89PNG|GIF8|BM|RIFF....WEBP", re.S), "its header is damaged: copy or download it again"),
    (re.compile(rb"....ftyp", re.S), "it looks like a video"),
    (re.compile(rb"\0+$"), "it holds only zeros"),
]


def decode(image: ImageLike, channels: int = 3) -> Pixels:
    """Any image as uint8 H W C, C = channels: 1 gray, 3 RGB, 4 RGBA; other numbers need an array.

    An array that already has these channels is returned as it is, not copied.
    """
    if isinstance(image, np.ndarray | Tensor):
        array = _as_array(image)
        if array.shape[2] == channels:
            return array
    lazy = open_jpeg(image) if channels in (1, 3) else None
    if lazy is not None and (channels == 3 or lazy.header.gray):
        pixels = np.ascontiguousarray(lazy.pixels())
        return pixels if pixels.shape[2] == channels else pixels.repeat(3, axis=2)
    return np.atleast_3d(np.array(open_image(image, channels)))  # a copy: Pillow's array is read-only


def open_image(image: ImageLike, channels: int = 3) -> Image.Image:
    """Any image as a loaded, upright Pillow image in mode L, RGB or RGBA."""
    name = _describe(image)
    if channels not in PILLOW_MODES:
        raise ImageError(
            f"{name} cannot be converted to {channels} channels; expected 1 (gray), 3 (RGB) or 4 (RGBA), "
            f"or a uint8 array H W {channels}."
        )
    if isinstance(image, np.ndarray | Tensor):
        return _to_mode(_to_pillow(_as_array(image), name), channels, name)
    if isinstance(image, Image.Image):
        return _load(image, channels, name)
    if not isinstance(image, str | Path | bytes):
        raise ImageError(
            f"got {type(image).__name__}, expected a path, bytes, a Pillow image, a uint8 array H W C "
            "or a uint8 tensor C H W."
        )
    with _open_stream(image) as stream:
        lazy = _read_jpeg(stream, name)
        pixels = None if lazy is None else jpeg.decode_pixels(lazy.header)
        if lazy is None or pixels is None:
            return _load(_identify(stream, name), channels, name)
    decoded = Image.fromarray(pixels[:, :, 0] if lazy.header.gray else pixels)
    return _to_mode(decoded if lazy.transpose is None else decoded.transpose(lazy.transpose), channels, name)


def open_jpeg(image: ImageLike) -> LazyJpeg | None:
    """A JPEG that is not yet decoded; None for other images and unusual JPEGs."""
    if not isinstance(image, str | Path | bytes):
        return None
    with _open_stream(image) as stream:
        return _read_jpeg(stream, _describe(image))


@dataclass(frozen=True, slots=True)
class LazyJpeg:
    """A JPEG whose header has been parsed and whose pixels are decoded on request."""

    header: jpeg.JpegHeader
    transpose: Image.Transpose | None
    """Makes the stored pixels upright."""
    name: str

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the upright image."""
        height, width = self.header.height, self.header.width
        return (width, height) if self.transpose in SWAPS_AXES else (height, width)

    def pixels(self, scale: int = 1) -> Pixels:
        """Upright pixels, H W C, C = 1 or 3; at scale 2, 4 or 8 the sides are divided by it and rounded up."""
        return transposed(self._decode(scale, None), self.transpose)

    def crop(self, box: Box, scale: int = 1) -> Pixels:
        """The part of `pixels(scale)` inside a box (in pixels of the full size), decoding as little as possible."""
        top, left, height, width = stored_box(box, self.header, self.transpose)
        pixels = self._decode(scale, top + height)
        rows, columns = (
            slice(round(first / scale), round((first + length) / scale))
            for first, length in ((top, height), (left, width))
        )
        return transposed(pixels[rows, columns], self.transpose)

    def _decode(self, scale: int, rows: int | None) -> Pixels:
        """Pixels as stored; rows below `rows` may be missing."""
        pixels = jpeg.decode_pixels(self.header, scale, rows)
        if pixels is None:
            image = _identify(io.BytesIO(self.header.data), self.name)
            with _image_errors(self.name):
                if scale > 1:
                    image.draft(image.mode, (self.header.width // scale, self.header.height // scale))
                pixels = np.array(image)
        return np.atleast_3d(pixels)


class _StrictPillow:
    """Context in which Pillow gives no warnings and truncated files are errors.

    Both settings are global to the process, so the first thread to enter sets them and the last one to leave
    restores them; with a save and restore per call, threads would restore each other's settings.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_inside = 0
        self.filters = warnings.catch_warnings()
        self.truncated = False

    def __enter__(self) -> None:
        with self.lock:
            self.num_inside += 1
            if self.num_inside == 1:
                self.filters = warnings.catch_warnings()
                self.filters.__enter__()
                warnings.filterwarnings("ignore", module=r"PIL\.")
                self.truncated, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.lock:
            self.num_inside -= 1
            if self.num_inside == 0:
                ImageFile.LOAD_TRUNCATED_IMAGES = self.truncated
                self.filters.__exit__(kind, error, trace)

    def reset_after_fork(self) -> None:
        """Leave the context in a forked process, which has none of the threads that were inside."""
        self.lock = threading.Lock()
        if self.num_inside:
            self.num_inside = 1
            self.__exit__(None, None, None)


_strict_pillow = _StrictPillow()
if hasattr(os, "register_at_fork"):  # another thread may be inside at the fork
    os.register_at_fork(after_in_child=_strict_pillow.reset_after_fork)


def _read_jpeg(stream: IO[bytes], name: str) -> LazyJpeg | None:
    """The JPEG in the stream; None, with the stream at its start, if it is not a supported JPEG."""
    try:
        start = stream.read(2)
        stream.seek(0)
        if start != b"\xff\xd8":
            return None
        header = jpeg.parse_header(stream.getvalue() if isinstance(stream, io.BytesIO) else stream.read())
        stream.seek(0)
    except OSError as error:
        raise _damaged(error, name) from error
    return None if header is None else LazyJpeg(header, _jpeg_transpose(header.data) if header.has_exif else None, name)


def _jpeg_transpose(data: bytes) -> Image.Transpose | None:
    with _strict_pillow:
        try:
            return _exif_transpose(Image.open(io.BytesIO(data)))
        except Exception:  # reported when the pixels are decoded
            return None


def _open_stream(image: str | Path | bytes) -> IO[bytes]:
    """Open an image file or bytes; errors say what the path is instead of a file."""
    if isinstance(image, bytes):
        return io.BytesIO(image)
    path = os.fspath(image)
    if ":/" in path and re.match(r"[a-z][a-z0-9+]+:/", path):
        raise NotFoundError(f"{image} is a URL, expected a file; download it first.")
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise ImageError(f"{path} is a folder, expected an image; try one of the files in it.")
        if not stat.S_ISREG(mode):  # opening a pipe would block
            raise ImageError(f"{path} is not a regular file; read it yourself and pass the bytes.")
        return Path(path).open("rb")
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(f"no such file: {path} (in {Path.cwd()}).") from None
    except ImageError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        raise ImageError(f"cannot open {path!r}: {_reason(error)}.") from error


def _identify(stream: IO[bytes], name: str) -> Image.Image:
    """Open the image and read its header, not its pixels."""
    with _image_errors(name):
        start = stream.read(64)
        if not start:
            raise ImageError(f"{name} is empty (0 bytes), expected an image; copy or download it again.")
        try:
            image = _open_with_plugins(stream, start, name)
        except UnidentifiedImageError:
            raise ImageError(f"{name} is not an image: {_guess_content(start)}.") from None
    if image.format in SCRIPT_FORMATS:
        raise ImageError(f"{name} is {image.format}, a program that draws an image; convert it to PNG first.")
    return image


def _open_with_plugins(stream: IO[bytes], start: bytes, name: str) -> Image.Image:
    try:
        return Image.open(stream)
    except UnidentifiedImageError:
        known = next((rest for pattern, *rest in PLUGINS if pattern.match(start)), None)
        if known is None:
            raise
        kind, module, package = known
    try:
        plugin = importlib.import_module(module)  # most register on import
    except ImportError:
        raise ImageError(
            f"{name} is {kind}, which Pillow reads with a plugin that is not installed; try pip install {package}."
        ) from None
    if hasattr(plugin, "register_heif_opener"):
        plugin.register_heif_opener()
    return Image.open(stream)


def _load(image: Image.Image, channels: int, name: str) -> Image.Image:
    """Load the pixels, make them upright and convert them to the mode for `channels`."""
    with _image_errors(name):
        image.load()
        transpose = _exif_transpose(image)
        return _to_mode(image if transpose is None else image.transpose(transpose), channels, name)


def _exif_transpose(image: Image.Image) -> Image.Transpose | None:
    """The transpose that makes the image upright, from its EXIF orientation."""
    try:
        return EXIF_TRANSPOSE.get(image.getexif().get(EXIF_ORIENTATION, 1))
    except Exception:  # an image with damaged EXIF data is still readable
        return None


def _to_mode(image: Image.Image, channels: int, name: str) -> Image.Image:
    """Convert any mode to L, RGB or RGBA; without an alpha channel, transparency becomes white."""
    if min(image.size) < 1:
        raise ImageError(f"{name} has no pixels: {image.width} x {image.height}; expected at least 1 x 1.")
    if image.mode.startswith("I") or image.mode == "F":
        image = _to_8_bit(image, name)
    elif image.mode == "LAB":
        image = _from_lab(image)
    elif image.mode == "La":
        image = image.convert("LA")
    if channels == 4:
        return image if image.mode == "RGBA" else image.convert("RGBA")
    if image.has_transparency_data:
        image = _on_white(image)
    if channels == 1 and image.mode not in ("L", "1"):
        image = image if image.mode == "RGB" else image.convert("RGB")
    return image if image.mode == PILLOW_MODES[channels] else image.convert(PILLOW_MODES[channels])


def _to_8_bit(image: Image.Image, name: str) -> Image.Image:
    """16-bit, 32-bit and float gray -> 8 bits, scaled by the full range of the type, never clipped."""
    values = np.asarray(image)
    low, high = values.min(), values.max()
    if image.mode == "F":
        if not (low >= 0 and high <= 255):  # NaN fails this too
            raise ImageError(
                f"{name} holds floating-point values from {low:g} to {high:g}, expected [0, 1] or [0, 255]; "
                "scale them first."
            )
        gray = np.rint(values * (255 if high <= 1 else 1)).astype(np.uint8)
    else:
        if low < 0 or high > 65535:
            raise ImageError(f"{name} holds 32-bit values from {low} to {high}, expected [0, 65535]; scale them first.")
        gray = ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)  # 257 = 65535 / 255; rounded
    converted = Image.fromarray(gray)
    transparent = image.info.get("transparency")  # PNG: one gray value that is transparent
    if isinstance(transparent, int):
        converted.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)))
    return converted


def _from_lab(image: Image.Image) -> Image.Image:
    """LAB -> RGB with color profiles, since Pillow's convert() does not support LAB."""
    lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
    return ImageCms.buildTransform(lab, srgb, "LAB", "RGB").apply(image)


def _on_white(image: Image.Image) -> Image.Image:
    full = image if image.mode == "RGBA" else image.convert("RGBA")
    alpha, colors = full.getchannel("A"), full.convert("RGB")
    if alpha.getextrema() == (255, 255):
        return colors
    white = Image.new("RGB", full.size, "white")
    white.paste(colors, mask=alpha)
    return white


def _as_array(image: npt.NDArray[Any] | Tensor) -> Pixels:
    """uint8 H W C from an array H W or H W C or a tensor C H W; errors say how to convert anything else."""
    tensor = isinstance(image, Tensor)
    name, expected = _describe(image), "uint8 C H W" if tensor else "uint8 H W or H W C"
    dtype = str(image.dtype).removeprefix("torch.")
    if dtype != "uint8":
        cast = ".to(torch.uint8)" if tensor else ".astype(np.uint8)"
        scale = {"bool": f"x{cast} * 255", "uint16": f"(x // 257){cast}"}.get(dtype, f"(x * 255).round(){cast}")
        meaning = {"bool": "", "uint16": ""}.get(dtype, " if it holds [0, 1]")
        raise ImageError(f"got {name} and dtype {dtype}, expected {expected}; try {scale}{meaning}.")
    if image.ndim == 4:
        raise ImageError(f"got {name}, expected one image, {expected}; pass a batch as a list: list(x).")
    if tensor and image.ndim == 2:
        raise ImageError(f"got {name}, expected {expected}; try x[None].")
    if image.ndim not in (2, 3):
        raise ImageError(f"got {name}, expected {expected}.")
    if 0 in image.shape:
        raise ImageError(f"got {name}, expected {expected} with at least one pixel.")
    if isinstance(image, Tensor):
        return image.detach().cpu().permute(1, 2, 0).numpy()
    return image if image.ndim == 3 else image[:, :, None]


def _to_pillow(array: Pixels, name: str) -> Image.Image:
    """A Pillow image of an array with 1, 3 or 4 channels."""
    channels = array.shape[2]
    if channels not in PILLOW_MODES:
        tensor = name.startswith("tensor")
        other_layout = array.shape[0 if not tensor else 1] in PILLOW_MODES
        remedy = ("x.permute(2, 0, 1)" if tensor else "x.transpose(1, 2, 0)") if other_layout else ""
        layout = "C H W" if tensor else "H W C"
        raise ImageError(
            f"got {name}, which as {layout} has {channels} channels, expected 1, 3 or 4"
            + (f"; try {remedy}." if remedy else ".")
        )
    array = np.ascontiguousarray(array)
    return Image.fromarray(array[:, :, 0] if channels == 1 else array)


def _describe(image: Any) -> str:
    """The image's name in error messages."""
    if isinstance(image, bytes):
        return f"image of {len(image)} bytes"
    if isinstance(image, np.ndarray | Tensor):
        return f"{'tensor' if isinstance(image, Tensor) else 'array'} of shape {tuple(image.shape)}"
    if isinstance(image, Image.Image):
        file = getattr(image, "filename", "")
        return str(file) if file else f"Pillow image {image.mode} {image.width} x {image.height}"
    return str(image)


@contextmanager
def _image_errors(name: str) -> Iterator[None]:
    """Turn all of Pillow's exceptions into ImageError: on damaged data its parsers raise any type."""
    with _strict_pillow:
        try:
            yield
        except ImageError:
            raise
        except Image.DecompressionBombError as error:
            raise _too_many_pixels(error, name) from error
        except Exception as error:
            raise _damaged(error, name) from error


def _guess_content(start: bytes) -> str:
    for pattern, content in NOT_IMAGES:
        if pattern.match(start):
            return content
    return (
        f"it starts with {start[:12]!r}; expected JPEG, PNG, WebP, TIFF, GIF, BMP or another format that Pillow reads"
    )


def _damaged(error: Exception, name: str) -> ImageError:
    return ImageError(f"{name} cannot be read: {_reason(error)}. It may be damaged: copy or download it again.")


def _too_many_pixels(error: Exception, name: str) -> ImageError:
    limit = 2 * (Image.MAX_IMAGE_PIXELS or 0)
    match = re.search(r"\((\d+) pixels\)", str(error))
    size = f"{int(match[1]):,}" if match else "too many"
    return ImageError(
        f"{name} has {size} pixels, more than the limit of {limit:,}; if you trust it, make a smaller "
        "copy: magick IMAGE -resize 4096x4096 COPY.png (in Python, PIL.Image.MAX_IMAGE_PIXELS = None lifts the limit)."
    )


def _reason(error: BaseException) -> str:
    """The first line of the error message, without the final period."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    if isinstance(error, MemoryError):
        return "it does not fit in memory"
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
