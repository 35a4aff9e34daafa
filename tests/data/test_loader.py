"""Batches do not depend on workers, ranks or the first step; bad images keep their slots; evaluation reads all."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_source import Images
from images import encoded
from PIL import Image
from sklearn.datasets import load_sample_image

from vitrail.config import AugmentConfig, DataConfig, PreprocessConfig
from vitrail.data.augment.crop import crop_boxes
from vitrail.data.batch import Batch
from vitrail.data.batches import evaluation_batches, training_batches
from vitrail.data.decode import decode
from vitrail.data.loader import Loader, ResidentLoader, WorkerLoader
from vitrail.data.preprocess import Preprocess
from vitrail.data.sampler import Sampler
from vitrail.errors import ConfigError, DataError
from vitrail.rng import sample_seeds

SMALL = PreprocessConfig(image_size=32)
FILES = DataConfig(workers=0, resident=False)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """41 files of many sizes and some kinds."""
    folder, whole = tmp_path_factory.mktemp("photos"), Image.fromarray(load_sample_image("china.jpg"))
    found = []
    for i in range(41):
        width, height = 40 + 7 * i, 60 + (11 * i) % 90
        part = whole.crop((5 * i, 3 * i, 5 * i + width, 3 * i + height))
        path = folder / f"{i:02d}.{'png' if i % 7 == 3 else 'jpg'}"
        path.write_bytes(encoded(part, "PNG" if i % 7 == 3 else "JPEG"))
        found.append(path)
    return found


def train(source: Any, config: DataConfig = FILES, **changes: Any) -> Loader:
    options: dict[str, Any] = {
        "augment": AugmentConfig(), "preprocess": SMALL, "batch_size": 12, "seed": 3, "device": "cpu", "steps": 6,
    }  # fmt: skip
    return training_batches(source, config=config, **{**options, **changes})


def collect(loader: Loader) -> list[Batch]:
    with loader:
        return list(loader)


def equal(a: Batch, b: Batch) -> bool:
    names = ("images", "targets", "weights", "slots", "indices")
    return a.step == b.step and all(torch.equal(getattr(a, name), getattr(b, name)) for name in names)


# Independent of workers and ranks


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_number_of_workers_changes_nothing(photos: list[Path], workers: int) -> None:
    inline = collect(train(Images(photos)))
    assert len(inline) == 6
    shared = collect(train(Images(photos), FILES.replace(workers=workers)))
    assert all(equal(a, b) for a, b in zip(inline, shared, strict=True))


@pytest.mark.parametrize("start", [1, 3, 5])
@pytest.mark.parametrize("order", ["shuffled", "balanced"])
def test_a_run_can_begin_at_any_step(photos: list[Path], start: int, order: str) -> None:
    config = FILES.replace(order=order, repeats=2)
    whole = collect(train(Images(photos), config))
    later = collect(train(Images(photos), config.replace(workers=2), start_step=start))
    assert [b.step for b in later] == list(range(start, 6))
    assert all(equal(a, b) for a, b in zip(whole[start:], later, strict=True))


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("resident", [False, True])
def test_ranks_together_have_the_batch_of_one_process(photos: list[Path], world_size: int, resident: bool) -> None:
    config = DataConfig(workers=0, resident=resident)
    whole = collect(train(Images(photos), config, steps=3))
    parts = [
        collect(train(Images(photos), config, steps=3, rank=rank, world_size=world_size)) for rank in range(world_size)
    ]
    for step, batch in enumerate(whole):
        for name in ("images", "targets", "weights", "slots", "indices"):
            together = torch.cat([getattr(part[step], name) for part in parts])
            assert torch.equal(together, getattr(batch, name))


def test_batches_are_what_the_definition_says(photos: list[Path]) -> None:
    source, order = Images(photos), Sampler(41, seed=3)
    for batch in collect(train(source, FILES.replace(workers=2), steps=2)):
        indices = order.indices(12 * batch.step, 12)
        assert np.array_equal(batch.indices, indices)
        assert np.array_equal(batch.targets, indices % 3)
        assert batch.slots.tolist() == list(range(12))
        seeds = sample_seeds(3, batch.step, np.arange(12))
        for image, index, key in zip(batch.images, indices, seeds, strict=True):
            pixels = decode(photos[index])
            top, left, h, w = crop_boxes(np.array([key]), [pixels.shape[:2]], (0.08, 1), (3 / 4, 4 / 3))[0].tolist()
            if min(h, w) >= 2 * 33:
                continue  # decoded smaller
            part = Image.fromarray(pixels[top : top + h, left : left + w])
            expected = np.asarray(part.resize((32, 32), Image.Resampling.BILINEAR)).astype(int)
            assert np.abs(image.permute(1, 2, 0).numpy() - expected).max() <= 1


def test_every_epoch_has_every_image(photos: list[Path]) -> None:
    loader = train(Images(photos), batch_size=10, steps=41)
    seen = torch.cat([b.indices for b in collect(loader)]).reshape(10, 41)
    assert all(sorted(epoch.tolist()) == list(range(41)) for epoch in seen)


def test_a_loader_counts_and_ends(photos: list[Path]) -> None:
    loader = train(Images(photos), FILES.replace(workers=1))
    assert len(loader) == 6
    assert loader.cropped
    next(loader)
    assert len(loader) == 5
    assert len(list(loader)) == 5
    with pytest.raises(StopIteration):
        next(loader)
    assert loader.state() is None
    loader.close()


@pytest.mark.parametrize("config", [FILES, FILES.replace(workers=2), DataConfig(workers=0, resident=True)])
def test_a_closed_loader_has_no_more_batches(photos: list[Path], config: DataConfig) -> None:
    with train(Images(photos), config) as loader:
        next(loader)
    assert list(loader) == []
    assert len(loader) == 0


def test_batches_that_are_kept_stay_what_they_were(photos: list[Path]) -> None:
    loader = train(Images(photos), FILES.replace(workers=2), steps=20)
    batches = collect(loader)
    assert all(equal(a, b) for a, b in zip(batches, collect(train(Images(photos), steps=20)), strict=True))


@pytest.mark.slow  # a busy machine is no reason to fail
def test_the_first_batch_comes_soon(photos: list[Path]) -> None:
    start = time.perf_counter()
    with train(Images(photos), FILES.replace(workers=2)) as loader:
        next(loader)
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize("crop", ["none", "pad"])
def test_without_crops_training_sees_what_evaluation_sees(photos: list[Path], crop: Any) -> None:
    augment = AugmentConfig(crop=crop)
    worker_loader = train(Images(photos), augment=augment, steps=2)
    assert isinstance(worker_loader, WorkerLoader)
    assert not worker_loader.cropped
    resident_loader = train(Images(photos), DataConfig(workers=0), augment=augment, steps=2)
    assert isinstance(resident_loader, ResidentLoader)
    for a, b in zip(collect(worker_loader), collect(resident_loader), strict=True):
        assert equal(a, b)
        for image, index in zip(a.images, a.indices.tolist(), strict=True):
            assert np.array_equal(image.permute(1, 2, 0), Preprocess(SMALL).pixels(photos[index]))


# Labels


def test_multi_label_targets_are_multi_hot_rows(photos: list[Path]) -> None:
    targets = np.random.default_rng(0).random((41, 5)) < 0.3
    batch = collect(train(Images(photos, targets, classes=5), steps=1))[0]
    assert batch.targets.dtype == torch.float32
    assert np.array_equal(batch.targets, targets[batch.indices])
    assert batch.weights.eq(1).all()


def test_images_without_a_label_are_skipped(photos: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    targets = np.where(np.arange(41) % 4 == 1, -1, np.arange(41) % 3)
    for blocks in (None, (11, 20, 10)):
        batches = collect(train(Images(photos, targets, blocks=blocks, name=f"with {blocks}"), batch_size=31, steps=2))
        for batch in batches:
            assert sorted(batch.indices.tolist()) == [i for i in range(41) if i % 4 != 1]
            assert np.array_equal(batch.targets, targets[batch.indices])
    assert "10 of 41 images have no label and are skipped" in caplog.text


def test_unlabeled_images_are_used_if_labels_are_not_needed(photos: list[Path]) -> None:
    batch = collect(train(Images(photos, np.full(41, -1)), batch_size=41, steps=1, labeled=False))[0]
    assert sorted(batch.indices.tolist()) == list(range(41))
    assert batch.weights.eq(1).all()
    assert batch.targets.eq(0).all()


def test_no_labels_at_all_is_an_error(photos: list[Path]) -> None:
    source = Images(photos, np.full(41, -1))
    with pytest.raises(DataError, match="none of the 41 images of images has a label"):
        train(source)
    with pytest.raises(DataError, match="none of the 41 images of images has a label; evaluation needs labels"):
        evaluation_batches(source, preprocess=SMALL, batch_size=8, device="cpu")


def test_an_indivisible_batch_size_is_an_error(photos: list[Path]) -> None:
    with pytest.raises(ConfigError, match=r"batch_size=12 is not divisible by 5 processes; try 10"):
        train(Images(photos), world_size=5)


# Gray


def test_gray_images_have_one_channel(photos: list[Path]) -> None:
    gray = PreprocessConfig(image_size=24, mean=(0.5,), std=(0.5,))
    assert collect(train(Images(photos), preprocess=gray, steps=1))[0].images.shape == (12, 1, 24, 24)


# Evaluation


@settings(max_examples=25)
@given(count=st.integers(1, 41), batch_size=st.integers(1, 12), world_size=st.integers(1, 4), resident=st.booleans())
def test_evaluation_has_every_image_once(
    photos: list[Path], count: int, batch_size: int, world_size: int, resident: bool
) -> None:
    source = Images(photos[:count])
    config = DataConfig(workers=0, resident=None if resident else False)
    ranks = [
        collect(
            evaluation_batches(
                source,
                preprocess=PreprocessConfig(image_size=8),
                batch_size=batch_size,
                device="cpu",
                rank=r,
                world_size=world_size,
                config=config,
            )
        )
        for r in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    seen = []
    for rank, batches in enumerate(ranks):
        for batch in batches:
            assert batch.images.shape == (batch_size, 3, 8, 8)
            assert batch.slots.tolist() == list(range(rank * batch_size, (rank + 1) * batch_size))
            assert torch.equal(batch.weights, (batch.indices >= 0).float())
            assert batch.images[batch.indices < 0].eq(0).all()
            seen += batch.indices[batch.indices >= 0].tolist()
    assert sorted(seen) == list(range(count))


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("resident", [None, False])
@pytest.mark.parametrize("antialias", [True, False])
def test_evaluation_sees_preprocess_to_the_bit(
    photos: list[Path], workers: int, resident: bool | None, antialias: bool
) -> None:
    preprocess, source = SMALL.replace(antialias=antialias), Images(photos)
    config = DataConfig(workers=workers, resident=resident)
    for _ in range(2):  # the second time from the cache
        batches = collect(evaluation_batches(source, preprocess=preprocess, batch_size=10, device="cpu", config=config))
        images = torch.cat([b.images for b in batches])[:41]
        expected = np.stack([Preprocess(preprocess).pixels(p) for p in photos])
        assert np.array_equal(images.permute(0, 2, 3, 1), expected)
        assert torch.cat([b.targets for b in batches])[:41].tolist() == [i % 3 for i in range(41)]


def test_images_evaluated_again_are_decoded_once(photos: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    source = Images(photos)
    first = collect(
        evaluation_batches(source, preprocess=SMALL, batch_size=10, device="cpu", config=DataConfig(workers=0))
    )
    monkeypatch.setattr(Preprocess, "pixels", lambda *_: pytest.fail("decoded again"))
    again = collect(
        evaluation_batches(source, preprocess=SMALL, batch_size=10, device="cpu", config=DataConfig(workers=0))
    )
    assert all(equal(a, b) for a, b in zip(first, again, strict=True))


def test_unlabeled_images_do_not_count_in_a_measurement(photos: list[Path]) -> None:
    targets = np.where(np.arange(41) % 4 == 1, -1, np.arange(41) % 3)
    for config in (FILES, DataConfig(workers=0)):
        batches = collect(
            evaluation_batches(Images(photos, targets), preprocess=SMALL, batch_size=41, device="cpu", config=config)
        )
        assert np.array_equal(batches[0].weights, (targets >= 0).astype(np.float32))
        assert np.array_equal(batches[0].targets, np.maximum(targets, 0))
