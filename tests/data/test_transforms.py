"""Transforms: the box of the definition, Pillow's resizing, and no more decoding than needed."""

from __future__ import annotations

import io
import os
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_source import Images
from images import encoded
from PIL import Image
from sklearn.datasets import load_sample_image

from vitrail.config import AugmentConfig, PreprocessConfig
from vitrail.data import jpeg
from vitrail.data.augment.crop import crop_boxes
from vitrail.data.decode import decode, open_jpeg
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.base import Sample
from vitrail.data.transforms import (
    WRONG_SIZE,
    EvalTransform,
    OriginalPixels,
    RandomResizedCrop,
    SampleReader,
    choose_decode_scale,
    reopen_after_fork,
    resize,
)
from vitrail.errors import DataError
from vitrail.rng import sample_seeds

GRAY = {"mean": (0.5,), "std": (0.5,)}


@pytest.fixture(scope="module")
def large() -> Image.Image:
    """A photograph of 1280 x 854."""
    return Image.fromarray(load_sample_image("china.jpg")).resize((1280, 854), Image.Resampling.BICUBIC)


def read(transform: Any, *images: Any, seeds: Any = None) -> tuple[np.ndarray, list[tuple[int, str]]]:
    out = np.full((len(images), *transform.shape), 77, transform.dtype)
    seeds = sample_seeds(0, 0, np.arange(len(images))) if seeds is None else seeds
    return out, SampleReader(Images(images), transform)(np.arange(len(images)), seeds, out)


def pillow_crop(image: Any, key: Any, size: int, mode: str = "RGB", augment: AugmentConfig | None = None) -> np.ndarray:
    """The definition: all of the image decoded, its box cut out, Pillow's resize."""
    augment = augment or AugmentConfig()
    pixels = decode(image, 1 if mode == "L" else 3).squeeze()
    top, left, height, width = crop_boxes(np.array([key]), [pixels.shape[:2]], augment.scale, augment.ratio)[0].tolist()
    part = Image.fromarray(pixels[top : top + height, left : left + width])
    filters = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
    return np.atleast_3d(np.asarray(part.resize((size, size), filters[augment.interpolation])))


def distance(a: np.ndarray, b: np.ndarray) -> int:
    return int(np.abs(a.astype(int) - b.astype(int)).max())


# Random parts


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "array"])
def test_a_crop_has_pillows_values(photo: np.ndarray, kind: str, interpolation: Any) -> None:
    image = photo if kind == "array" else encoded(Image.fromarray(photo), kind)
    augment = AugmentConfig(interpolation=interpolation)
    seeds = sample_seeds(1, 2, np.arange(12))
    out, errors = read(RandomResizedCrop(PreprocessConfig(image_size=48), augment), *[image] * 12, seeds=seeds)
    assert errors == []
    for row, key in zip(out, seeds, strict=True):
        apart = np.abs(row.astype(int) - pillow_crop(image, key, 48, augment=augment))
        assert np.quantile(apart, 0.995) <= 1
        assert apart.max() <= (1 if interpolation == "bilinear" else 12)  # bicubic overshoots, and is cut off twice


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 1), ("L", 3)])
def test_gray_and_color_become_each_other(photo: np.ndarray, mode: str, channels: int, kind: str) -> None:
    image = encoded(Image.fromarray(photo).convert(mode), kind)
    config = PreprocessConfig(image_size=48, **(GRAY if channels == 1 else {}))
    seeds = sample_seeds(0, 0, [5])
    out, errors = read(RandomResizedCrop(config, AugmentConfig()), image, seeds=seeds)
    assert errors == []
    assert distance(out[0], pillow_crop(image, seeds[0], 48, "L" if channels == 1 else "RGB")) <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_crop_is_taken_after_exif_orientation(large: Image.Image, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = encoded(large.resize((160, 107)), "JPEG", exif=exif)
    seeds = sample_seeds(0, 1, [3])
    out, _ = read(RandomResizedCrop(PreprocessConfig(image_size=64), AugmentConfig()), image, seeds=seeds)
    assert distance(out[0], pillow_crop(image, seeds[0], 64)) <= 1


def test_a_large_jpeg_is_decoded_smaller_and_looks_the_same(
    large: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, seeds = encoded(large, "JPEG", quality=92), sample_seeds(0, 0, np.arange(16))
    scales: list[int] = []
    whole = jpeg.decode_pixels
    monkeypatch.setattr(
        jpeg, "decode_pixels", lambda header, scale=1, rows=None: scales.append(scale) or whole(header, scale)
    )
    out, _ = read(RandomResizedCrop(PreprocessConfig(image_size=64), AugmentConfig()), *[image] * 16, seeds=seeds)
    assert set(scales) == {4, 8}
    monkeypatch.undo()
    pixels = decode(image)
    boxes = crop_boxes(seeds, [pixels.shape[:2]] * 16, (0.08, 1), (3 / 4, 4 / 3))
    for row, box, scale in zip(out, boxes.tolist(), scales, strict=True):
        top, left, bottom, right = (  # to the nearest pixel of the smaller image, which is half of the output's
            scale * round(side / scale) for side in (box[0], box[1], box[0] + box[2], box[1] + box[3])
        )
        part = Image.fromarray(pixels[top:bottom, left:right])
        expected = np.asarray(part.resize((64, 64), Image.Resampling.BILINEAR)).astype(int)
        assert np.abs(row - expected).mean() < 3
        assert np.abs(np.roll(row, 1, axis=1) - expected).mean() > 2.5 * np.abs(row - expected).mean()


def test_crops_are_the_same_with_and_without_simplejpeg(large: Image.Image, monkeypatch: pytest.MonkeyPatch) -> None:
    images = [encoded(large.resize(size), "JPEG") for size in ((1280, 854), (300, 256), (90, 200))]
    fast, _ = read(RandomResizedCrop(PreprocessConfig(image_size=64), AugmentConfig()), *images)
    monkeypatch.setattr(jpeg, "verified_simplejpeg", lambda: None)
    slow, _ = read(RandomResizedCrop(PreprocessConfig(image_size=64), AugmentConfig()), *images)
    assert np.array_equal(fast, slow)


@given(
    size=st.tuples(st.integers(1, 5000), st.integers(1, 5000)),
    share=st.tuples(st.floats(0.05, 1), st.floats(0.05, 1)),
    expected=st.integers(1, 512),
)
def test_the_scale_is_the_least_that_keeps_the_part_large_enough(
    size: tuple[int, int], share: tuple[float, float], expected: int
) -> None:
    part = max(1, int(size[0] * share[0])), max(1, int(size[1] * share[1]))
    scale = choose_decode_scale(size, part, (expected, expected))
    assert scale in (1, 2, 4, 8)
    assert scale == 1 or min(part) // scale >= expected
    if scale < 8 and min(size) >= 64:
        assert min(part) // (2 * scale) <= expected


@settings(max_examples=25)
@given(first=st.integers(0, 900), length=st.integers(100, 1000), orientation=st.sampled_from([1, 3, 6, 8]))
def test_what_is_cut_out_of_a_smaller_image_lies_where_it_should(first: int, length: int, orientation: int) -> None:
    """An image that is its own ruler: its rows say where the cut was."""
    rows = (np.arange(2000) // 8).astype(np.uint8)[:, None].repeat(1000, axis=1)
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = {1: rows, 3: rows[::-1, ::-1], 6: np.rot90(rows, 1), 8: np.rot90(rows, -1)}[orientation]
    jpeg = open_jpeg(encoded(Image.fromarray(stored), "JPEG", exif=exif, quality=95))
    assert jpeg is not None
    assert jpeg.size == (2000, 1000)
    out = np.empty((8, 8, 3), np.uint8)
    RandomResizedCrop(PreprocessConfig(image_size=8), AugmentConfig())._write(
        jpeg.crop((first, 0, length, 1000), 8), out
    )
    expected = (first + (np.arange(8) + 0.5) * length / 8) / 8 - 0.5
    apart = np.abs(out[:, 0, 0] - expected)[1:-1]  # at the ends the filter leans inwards
    assert apart.max() <= 2  # half a decoded pixel at each end, rounding, and JPEG


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5])
def test_resizing_takes_any_number_of_channels(channels: int) -> None:
    part = np.random.default_rng(0).integers(0, 256, (37, 51, channels), np.uint8)
    out = np.zeros((20, 24, channels), np.uint8)
    resize(part, out, "bilinear")
    for c in range(channels):
        expected = Image.fromarray(part[:, :, c]).resize((24, 20), Image.Resampling.BILINEAR)
        assert distance(out[:, :, c], np.asarray(expected)) <= 1


def test_resizing_does_not_modify_its_input() -> None:
    part = np.random.default_rng(0).integers(0, 256, (30, 30, 3), np.uint8)
    part.flags.writeable = False
    out = np.zeros((2, 20, 20, 3), np.uint8)
    resize(part[::-1, 3:], out[1], "bilinear")
    assert out[0].max() == 0
    assert out[1].max() > 0
    resize(part[:20, :20], out[0], "bicubic")
    assert np.array_equal(out[0], part[:20, :20])


# Other transforms


@pytest.mark.parametrize(
    "config",
    [
        PreprocessConfig(image_size=32, resize="short", resize_to=36, interpolation="bicubic"),
        PreprocessConfig(image_size=32, antialias=False),
    ],
)
def test_evaluation_is_preprocess_to_the_bit(photo: np.ndarray, config: PreprocessConfig) -> None:
    images = [encoded(Image.fromarray(photo), kind) for kind in ("JPEG", "PNG")]
    out, errors = read(EvalTransform(config), *images)
    assert errors == []
    assert out.dtype == Preprocess(config).dtype
    assert all(np.array_equal(o, Preprocess(config).pixels(p)) for o, p in zip(out, images, strict=True))


def test_native_images_stay_as_they_are_and_others_are_named(photo: np.ndarray) -> None:
    small = photo[:8, :8]
    out, errors = read(OriginalPixels((8, 8, 3)), small, encoded(Image.fromarray(small), "PNG"), photo)
    assert np.array_equal(out[0], small)
    assert np.array_equal(out[1], small)
    assert out[2].max() == 0
    assert [row for row, _ in errors] == [2]
    assert errors[0][1].startswith(WRONG_SIZE)


# SampleReader


def test_unreadable_images_are_black_with_a_reason(photo: np.ndarray, tmp_path: Path) -> None:
    good = encoded(Image.fromarray(photo), "JPEG")
    for transform in (
        RandomResizedCrop(PreprocessConfig(image_size=16), AugmentConfig()),
        EvalTransform(PreprocessConfig(image_size=16)),
    ):
        out, errors = read(transform, good, good[:700], b"not an image", tmp_path / "none.jpg", good)
        assert [row for row, _ in errors] == [1, 2, 3]
        assert "truncated" in errors[0][1]
        assert "starts with b'not an image'" in errors[1][1]
        assert "no such file" in errors[2][1]
        assert out[1:4].max() == 0
        assert min(out[0].max(), out[4].max()) > 0


def test_no_image_is_a_black_row(photo: np.ndarray) -> None:
    out = np.full((2, 16, 16, 3), 77, np.uint8)
    reader = SampleReader(Images([photo]), EvalTransform(PreprocessConfig(image_size=16)))
    assert reader(np.array([-1, 0]), np.zeros(2, np.uint64), out) == []
    assert out[0].max() == 0
    assert out[1].max() > 0


def test_errors_of_the_source_are_errors_of_the_image(photo: np.ndarray) -> None:
    class Broken(Images):
        def __getitem__(self, index: int) -> Sample:
            if index == 1:
                raise DataError("shard 7 could not be read in 4 tries.")
            if index == 2:
                raise OSError(5, "Input/output error")
            return super().__getitem__(index)

    out = np.zeros((3, 16, 16, 3), np.uint8)
    reader = SampleReader(Broken([photo] * 3), EvalTransform(PreprocessConfig(image_size=16)))
    errors = reader(np.arange(3), np.zeros(3, np.uint64), out)
    assert errors == [(1, "shard 7 could not be read in 4 tries"), (2, "[Errno 5] Input/output error")]


def test_a_programming_error_is_not_a_bad_image() -> None:
    class Wrong(Images):
        def __getitem__(self, index: int) -> Sample:
            raise KeyError("oops")

    reader = SampleReader(Wrong([b""]), EvalTransform(PreprocessConfig(image_size=16)))
    with pytest.raises(KeyError, match="oops"):
        reader(np.arange(1), np.zeros(1, np.uint64), np.zeros((1, 16, 16, 3), np.uint8))


def test_images_of_a_slow_source_are_fetched_in_parallel(photo: np.ndarray) -> None:
    class Slow(Images):
        def __getitem__(self, index: int) -> Sample:
            time.sleep(0.03)
            if index == 5:
                raise DataError("gone.")
            return super().__getitem__(index)

    images = [photo[i:] for i in range(16)]
    reader = SampleReader(Slow(images), EvalTransform(PreprocessConfig(image_size=16)))
    first, again = np.zeros((2, 16, 16, 16, 3), np.uint8)
    assert reader(np.arange(16), np.zeros(16, np.uint64), first) == [(5, "gone")]
    start = time.perf_counter()
    assert reader(np.arange(16), np.zeros(16, np.uint64), again) == [(5, "gone")]
    assert time.perf_counter() - start < 16 * 0.03
    assert np.array_equal(first, again)
    near, _ = read(EvalTransform(PreprocessConfig(image_size=16)), *images)
    near[5] = 0
    assert np.array_equal(first, near)


class Opened:
    """A source with an open file, which it leaves behind when it travels."""

    def __init__(self) -> None:
        self.numbers = np.arange(1000)
        self.file: Any = io.BytesIO()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "file": None}


def test_a_process_of_its_own_opens_its_own_files() -> None:
    source = Opened()
    fresh = reopen_after_fork(source)
    assert fresh.file is None
    assert fresh.numbers is not source.numbers
    assert np.shares_memory(fresh.numbers, source.numbers)  # but what is only data is not copied
    plain = Images([b""])
    assert reopen_after_fork(plain) is plain
    assert pickle.loads(pickle.dumps(source)).file is None


def test_the_source_is_reopened_in_another_process_only(photo: np.ndarray) -> None:
    reader = SampleReader(Images([photo]), EvalTransform(PreprocessConfig(image_size=16)))
    source = reader.source
    reader(np.arange(1), np.zeros(1, np.uint64), np.zeros((1, 16, 16, 3), np.uint8))
    assert reader.source is source
    assert reader._owner_pid == os.getpid()
