"""Datasets of torch, torchvision and Hugging Face as sources: labels, classes, images, splits, errors."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from vitrail.config import DataConfig
from vitrail.data.decode import decode
from vitrail.data.sources import open_data
from vitrail.data.sources.dataset import DatasetSource, splits_from
from vitrail.errors import DataError

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 4, 5, 3), dtype=np.uint8)


class Counting(Dataset[Any]):
    """Items (image, label); counts how often one is read."""

    def __init__(self, labels: Any, images: Any = PIXELS, **attributes: Any) -> None:
        self.labels, self.images, self.reads = labels, images, 0
        for name, value in attributes.items():
            setattr(self, name, value)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.reads += 1
        return self.images[index], self.labels[index]


def test_stated_labels_and_classes_are_used_without_reading_an_item():
    data = Counting([0] * 6, targets=torch.tensor([0, 1, 2, 0, 1, 2]), classes=["a", "b", "c"])
    source = DatasetSource(data, "mine")
    assert (source.labels, source.targets.tolist(), data.reads) == (("a", "b", "c"), [0, 1, 2, 0, 1, 2], 0)
    part = DatasetSource(Subset(Subset(data, [5, 4, 3]), [0, 2]), "part")
    assert (part.labels, part.targets.tolist(), data.reads) == (("a", "b", "c"), [2, 0], 0)
    assert part[0].target == 2
    assert (decode(part[0].image) == PIXELS[5]).all()
    assert (part.key(1), part[1].key) == ("part/000001", "part/000001")


@pytest.mark.parametrize(
    ("labels", "classes", "targets"),
    [
        ([0, 2, 1, 0, 0, 2], ("0", "1", "2"), [0, 2, 1, 0, 0, 2]),
        ([torch.tensor(1), np.int64(0), 1, 0, 0, 1], ("0", "1"), [1, 0, 1, 0, 0, 1]),
        (["dog", "cat", "dog", "cat", "cat", "emu"], ("cat", "dog", "emu"), [1, 0, 1, 0, 0, 2]),
    ],
)
def test_labels_are_read_once_where_the_dataset_does_not_state_them(labels: Any, classes: Any, targets: Any):
    data = Counting(labels)
    source = DatasetSource(data, "mine")
    assert (source.labels, source.targets.tolist(), data.reads) == (classes, targets, 6)
    assert not source.multi_label


def test_zeros_and_ones_per_class_are_multi_label():
    source = DatasetSource(Counting([torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0.0, 0.0, 0.0])]), "mine")
    assert source.multi_label
    assert source.targets.tolist() == [[True, False, True], [False, False, False]]
    assert [source[i].target for i in range(2)] == [(0, 2), ()]


def test_every_kind_of_image_gives_the_same_pixels(tmp_path: Path):
    image, file, buffer = Image.fromarray(PIXELS[0]), tmp_path / "a.png", io.BytesIO()
    image.save(file)
    image.save(buffer, "PNG")
    chw = torch.from_numpy(PIXELS[0]).permute(2, 0, 1)
    kinds = [image, PIXELS[0], chw, chw / 255, PIXELS[0] / 255, buffer.getvalue(), file, str(file)]
    source = DatasetSource(Counting([0] * len(kinds), kinds), "mine")
    for number, kind in enumerate(kinds):
        assert (decode(source[number].image) == PIXELS[0]).all(), type(kind)


def test_mappings_as_of_hugging_face_are_read():
    class Columns(Counting):
        column_names = ("img", "label")

        def __getitem__(self, key: Any) -> Any:
            return self.labels if key == "label" else {"img": self.images[key], "label": self.labels[key]}

    class ClassLabel:
        names = ("no", "yes")

    source = DatasetSource(Columns([0, 1, 1], features={"label": ClassLabel()}), "hub")
    assert (source.labels, source.targets.tolist()) == (("no", "yes"), [0, 1, 1])
    assert (decode(source[2].image) == PIXELS[2]).all()


def test_splits_come_from_one_dataset_a_tuple_or_a_dict():
    train, other, test = Counting([0, 1] * 3), Counting([1, 0]), Counting([0])
    assert splits_from(train, "mine").validation is None
    for given in ((train, other, test), {"train": train, "val": other, "test": test}):
        splits = splits_from(given, "mine")
        assert (len(splits.train), len(splits.validation), len(splits.test)) == (6, 2, 1)
        assert splits.test.labels == splits.train.labels == ("0", "1")  # the test images show one class only
    kept = splits_from((splits.train, splits.validation), "again")
    assert kept.train is splits.train


def test_open_data_holds_out_images_of_a_dataset():
    own = splits_from(Counting([0, 1] * 30, np.zeros((60, 4, 4, 3), np.uint8)), "mine")
    splits = open_data(DataConfig(source="memory:mine", held_out=0.25), source_splits=own)
    assert splits.eval_split == "held out"
    assert len(splits.train) + len(splits.validation) == 60
    assert 5 < len(splits.validation) < 25


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Endless(), "got Endless, which has no length or no random access; expected a map-style torch Dataset"),
        ((1, 2, 3, 4), "got a tuple of 4 datasets"),
        ({"train": Counting([0]), "dev": Counting([0])}, "got datasets called 'train', 'dev'"),
        ({"test": Counting([0])}, "got datasets called 'test'; expected"),
        (Counting([]), "got an empty Counting"),
        (np.zeros(3), "got ndarray"),
        (TensorDataset(torch.zeros(3, 3, 4, 4)), r"the items of mine are a tuple; expected \(image, label\)"),
        (Counting([0.5, 1.5]), r"got a label 0.5, expected a class index"),
        (Counting([0, 7], classes=["a"]), "labels from 0 to 7 and 1 classes"),
        (Counting(["a", "z"], classes=["a"]), "has the label 'z', which is not among its classes"),
        (Counting([[0, 2]]), "expected a class index, a word or zeros and ones per class"),
    ],
)
def test_what_is_not_a_dataset_is_refused_with_what_was_got(given: Any, message: str):
    with pytest.raises(DataError, match=message):
        splits_from(given, "mine")


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (torch.full((3, 4, 4), -1.5), "has values from -1.5 to -1.5, expected uint8, or floats from 0 to 1"),
        (np.full((4, 4, 3), 2.0), "remove the normalization"),
        (torch.zeros(3, 4, 4, dtype=torch.int64), "is of torch.int64, expected uint8"),
        (None, "mine/000000 is a NoneType; expected a Pillow image"),
    ],
)
def test_an_image_that_cannot_be_shown_is_refused_by_its_key(image: Any, message: str):
    with pytest.raises(DataError, match=message):
        DatasetSource(Counting([0], [image]), "mine")[0]
