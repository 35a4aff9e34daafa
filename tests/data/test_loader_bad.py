"""Unreadable images: logged once, black, with weight 0; too many stop training, any stops evaluation."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from image_source import Images
from images import encoded
from PIL import Image

from vitrail.config import AugmentConfig, DataConfig, PreprocessConfig
from vitrail.data.bad_images import BadImages
from vitrail.data.batches import evaluation_batches, training_batches
from vitrail.data.loader import Loader, ResidentLoader
from vitrail.errors import DataError

SMALL = PreprocessConfig(image_size=16)
BAD = (3, 11, 17)


def images(bad: tuple[int, ...] = BAD, count: int = 20, name: str = "photos") -> Images:
    """JPEGs of many sizes, some cut off."""
    random, found = np.random.default_rng(0), []
    for i in range(count):
        pixels = random.integers(0, 256, (20 + i, 80 - i, 3), np.uint8)
        data = encoded(Image.fromarray(pixels), "JPEG")
        found.append(data[:-200] if i in bad else data)
    return Images(found, name=name)


def train(source: Any, **changes: Any) -> Loader:
    config = DataConfig(**{"workers": 0, "resident": False, "max_bad_fraction": 0.2, **changes.pop("data", {})})
    options: dict[str, Any] = {
        "augment": AugmentConfig(), "preprocess": SMALL, "batch_size": 20, "seed": 0, "device": "cpu", "steps": 4,
    }  # fmt: skip
    return training_batches(source, config=config, **{**options, **changes})


def measure(source: Any, batch: int = 6, **data: Any) -> Loader:
    config = DataConfig(**{"workers": 0, "resident": False, **data})
    return evaluation_batches(source, preprocess=SMALL, batch_size=batch, device="cpu", config=config)


@pytest.mark.parametrize("data", [{}, {"workers": 2}, {"resident": True}], ids=["here", "workers", "resident"])
def test_bad_images_keep_their_slots_black_and_weightless(data: dict[str, Any]) -> None:
    with train(images(), data=data) as loader:
        for batch in loader:
            bad = np.isin(batch.indices, BAD)
            assert bad.sum() == 3
            assert np.array_equal(batch.weights, (~bad).astype(np.float32))
            assert batch.images[bad].eq(0).all()
            assert batch.images[~bad].flatten(1).amax(1).gt(0).all()
    assert set(loader.bad) == {"3", "11", "17"}
    assert all("truncated" in reason for reason in loader.bad.values())


def test_each_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with train(images(name="named"), steps=6) as loader:
        list(loader)
    lines = [r.getMessage() for r in caplog.records if "cannot be used" in r.getMessage()]
    assert sorted(line.split()[1] for line in lines) == ["11", "17", "3"]
    assert all(line.startswith("named: ") and "truncated" in line for line in lines)
    assert all(r.levelno == logging.WARNING for r in caplog.records)


@pytest.mark.parametrize("data", [{}, {"workers": 2}, {"resident": True}], ids=["here", "workers", "resident"])
def test_too_many_end_the_run_with_their_list(data: dict[str, Any]) -> None:
    bad = tuple(range(0, 48, 2))
    source = images(bad, count=60)
    with (
        pytest.raises(
            DataError, match=r"of 60 images of photos cannot be read, more than data.max_bad_fraction=0.3"
        ) as caught,
        train(source, data={**data, "max_bad_fraction": 0.3}, batch_size=60) as loader,
    ):
        list(loader)
    lines = str(caught.value).splitlines()
    assert len(lines) == 1 + 20 + 1
    assert lines[-1] == "  and 4 more"
    assert all("truncated" in line for line in lines[1:-1])


def test_the_fraction_counts_images_not_reads() -> None:
    with train(images(), data={"max_bad_fraction": 3 / 20}, steps=30) as loader:
        assert len(list(loader)) == 30
    with (
        pytest.raises(DataError, match="3 of 20"),
        train(images(), data={"max_bad_fraction": 2.9 / 20}, steps=30) as loader,
    ):
        list(loader)


def test_several_processes_raise_together_and_none_alone() -> None:
    loaders = [train(images(), data={"max_bad_fraction": 0.1}, steps=1, rank=rank, world_size=2) for rank in range(2)]
    for loader in loaders:
        list(loader)
    num_new = sum(loader.num_unshared_bad for loader in loaders)
    found_by_rank = [loader.bad for loader in loaders]
    assert num_new == 3
    for loader in loaders:
        assert loader.too_many_bad(num_new)
        assert not loader.too_many_bad(2)
        with pytest.raises(DataError, match="3 of 20"):
            loader.merge_bad(found_by_rank)
        assert loader.num_unshared_bad == 0


def test_bad_images_are_bad_whatever_reads_them() -> None:
    weights = []
    for workers in (0, 1, 3):
        with train(images(), data={"workers": workers}, batch_size=7) as loader:
            weights.append([b.weights.tolist() for b in loader])
    assert weights[0] == weights[1] == weights[2]


# Evaluation


@pytest.mark.parametrize("data", [{}, {"workers": 2}, {"resident": None}], ids=["here", "workers", "resident"])
def test_a_measurement_refuses_with_the_complete_list(data: dict[str, Any]) -> None:
    bad = tuple(range(1, 60, 2))
    with (
        pytest.raises(DataError, match=r"30 of 60 images of photos cannot be read; .*--skip-bad") as caught,
        measure(images(bad, count=60), **data) as batches,
    ):
        list(batches)
    lines = str(caught.value).splitlines()[1:]
    assert [int(line.split(":")[0]) for line in lines] == list(bad)
    assert all("truncated" in line for line in lines)


@pytest.mark.parametrize("data", [{}, {"workers": 2}, {"resident": None}], ids=["here", "workers", "resident"])
def test_skip_bad_skips_and_lists_them(data: dict[str, Any]) -> None:
    with measure(images(), skip_bad=True, **data) as batches:
        weights = {int(i): float(w) for b in batches for i, w in zip(b.indices, b.weights, strict=True) if i >= 0}
    assert weights == {i: float(i not in BAD) for i in range(20)}
    assert set(batches.bad) == {"3", "11", "17"}


def test_cached_images_are_refused_again() -> None:
    source = images()
    for _ in range(2):
        with pytest.raises(DataError, match="3 of 20"):
            measure(source, resident=None)
    assert isinstance(measure(source, resident=None, skip_bad=True), ResidentLoader)


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("/home/me/my photos/cat/a.png is empty (0 bytes)", "cat/a.png is empty (0 bytes)"),
        ("/home/me/train-0.tar is damaged", "train-0.tar is damaged"),
        ("https://example.org/cat/a.png cannot be had", "https://example.org/cat/a.png cannot be had"),
        ("cat/a.png is empty", "cat/a.png is empty"),
    ],
)
def test_reasons_hold_no_folders_of_this_machine(reason: str, expected: str):
    bad = BadImages("photos", 10, None)
    bad.add("cat/a.png", reason)
    assert bad.reasons == {"cat/a.png": expected}
