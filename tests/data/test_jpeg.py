"""JPEGs read without Pillow are Pillow's to the bit, upright, whole or refused; smaller ones are its drafts."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from images import encoded
from PIL import Image

from vitrail.config import PreprocessConfig
from vitrail.data import jpeg
from vitrail.data.decode import decode, open_image, open_jpeg
from vitrail.data.preprocess import Preprocess
from vitrail.errors import ImageError

simplejpeg = pytest.importorskip("simplejpeg", reason="the extra `fast` is not installed: pip install 'vitrail[fast]'")


@contextmanager
def without_simplejpeg() -> Iterator[None]:
    """Decode as if simplejpeg were not installed."""
    there, jpeg.simplejpeg = jpeg.simplejpeg, None
    jpeg.verified_simplejpeg.cache_clear()
    try:
        yield
    finally:
        jpeg.simplejpeg = there
        jpeg.verified_simplejpeg.cache_clear()


def scene(height: int, width: int, mode: str = "RGB") -> Image.Image:
    """Smooth colors with some texture."""
    y, x = np.mgrid[:height, :width]
    planes = [128 + 100 * np.sin(x / (3 + c) + y / (7 - c)) + (x * y * (c + 1)) % 23 for c in range(3)]
    return Image.fromarray(np.stack(planes, axis=2).clip(0, 255).astype(np.uint8)).convert(mode)


def decode_or_error(data: bytes, channels: int = 3) -> np.ndarray | str:
    try:
        return decode(data, channels)
    except ImageError as error:
        return str(error)


def same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b)


def oriented(image: Image.Image, orientation: int, **options: Any) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, "JPEG", exif=exif, **options)


def test_simplejpeg_is_used_if_installed() -> None:
    assert jpeg.verified_simplejpeg() is simplejpeg


# The same pixels


@given(
    height=st.integers(1, 70),
    width=st.integers(1, 70),
    mode=st.sampled_from(["L", "RGB"]),
    subsampling=st.sampled_from([0, 1, 2]),
    progressive=st.booleans(),
    quality=st.sampled_from([30, 90, 100]),
)
def test_full_images_equal_pillows(
    height: int, width: int, mode: str, subsampling: int, progressive: bool, quality: int
) -> None:
    data = encoded(
        scene(height, width, mode), "JPEG", subsampling=subsampling, progressive=progressive, quality=quality
    )
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    found = jpeg.parse_header(data)
    assert found is not None
    assert (found.height, found.width, found.gray) == (height, width, mode == "L")
    assert jpeg.decode_pixels(found) is not None
    assert np.array_equal(decode(data), expected)
    assert np.array_equal(np.asarray(open_image(data)), expected)


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
def test_every_color_mode_is_the_same_with_and_without_simplejpeg(mode: str, channels: int) -> None:
    data = encoded(scene(50, 61).convert(mode), "JPEG")
    fast = decode(data, channels)
    with without_simplejpeg():
        assert np.array_equal(decode(data, channels), fast)


def test_jpeg_stored_as_rgb_equals_pillows() -> None:
    data = encoded(scene(40, 50), "JPEG", keep_rgb=True)
    assert np.array_equal(decode(data), np.asarray(Image.open(io.BytesIO(data))))


@pytest.mark.parametrize("layout", ["440", "411"])
def test_rare_chroma_subsamplings_are_decoded_by_pillow(layout: str) -> None:
    data = simplejpeg.encode_jpeg(np.asarray(scene(45, 53)), colorsubsampling=layout)
    assert jpeg.parse_header(data) is None
    assert np.array_equal(decode(data), np.asarray(Image.open(io.BytesIO(data))))


def test_preprocessing_is_the_same_with_and_without_simplejpeg() -> None:
    images = [encoded(scene(260, 300), "JPEG"), oriented(scene(300, 260), 6), encoded(scene(90, 300, "L"), "JPEG")]
    for config in (
        PreprocessConfig(image_size=224, resize="short", resize_to=248, interpolation="bicubic"),
        PreprocessConfig(image_size=224, antialias=False),
        PreprocessConfig(image_size=28, mean=(0.5,), std=(0.5,)),
    ):
        fast = [Preprocess(config).pixels(p) for p in images]
        with without_simplejpeg():
            assert all(np.array_equal(Preprocess(config).pixels(p), f) for p, f in zip(images, fast, strict=True))


@pytest.mark.slow
def test_imagenet_images_equal_pillows(imagenet_val: Any) -> None:
    import tarfile

    with tarfile.open(imagenet_val / "val-00000.tar") as tar:
        for member in tar:
            if member.name.endswith(".jpg"):
                data = tar.extractfile(member).read()  # type: ignore[union-attr]
                assert np.array_equal(decode(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


def test_simplejpeg_is_not_used_if_its_pixels_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(scene(30, 40), "JPEG")
    expected = decode(data)
    genuine = simplejpeg.decode_jpeg
    monkeypatch.setattr(simplejpeg, "decode_jpeg", lambda *a, **k: genuine(*a, **k) ^ 1)
    jpeg.verified_simplejpeg.cache_clear()
    assert jpeg.verified_simplejpeg() is None
    assert np.array_equal(decode(data), expected)
    monkeypatch.undo()
    jpeg.verified_simplejpeg.cache_clear()


# Upright


@pytest.mark.parametrize("orientation", range(9))
def test_exif_orientation_is_applied_as_by_pillow(orientation: int) -> None:
    data = oriented(scene(40, 56), orientation)
    found = open_jpeg(data)
    assert found is not None
    with without_simplejpeg():
        expected = decode(data)
    assert np.array_equal(decode(data), expected)
    assert np.array_equal(np.asarray(open_image(data)), expected)
    assert np.array_equal(found.pixels(), expected)
    assert found.size == expected.shape[:2]


def test_xmp_orientation_is_applied_if_exif_has_none() -> None:
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf tiff:Orientation="6"/></x:xmpmeta>'
    data = encoded(scene(20, 30), "JPEG", xmp=xmp)
    with without_simplejpeg():
        expected = decode(data)
    assert expected.shape == (30, 20, 3)
    assert np.array_equal(decode(data), expected)


# Whole or not at all


@pytest.mark.parametrize("progressive", [False, True])
def test_truncated_file_gives_the_same_error_as_pillow(progressive: bool) -> None:
    whole = encoded(scene(64, 80), "JPEG", progressive=progressive)
    for left in range(2, len(whole), 97):
        fast = decode_or_error(whole[:left])
        assert isinstance(fast, str)
        with without_simplejpeg():
            assert decode_or_error(whole[:left]) == fast


@given(
    places=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=4), progressive=st.booleans()
)
def test_damaged_file_gives_the_same_result_as_pillow(places: list[tuple[float, int]], progressive: bool) -> None:
    data = bytearray(encoded(scene(40, 48), "JPEG", progressive=progressive))
    for place, value in places:
        data[2 + int(place * (len(data) - 3))] = value
    fast = decode_or_error(bytes(data))
    with without_simplejpeg():
        assert same(decode_or_error(bytes(data)), fast)


def test_missing_end_marker_gives_the_same_result_as_pillow() -> None:
    data = encoded(scene(40, 48), "JPEG")
    assert data.endswith(b"\xff\xd9")
    fast = decode_or_error(data[:-2])
    with without_simplejpeg():
        assert same(decode_or_error(data[:-2]), fast)


def test_image_above_the_pixel_limit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(scene(30, 40), "JPEG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 599)
    with pytest.raises(ImageError, match="1,200 pixels"):
        decode(data)
    found = open_jpeg(data)
    assert found is not None
    with pytest.raises(ImageError, match="1,200 pixels"):
        found.pixels(2)


@pytest.mark.parametrize(
    "data", [b"", b"\xff\xd8", b"\xff\xd8\xff\xd9", b"\xff\xd8\xff\xe0\0", b"\xff\xd8" + b"\xff" * 99]
)
def test_header_of_invalid_data_is_none(data: bytes) -> None:
    assert jpeg.parse_header(data) is None


def test_fill_bytes_before_a_marker_are_skipped() -> None:
    data = encoded(scene(20, 20), "JPEG")
    padded = data[:2] + b"\xff\xff\xff" + data[2:]
    assert jpeg.parse_header(padded) is not None
    assert np.array_equal(decode(padded), decode(data))


# Smaller


@given(
    height=st.integers(64, 200),
    width=st.integers(64, 200),
    scale=st.sampled_from([2, 4, 8]),
    mode=st.sampled_from(["L", "RGB"]),
    subsampling=st.sampled_from([0, 1, 2]),
)
def test_scaled_decoding_equals_pillows_draft(height: int, width: int, scale: int, mode: str, subsampling: int) -> None:
    data = encoded(scene(height, width, mode), "JPEG", subsampling=subsampling)
    found = open_jpeg(data)
    assert found is not None
    small = found.pixels(scale)
    assert small.shape == (-(-height // scale), -(-width // scale), 1 if mode == "L" else 3)
    draft = Image.open(io.BytesIO(data))
    draft.draft(mode, (width // scale, height // scale))
    assert np.array_equal(np.atleast_3d(np.asarray(draft)), small)
    with without_simplejpeg():
        assert np.array_equal(found.pixels(scale), small)


@pytest.mark.parametrize("scale", [2, 4, 8])
def test_scaled_decoding_is_close_to_a_reduced_image(scale: int) -> None:
    large = scene(32, 40).resize((640, 512), Image.Resampling.BICUBIC)
    found = open_jpeg(encoded(large, "JPEG", quality=95))
    assert found is not None
    expected = np.asarray(large.reduce(scale)).astype(int)
    assert np.abs(found.pixels(scale).astype(int) - expected).mean() < 2


def test_exif_orientation_is_applied_to_scaled_decoding() -> None:
    found = open_jpeg(oriented(scene(80, 120), 6))
    plain = open_jpeg(encoded(scene(80, 120), "JPEG"))
    assert found is not None
    assert plain is not None
    assert np.array_equal(found.pixels(2), np.rot90(plain.pixels(2), -1))


# No further than needed


def noisy(height: int, width: int, mode: str = "RGB") -> Image.Image:
    random = np.random.default_rng(height * width)
    small = random.integers(0, 256, (height // 3 + 1, width // 3 + 1, 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


@settings(max_examples=60)
@given(
    size=st.tuples(st.integers(64, 150), st.integers(64, 150)),
    corners=st.tuples(*[st.floats(0, 1)] * 4),
    scale=st.sampled_from([1, 2, 4, 8]),
    mode=st.sampled_from(["L", "RGB"]),
    subsampling=st.sampled_from([0, 1, 2]),
    orientation=st.integers(1, 8),
    progressive=st.booleans(),
)
def test_crop_equals_that_part_of_the_full_image(
    size: tuple[int, int],
    corners: tuple[float, ...],
    scale: int,
    mode: str,
    subsampling: int,
    orientation: int,
    progressive: bool,
) -> None:
    image = noisy(*size, mode)
    found = open_jpeg(oriented(image, orientation, subsampling=subsampling, progressive=progressive))
    assert found is not None
    height, width = found.size
    (top, bottom), (left, right) = (
        sorted((int(a * side), int(b * side))) for (a, b), side in ((corners[:2], height), (corners[2:], width))
    )
    top, left, bottom, right = (v // scale * scale for v in (top, left, bottom, right))
    box = (top, left, bottom - top, right - left)
    part = found.crop(box, scale)
    # Counted from the other end, the sides are no multiples of the scale: only the stored image's grid is exact.
    stored = jpeg.stored_box(box, found.header, found.transpose)
    rows, columns = (
        slice(round(first / scale), round((first + length) / scale))
        for first, length in ((stored[0], stored[2]), (stored[1], stored[3]))
    )
    whole = jpeg.decode_pixels(found.header, scale)
    assert whole is not None
    assert np.array_equal(part, jpeg.transposed(whole[rows, columns], found.transpose))
    if scale == 1:
        assert np.array_equal(part, found.pixels()[top:bottom, left:right])
    with without_simplejpeg():
        assert np.array_equal(found.crop(box, scale), part)


def test_decoding_stops_below_the_crop(monkeypatch: pytest.MonkeyPatch) -> None:
    found = open_jpeg(encoded(noisy(400, 300), "JPEG"))
    assert found is not None
    assert jpeg.verified_simplejpeg()
    heights = []
    genuine = simplejpeg.decode_jpeg

    def watched(data: Any, *args: Any, **options: Any) -> Any:
        heights.append(simplejpeg.decode_jpeg_header(bytes(data))[0])
        return genuine(data, *args, **options)

    monkeypatch.setattr(simplejpeg, "decode_jpeg", watched)
    found.crop((100, 50, 100, 100))
    found.crop((0, 0, 400, 300))
    found.crop((0, 0, 100, 300), 2)
    assert heights == [224, 400, 128]


@pytest.mark.parametrize("options", [{"progressive": True}, {"restart_marker_rows": 1}, {"restart_marker_blocks": 3}])
def test_progressive_and_restart_marker_files_are_decoded_completely(options: dict[str, Any]) -> None:
    found = open_jpeg(encoded(noisy(200, 200), "JPEG", **options))
    assert found is not None
    assert found.header.height_offset == 0
    assert np.array_equal(found.crop((0, 0, 20, 20)), found.pixels()[:20, :20])


@pytest.mark.parametrize("scale", [1, 4])
def test_crop_of_a_truncated_file_is_an_error(scale: int) -> None:
    whole = encoded(noisy(300, 300), "JPEG")
    for left in range(len(whole) // 3, len(whole) - 2, 501):
        found = open_jpeg(whole[:left])
        assert found is not None
        with pytest.raises(ImageError, match="truncated"):
            found.crop((0, 0, 40, 40), scale)


def test_crop_below_damage_gives_the_same_result_as_pillow() -> None:
    whole = bytearray(encoded(noisy(300, 200), "JPEG"))
    random = np.random.default_rng(0)
    for _ in range(60):
        data = whole.copy()
        data[int(random.integers(700, len(whole) // 3))] = int(random.integers(256))
        found = open_jpeg(bytes(data))
        assert found is not None
        with without_simplejpeg():
            expected = decode_or_error(bytes(data))
        if isinstance(expected, str):
            with pytest.raises(ImageError):
                found.crop((150, 0, 20, 40))
        else:
            assert np.array_equal(found.crop((150, 0, 20, 40)), expected[150:170, :40])
