"""Limits on pixels and scans, checked before decoding."""

from __future__ import annotations

import io
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from serving import photo, png_with_size
from small_models import model, small

from vitrail.serve import image_decoder as module
from vitrail.serve.http_errors import RequestError
from vitrail.serve.image_decoder import ImageDecoder
from vitrail.serve.image_headers import count_scans
from vitrail.serve.limits import Limits


def progressive(mode: str = "RGB", size: tuple[int, int] = (64, 48)) -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise(size, 40).convert(mode).save(buffer, "JPEG", progressive=True)
    return buffer.getvalue()


def with_scans(data: bytes, count: int) -> bytes:
    """The image with its last scan repeated."""
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * count + b"\xff\xd9"


def image_decoder(limits: Limits | None = None) -> ImageDecoder:
    return ImageDecoder(model(small()).preprocess, limits or Limits(), (4, 4))


@pytest.mark.parametrize(("mode", "count"), [("RGB", 10), ("L", 6), ("CMYK", 18)])
@pytest.mark.parametrize("extra_scans", [0, 3])
def test_the_number_of_scans_is_that_of_libjpeg(mode: str, count: int, extra_scans: int) -> None:
    data = with_scans(progressive(mode), extra_scans)
    assert [limit for limit in range(30) if count_scans(data, limit) > limit] == list(range(count + extra_scans))
    assert count_scans(data, 5) == 6  # counting stops there


@given(st.binary(max_size=300), st.integers(0, 12))
@settings(max_examples=60, deadline=None)
def test_markers_in_metadata_or_after_the_end_are_not_counted(extra: bytes, copies: int) -> None:
    data = progressive()
    noise = (extra + b"\xff\xda") * copies
    comment = b"\xff\xfe" + (len(noise) + 2).to_bytes(2, "big") + noise
    assert count_scans(data[:2] + comment + data[2:] + noise, 10) <= 10
    assert count_scans(data[:2] + comment + with_scans(data, 1)[2:] + noise, 10) == 11


def test_a_photograph_followed_by_a_video_is_read() -> None:
    video = np.random.default_rng(0).bytes(12_000_000)
    assert video.count(b"\xff\xda") > module.MAX_SCANS
    assert np.array_equal(image_decoder().decode_bytes(photo() + video), image_decoder().decode_bytes(photo()))


def test_large_images_may_have_fewer_scans() -> None:
    progressive_jpeg = with_scans(progressive(), 90)  # 100 scans of 3,072 pixels
    assert image_decoder(Limits(max_pixels=50_000)).decode_bytes(progressive_jpeg).shape == (32, 32, 3)
    with pytest.raises(RequestError, match="more than 21 scans") as refused:
        image_decoder(Limits(max_pixels=3_300)).decode_bytes(progressive_jpeg)
    assert (refused.value.status, refused.value.code) == (400, "image_unreadable")
    with pytest.raises(RequestError, match="more than 128 scans"):
        image_decoder().decode_bytes(with_scans(progressive(), 150))
    for mode in ("RGB", "L", "CMYK"):  # the largest image, as libjpeg writes it
        assert image_decoder(Limits(max_pixels=64 * 48)).decode_bytes(progressive(mode)).shape == (32, 32, 3)


def test_scans_of_cmyk_images_are_counted() -> None:
    with pytest.raises(RequestError, match="scans"):
        image_decoder(Limits(max_pixels=64 * 48)).decode_bytes(with_scans(progressive("CMYK"), 10))


def test_scans_of_a_file_full_of_markers_are_counted_quickly() -> None:
    head = photo()[: photo().index(b"\xff\xda")]
    scan = b"\xff\xda\0\x02"
    start = time.perf_counter()
    assert count_scans(head + scan + b"\xff\0" * 4_000_000 + scan * 3, 3) == 4
    assert count_scans(head + b"\xff" * 8_000_000 + b"\xda\0\x02" + scan * 200, 128) == 129
    assert time.perf_counter() - start < 3


def test_memory_of_a_large_image_is_returned_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed: list[int] = []
    monkeypatch.setattr(module, "trim_malloc", lambda: trimmed.append(1))
    decoder = image_decoder()
    monkeypatch.setattr(decoder.preprocess, "pixels", lambda image: np.zeros((32, 32, 3)))
    decoder.decode_bytes(png_with_size(3000, 2000))
    assert trimmed == []
    decoder.decode_bytes(png_with_size(5000, 4000))
    assert trimmed == [1]
