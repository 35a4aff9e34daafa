"""The k-NN baseline on raw pixels against scikit-learn's k-NN classifier."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

from vitrail.errors import DataError
from vitrail.evaluation import pixel_knn_applies, pixel_knn_baseline


@dataclass
class Arrays:
    """A source of decoded images."""

    pixels: np.ndarray | None
    targets: np.ndarray
    labels: tuple[str, ...] = tuple("0123456789")
    multi_label: bool = False

    def __len__(self) -> int:
        return len(self.targets)


def digits_split(train: int = 1200) -> tuple[Arrays, Arrays]:
    digits = load_digits()
    pixels = (digits.images * 15).astype(np.uint8)[..., None]
    return Arrays(pixels[:train], digits.target[:train]), Arrays(pixels[train:], digits.target[train:])


def test_baseline_equals_scikit_learns():
    train, test = digits_split()
    peer = KNeighborsClassifier(3).fit(train.pixels.reshape(len(train), -1).astype(float), train.targets)
    expected = peer.predict(test.pixels.reshape(len(test), -1).astype(float))
    got = pixel_knn_baseline(train, test)
    assert got.top1 == (expected == test.targets).mean()
    assert np.array_equal(got.samples.prediction, expected)
    assert got.confusion.sum() == got.count == len(test)
    assert got.low < got.top1 < got.high


def test_a_class_may_be_missing_from_training():
    train, test = digits_split()
    known = train.targets != 4
    got = pixel_knn_baseline(Arrays(train.pixels[known], train.targets[known]), test)
    assert got.confusion[:, 4].sum() == 0
    assert got.confusion[4].sum() == (test.targets == 4).sum()


def test_unlabeled_images_are_skipped():
    train, test = digits_split()
    targets = test.targets.copy()
    targets[:100] = -1
    assert pixel_knn_baseline(train, Arrays(test.pixels, targets)).count == len(test) - 100


def test_only_decoded_single_label_images_are_supported():
    train, test = digits_split()
    assert pixel_knn_applies(train, test)
    assert not pixel_knn_applies(train, Arrays(None, test.targets))
    assert not pixel_knn_applies(Arrays(train.pixels, train.targets, multi_label=True), test)
    with pytest.raises(DataError, match="decoded images"):
        pixel_knn_baseline(train, Arrays(None, test.targets))


def test_too_few_training_images_are_refused():
    train, test = digits_split(2)
    with pytest.raises(DataError, match="3 labeled training images"):
        pixel_knn_baseline(train, test)
