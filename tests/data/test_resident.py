"""Small datasets kept on the device: when they fit, unchanged, and logged."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_source import Images
from images import encoded
from PIL import Image

from vitrail.config import AugmentConfig, DataConfig, PreprocessConfig
from vitrail.data import resident
from vitrail.data.batches import training_batches
from vitrail.data.loader import Loader, ResidentLoader, WorkerLoader
from vitrail.data.preprocess import Preprocess
from vitrail.data.sampler import Sampler
from vitrail.data.transforms import EvalTransform, OriginalPixels
from vitrail.errors import ConfigError

CPU = torch.device("cpu")
GRAY = {"mean": (0.5,), "std": (0.5,)}


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (50, 12, 10, 3), np.uint8)


def arrays(pixels: np.ndarray) -> Images:
    source = Images(list(pixels))
    source.pixels = pixels
    return source


def files(pixels: np.ndarray) -> Images:
    return Images([encoded(Image.fromarray(p.squeeze()), "PNG") for p in pixels])


def train(source: Any, **changes: Any) -> Loader:
    options: dict[str, Any] = {
        "config": DataConfig(workers=0), "augment": AugmentConfig(), "preprocess": PreprocessConfig(image_size=16),
        "batch_size": 8, "seed": 1, "device": "cpu", "steps": 4,
    }  # fmt: skip
    return training_batches(source, **{**options, **changes})


def choose(source: Any, **changes: Any) -> Any:
    options: dict[str, Any] = {
        "config": DataConfig(), "augment": AugmentConfig(), "preprocess": PreprocessConfig(image_size=16),
        "device": CPU,
    }  # fmt: skip
    return resident.choose_resident_transform(source, **{**options, **changes})


# What a batch holds


@pytest.mark.parametrize("make", [arrays, files])
@pytest.mark.parametrize("workers", [0, 2])
def test_images_of_one_size_stay_at_that_size(pixels: np.ndarray, make: Any, workers: int) -> None:
    loader = train(make(pixels), config=DataConfig(workers=workers))
    assert isinstance(loader, ResidentLoader)
    assert not loader.cropped
    for batch in loader:
        indices = Sampler(50, seed=1).indices(8 * batch.step, 8)
        assert np.array_equal(batch.indices, indices)
        assert batch.images.is_contiguous()
        assert np.array_equal(batch.images.permute(0, 2, 3, 1), pixels[indices])
        assert np.array_equal(batch.targets, indices % 3)
        assert batch.weights.eq(1).all()


def test_modifying_a_batch_does_not_change_the_resident_images(pixels: np.ndarray) -> None:
    source = arrays(pixels)
    first = next(train(source))
    expected = first.images.clone()
    first.images.zero_()
    assert torch.equal(next(train(source)).images, expected)


@pytest.mark.parametrize("make", [arrays, files])
def test_gray_is_repeated_and_color_becomes_gray(pixels: np.ndarray, make: Any) -> None:
    gray = pixels[..., :1].copy()
    batch = next(train(make(gray)))
    assert np.array_equal(batch.images.permute(0, 2, 3, 1), gray[batch.indices].repeat(3, axis=3))
    batch = next(train(make(pixels), preprocess=PreprocessConfig(image_size=16, **GRAY)))
    expected = [np.asarray(Image.fromarray(p).convert("L")) for p in pixels[batch.indices]]
    assert np.array_equal(batch.images[:, 0], expected)


@pytest.mark.parametrize("crop", ["none", "pad"])
def test_without_crops_they_stay_as_evaluation_sees_them(pixels: np.ndarray, crop: Any) -> None:
    batch = next(train(arrays(pixels), augment=AugmentConfig(crop=crop)))
    expected = [Preprocess(PreprocessConfig(image_size=16)).pixels(p) for p in pixels[batch.indices]]
    assert np.array_equal(batch.images.permute(0, 2, 3, 1), expected)


@pytest.mark.parametrize("channels", [1, 3])
def test_arrays_of_the_right_size_are_copied_without_decoding(channels: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 16, 16, channels), np.uint8)
    source = arrays(pixels)
    source.images = ["missing.png"] * 20  # cannot be read
    batch = next(train(source, augment=AugmentConfig(crop="pad")))
    assert np.array_equal(batch.images.permute(0, 2, 3, 1), pixels[batch.indices].repeat(3 // channels, axis=3))


def test_values_that_are_never_rounded_stay_so(pixels: np.ndarray) -> None:
    preprocess = PreprocessConfig(image_size=16, antialias=False)
    batch = next(train(arrays(pixels), augment=AugmentConfig(crop="none"), preprocess=preprocess))
    assert batch.images.dtype == torch.float32
    expected = [Preprocess(preprocess).pixels(p) for p in pixels[batch.indices]]
    assert np.array_equal(batch.images.permute(0, 2, 3, 1), expected)


# Whether


def test_images_of_many_sizes_are_read_as_they_are_needed(pixels: np.ndarray) -> None:
    mixed = Images([*pixels[:30], pixels[0][:5]])
    assert choose(mixed) is None
    assert isinstance(choose(mixed, augment=AugmentConfig(crop="none")), EvalTransform)
    assert isinstance(choose(mixed, config=DataConfig(resident=True)), EvalTransform)
    assert isinstance(train(mixed), WorkerLoader)


def test_large_images_of_one_size_are_cut_up_by_workers() -> None:
    wide, small = arrays(np.zeros((3, 100, 100, 3), np.uint8)), arrays(np.zeros((3, 40, 40, 3), np.uint8))
    image = PreprocessConfig(image_size=64)
    assert choose(wide, preprocess=image) is None
    assert isinstance(choose(small, preprocess=image), OriginalPixels)
    assert choose(small, preprocess=PreprocessConfig(image_size=65)) is None
    assert isinstance(choose(wide, preprocess=image, config=DataConfig(resident=True)), OriginalPixels)
    assert isinstance(
        choose(wide, preprocess=PreprocessConfig(image_size=49), config=DataConfig(resident=True)), EvalTransform
    )
    assert isinstance(train(small, preprocess=PreprocessConfig(image_size=65)), WorkerLoader)


def test_one_of_another_size_among_many_is_found_in_time(pixels: np.ndarray) -> None:
    odd = Images([*pixels, *pixels, pixels[0][:5], *pixels])
    assert isinstance(choose(odd), OriginalPixels)
    assert isinstance(train(odd), WorkerLoader)


def test_it_can_be_disabled_and_forced(pixels: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(arrays(pixels), config=DataConfig(resident=False)) is None
    monkeypatch.setattr(resident, "free_memory", lambda device: pixels.size * 3)
    assert choose(arrays(pixels)) is None
    assert isinstance(choose(arrays(pixels), config=DataConfig(resident=True)), OriginalPixels)
    with pytest.raises(ConfigError, match=r"data.resident=true needs 0 MiB for images, and cpu has 0 MiB free"):
        choose(arrays(pixels), config=DataConfig(resident=True), num_sharing=4)
    monkeypatch.setattr(resident, "free_memory", lambda device: pixels.size * 4)
    assert isinstance(choose(arrays(pixels)), OriginalPixels)


def test_large_datasets_are_not_decoded_in_advance(pixels: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "MAX_DECODED_BYTES", pixels.size - 1)
    assert choose(files(pixels)) is None
    assert isinstance(choose(arrays(pixels)), OriginalPixels)


def test_an_unreadable_image_does_not_hide_the_size(pixels: np.ndarray) -> None:
    source = files(pixels)
    source.images[0] = source.images[0][:60]
    assert isinstance(choose(source), OriginalPixels)


def test_the_choice_is_logged(pixels: np.ndarray, caplog: pytest.LogCaptureFixture) -> None:
    source, mixed = arrays(pixels), Images([*pixels, pixels[0][:5]])
    source.name = mixed.name = "data"
    train(source)
    assert "data: 50 images of 12 x 10 pixels are kept on cpu (0 MiB)" in caplog.text
    train(mixed, config=DataConfig(resident=True, workers=0))
    assert (
        "data: 51 images of 16 x 16 pixels are kept on cpu (0 MiB), preprocessed as in evaluation; random crops are"
        in caplog.text
    )


def test_free_memory_is_plausible() -> None:
    free = resident.free_memory(CPU)
    assert 2**20 < free < 2**62
    if Path("/proc/meminfo").exists():
        assert free <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_sizes_are_formatted() -> None:
    assert resident.format_bytes(157 << 20) == "157 MiB"
    assert resident.format_bytes(3 << 29) == "1.5 GiB"


def test_cached_images_are_dropped_with_their_source(pixels: np.ndarray) -> None:
    source = arrays(pixels)
    cached = resident.ResidentImages(torch.zeros(1), {})
    resident.add_cached(source, "here", cached)
    assert resident.get_cached(source, "here") is cached
    assert resident.get_cached(source, "there") is None
    number = id(source)
    del source
    gc.collect()
    assert number not in resident._cache


@pytest.mark.gpu
def test_the_gpu_holds_them(pixels: np.ndarray) -> None:
    here, there = train(arrays(pixels)), train(arrays(pixels), device="cuda")
    for a, b in zip(here, there, strict=True):
        assert b.images.is_cuda
        assert b.targets.is_cuda
        assert b.weights.is_cuda
        assert torch.equal(a.images, b.images.cpu())
        assert torch.equal(a.targets, b.targets.cpu())
