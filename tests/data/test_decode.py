"""Every kind of image a folder may hold comes out as a person sees it, or says in one sentence why not."""

from __future__ import annotations

import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from images import encoded
from PIL import Image, ImageCms

from vitrail.data.decode import decode, open_image
from vitrail.errors import ImageError


def png(width: int, height: int, depth: int, color: int, rows: bytes, **chunks: bytes) -> bytes:
    """A PNG written by hand: what Pillow's writer cannot make."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    extra = b"".join(chunk(name.encode(), data) for name, data in chunks.items())
    body = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + extra + body + chunk(b"IEND", b"")


def distance(a: np.ndarray, b: np.ndarray) -> int:
    assert a.shape == b.shape
    assert a.dtype == b.dtype == np.uint8
    return int(np.abs(a.astype(int) - b.astype(int)).max())


# Where it comes from


def test_path_string_bytes_and_pillow_image_decode_alike(photo: np.ndarray, tmp_path: Path) -> None:
    data = encoded(Image.fromarray(photo), "PNG")
    file = tmp_path / "photo.png"
    file.write_bytes(data)
    tensor = torch.from_numpy(photo).permute(2, 0, 1)
    for image in (file, str(file), data, Image.open(io.BytesIO(data)), photo, tensor):
        assert np.array_equal(decode(image), photo)


def test_decoded_array_is_writable(jpeg: bytes) -> None:
    pixels = decode(jpeg)
    assert pixels.flags.writeable
    assert pixels.flags.c_contiguous


def test_file_is_closed_after_success_and_after_an_error(photo: np.ndarray, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.tif", tmp_path / "bad.tif"
    good.write_bytes(encoded(Image.fromarray(photo), "TIFF"))
    bad.write_bytes(good.read_bytes()[:5000])
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    decode(good)
    with pytest.raises(ImageError):
        decode(bad)
    after = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    assert after == before


# Which way up

TURNED = {  # orientation tag -> how the stored pixels must be changed to stand upright
    1: lambda x: x,
    2: lambda x: x[:, ::-1],
    3: lambda x: x[::-1, ::-1],
    4: lambda x: x[::-1],
    5: lambda x: x.swapaxes(0, 1),
    6: lambda x: np.rot90(x, -1),
    7: lambda x: x[::-1, ::-1].swapaxes(0, 1),
    8: lambda x: np.rot90(x, 1),
}


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "TIFF-deflate", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(photo: np.ndarray, orientation: int, kind: str) -> None:
    if kind == "AVIF" and ".avif" not in Image.registered_extensions():
        pytest.skip("this Pillow has no AVIF")
    image, exif = Image.fromarray(photo), Image.Exif()
    exif[0x0112] = orientation
    lossless = {"WEBP": {"lossless": True}, "TIFF-deflate": {"compression": "tiff_deflate"}}
    options: dict[str, Any] = lossless.get(kind, {})
    stored = encoded(image, kind.split("-")[0], exif=exif, **options)
    plain = decode(encoded(image, kind.split("-")[0], **options))
    assert np.array_equal(decode(stored), TURNED[orientation](plain))


def test_orientation_of_a_pillow_image_is_applied_once(photo: np.ndarray) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.open(io.BytesIO(encoded(Image.fromarray(photo), "PNG", exif=exif)))
    upright = decode(image)
    assert upright.shape == (130, 90, 3)
    assert np.array_equal(decode(image), upright)
    assert np.array_equal(decode(Image.fromarray(upright)), upright)


@pytest.mark.parametrize("exif", [b"garbage", b"MM\0*\0\0\0\x08\xff\xff", b"II*\0\xff\xff\xff\x7f"])
def test_image_with_a_damaged_exif_block_is_decoded(photo: np.ndarray, jpeg: bytes, exif: bytes) -> None:
    assert np.array_equal(
        decode(encoded(Image.fromarray(photo), "JPEG", quality=92, exif=b"Exif\0\0" + exif)), decode(jpeg)
    )


def test_unknown_exif_orientation_is_ignored(photo: np.ndarray) -> None:
    exif = Image.Exif()
    exif[0x0112] = 77
    assert np.array_equal(decode(encoded(Image.fromarray(photo), "PNG", exif=exif)), photo)


# How many bits


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM", "TIFF big-endian", "Pillow I", "Pillow I;16B"])
def test_16_bit_gray_is_scaled_by_its_full_range(kind: str) -> None:
    deep = np.array([[0, 128, 129, 257, 32768, 65534, 65535, 40000]], np.uint16)
    expected = np.rint(deep / 257).astype(np.uint8)
    assert expected[0, -2] == 255  # a clipped reading has 255 nearly everywhere
    assert expected[0, 4] == 128
    big = Image.frombytes("I;16B", (8, 1), deep.astype(">u2").tobytes())
    images = {
        "TIFF big-endian": lambda: encoded(big, "TIFF"),
        "Pillow I": lambda: Image.fromarray(deep.astype(np.int32)),
        "Pillow I;16B": lambda: big,
    }
    image = images.get(kind, lambda: encoded(Image.fromarray(deep), kind))()
    assert np.array_equal(decode(image, 1)[:, :, 0], expected)
    assert np.array_equal(decode(image), np.repeat(expected[:, :, None], 3, axis=2))


def test_exif_orientation_is_applied_to_16_bit_gray() -> None:
    exif, deep = Image.Exif(), (np.arange(12, dtype=np.uint16) * 5000).reshape(3, 4)
    exif[0x0112] = 6
    transposed = decode(encoded(Image.fromarray(deep), "PNG", exif=exif), 1)[:, :, 0]
    assert np.array_equal(transposed, np.rot90(np.rint(deep / 257), -1))


@pytest.mark.parametrize("color", [2, 4, 6])
def test_16_bit_color_png_keeps_its_range(color: int) -> None:
    deep = {2: [0, 32768, 65535], 4: [32768, 65535], 6: [0, 32768, 65535, 65535]}[color]
    data = png(1, 1, 16, color, b"\0" + np.array(deep, ">u2").tobytes())
    assert decode(data)[0, 0].tolist() == ([128, 128, 128] if color == 4 else [0, 128, 255])


def test_16_bit_color_tiff_keeps_its_range() -> None:
    tifffile = pytest.importorskip("tifffile")
    out = io.BytesIO()
    tifffile.imwrite(out, np.array([[[0, 32768, 65535]]], np.uint16), photometric="rgb")
    assert decode(out.getvalue())[0, 0].tolist() == [0, 128, 255]


def test_1_bit_is_black_and_white() -> None:
    image = Image.fromarray(np.array([[0, 255, 255, 0]], np.uint8)).convert("1")
    for kind in ("PNG", "TIFF", "BMP"):
        assert decode(encoded(image, kind))[0, :, 1].tolist() == [0, 255, 255, 0]
        assert decode(encoded(image, kind), 1)[0, :, 0].tolist() == [0, 255, 255, 0]


@pytest.mark.parametrize(
    ("values", "expected"),
    [([0, 0.25, 1], [0, 64, 255]), ([0, 100.4, 255], [0, 100, 255]), ([0, 0, 1.5], [0, 0, 2])],
)
def test_float_tiff_in_either_range_is_read(values: list[float], expected: list[int]) -> None:
    data = encoded(Image.fromarray(np.array([values], np.float32)), "TIFF")
    assert decode(data)[0, :, 0].tolist() == expected


@pytest.mark.parametrize("values", [[-0.5, 0.5], [0, 300.0], [0, float("nan")], [0, float("inf")]])
def test_float_tiff_of_another_range_is_refused(values: list[float]) -> None:
    data = encoded(Image.fromarray(np.array([values], np.float32)), "TIFF")
    with pytest.raises(ImageError, match=r"floating-point values from .* expected \[0, 1\] or \[0, 255\]"):
        decode(data)


def test_32_bit_values_beyond_16_bits_are_refused() -> None:
    with pytest.raises(ImageError, match=r"32-bit values from 0 to 70000, expected \[0, 65535\]"):
        decode(encoded(Image.fromarray(np.array([[0, 70000]], np.int32)), "TIFF"))


# Transparency


def test_opaque_alpha_changes_nothing(photo: np.ndarray) -> None:
    image = Image.fromarray(photo)
    image.putalpha(255)
    assert np.array_equal(decode(encoded(image, "PNG")), photo)
    assert np.array_equal(decode(np.dstack([photo, np.full(photo.shape[:2], 255, np.uint8)])), photo)


@pytest.mark.parametrize("kind", ["file", "array", "Pillow"])
def test_transparency_is_composited_on_white(photo: np.ndarray, kind: str) -> None:
    alpha = np.linspace(0, 255, photo.shape[1]).astype(np.uint8)[None, :].repeat(photo.shape[0], axis=0)
    full = np.dstack([photo, alpha])
    weight = alpha[:, :, None] / 255
    expected = np.rint(photo * weight + 255 * (1 - weight)).astype(np.uint8)
    image = Image.fromarray(full)
    given = {"file": encoded(image, "PNG"), "array": full, "Pillow": image}[kind]
    assert distance(decode(given), expected) <= 1
    assert np.array_equal(decode(given, 4), full)


def test_gray_with_alpha_is_composited_on_white() -> None:
    image = Image.fromarray(np.array([[[10, 255], [10, 0], [10, 128]]], np.uint8), "LA")
    for given in (encoded(image, "PNG"), image, image.convert("La")):
        got = decode(given, 1)[0, :, 0]
        assert got[:2].tolist() == [10, 255]
        assert abs(int(got[2]) - 132) <= 1


def test_palette_without_transparency_is_decoded() -> None:
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8), "P")
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    for kind in ("PNG", "GIF", "BMP", "TIFF"):
        assert decode(encoded(image, kind))[0].tolist() == [[255, 0, 0], [0, 255, 0], [0, 0, 255]]


@pytest.mark.parametrize("transparency", [1, bytes([255, 0, 255])])
def test_palette_with_transparency_is_composited_on_white(transparency: int | bytes) -> None:
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8), "P")
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    data = encoded(image, "PNG", transparency=transparency)
    assert decode(data)[0].tolist() == [[255, 0, 0], [255, 255, 255], [0, 0, 255]]
    assert decode(data, 4)[0, :, 3].tolist() == [255, 0, 255]


def test_transparent_color_of_a_png_is_composited_on_white() -> None:
    gray = png(3, 1, 8, 0, b"\0" + bytes([0, 100, 255]), tRNS=struct.pack(">H", 100))
    deep = png(3, 1, 16, 0, b"\0" + np.array([0, 1000, 65535], ">u2").tobytes(), tRNS=struct.pack(">H", 1000))
    color = png(2, 1, 8, 2, b"\0" + bytes([1, 2, 3, 4, 5, 6]), tRNS=struct.pack(">HHH", 1, 2, 3))
    assert decode(gray, 1)[0, :, 0].tolist() == [0, 255, 255]
    assert decode(deep, 1)[0, :, 0].tolist() == [0, 255, 255]
    assert decode(deep, 4)[0, :, 3].tolist() == [255, 0, 255]
    assert decode(color)[0].tolist() == [[255, 255, 255], [4, 5, 6]]


# Color spaces

INKS = np.array([[0, 0, 0, 0], [255, 0, 0, 0], [0, 255, 0, 0], [0, 0, 255, 0], [0, 0, 0, 255], [60, 120, 30, 80]])
INKED = np.rint((255 - INKS[:, :3]) * (255 - INKS[:, 3:]) / 255).astype(np.uint8)  # paper minus ink


def patches(colors: np.ndarray) -> np.ndarray:
    """16 x 16 pixels of each, side by side: what survives JPEG's blocks."""
    return colors.astype(np.uint8).repeat(16, axis=0)[None].repeat(16, axis=0)


def test_cmyk_jpeg_and_tiff_are_converted_to_rgb() -> None:
    image = Image.frombytes("CMYK", (96, 16), patches(INKS).tobytes())
    assert distance(decode(encoded(image, "TIFF")), patches(INKED)) <= 1
    assert distance(decode(encoded(image, "JPEG", quality=98, subsampling=0)), patches(INKED)) <= 3


def test_ycck_jpeg_is_converted_to_rgb() -> None:
    simplejpeg = pytest.importorskip("simplejpeg")
    adobe = np.ascontiguousarray(255 - patches(INKS))  # Adobe's programs store what is left of the paper
    data = simplejpeg.encode_jpeg(adobe, quality=98, colorspace="CMYK", colorsubsampling="444")
    assert b"Adobe" in data
    assert data[data.index(b"Adobe") + 11] == 2  # 2: YCCK
    assert distance(decode(data), patches(INKED)) <= 4


def test_other_color_spaces_are_converted_to_rgb(photo: np.ndarray) -> None:
    image = Image.fromarray(photo)
    assert distance(decode(image.convert("YCbCr")), photo) <= 3
    assert distance(decode(image.convert("HSV")), photo) <= 12
    lab = ImageCms.profileToProfile(
        image, ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), outputMode="LAB"
    )
    assert lab is not None
    assert np.abs(decode(encoded(lab, "TIFF")).astype(int) - photo).mean() < 2


def test_gray_is_repeated_and_color_is_converted_by_luma(photo: np.ndarray) -> None:
    gray = decode(photo, 1)
    luma = np.rint(photo @ np.array([0.299, 0.587, 0.114])).astype(np.uint8)[:, :, None]
    assert distance(gray, luma) <= 1
    assert np.array_equal(decode(gray[:, :, 0]), gray.repeat(3, axis=2))
    assert np.array_equal(decode(gray), gray.repeat(3, axis=2))
    assert np.array_equal(decode(photo, 4), np.dstack([photo, np.full(photo.shape[:2], 255, np.uint8)]))


# Animation and size


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_first_frame_of_an_animation_is_decoded(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "green", "blue")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert decode(data)[4, 4].tolist() == [255, 0, 0]


def test_image_of_one_pixel_is_decoded() -> None:
    assert decode(encoded(Image.new("RGB", (1, 1), (1, 2, 3)), "PNG")).tolist() == [[[1, 2, 3]]]


def test_image_20000_pixels_wide_is_decoded() -> None:
    assert decode(encoded(Image.new("RGB", (20_000, 3)), "PNG")).shape == (3, 20_000, 3)


def test_no_warning_between_pillows_warning_limit_and_error_limit(monkeypatch: pytest.MonkeyPatch, jpeg: bytes) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 90 * 130 - 1)
    assert decode(jpeg).shape == (90, 130, 3)


# Arrays and tensors


def test_arrays_may_have_other_numbers_of_channels() -> None:
    many = np.arange(2 * 3 * 5, dtype=np.uint8).reshape(2, 3, 5)
    assert np.array_equal(decode(many, 5), many)
    with pytest.raises(ImageError, match=r"cannot be converted to 5 channels; expected 1 .* or a uint8 array H W 5"):
        decode(many[:, :, :3], 5)


def test_strided_arrays_are_decoded(photo: np.ndarray) -> None:
    assert np.array_equal(decode(photo[::2, ::-1]), photo[::2, ::-1])
    assert np.array_equal(decode(photo[::2, ::-1], 1), decode(photo[::2, ::-1].copy(), 1))


def test_open_image_has_the_pixels_of_decode(jpeg: bytes) -> None:
    for channels, mode in ((1, "L"), (3, "RGB"), (4, "RGBA")):
        image = open_image(jpeg, channels)
        assert image.mode == mode
        assert np.array_equal(np.atleast_3d(np.asarray(image)), decode(jpeg, channels))
