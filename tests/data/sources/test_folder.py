"""Folders of images: classes, splits, skipped files and notes."""

from __future__ import annotations

import os
import pickle
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from vitrail.config import DataConfig
from vitrail.data import decode
from vitrail.data.sources import open_data, open_source_splits
from vitrail.errors import DataError, NotFoundError


def opened(path, **settings):
    return open_source_splits(DataConfig(source=f"folder:{path}", **settings))


def test_classes_are_the_folders_in_order_and_keys_the_paths(make_folder):
    parts = opened(make_folder("photos", {"dog": 2, "cat": 3, "cat/kittens": 1}))
    source = parts.train
    assert source.labels == ("cat", "dog")
    assert [source.key(i) for i in range(6)] == [
        "cat/000.png",
        "cat/001.png",
        "cat/002.png",
        "cat/kittens/000.png",
        "dog/000.png",
        "dog/001.png",
    ]
    assert source.targets.tolist() == [0, 0, 0, 0, 1, 1]
    assert source.targets.dtype == np.int64
    assert (parts.validation, parts.test, parts.notes) == (None, None, ())
    assert (source.name, source.multi_label, source.pixels, source.blocks) == ("photos", False, None, None)


def test_a_sample_decodes_to_its_image(make_folder):
    source = opened(make_folder("photos", {"cat": 2})).train
    sample = source[1]
    assert (sample.key, sample.target) == ("cat/001.png", 0)
    assert decode(sample.image).shape == (6, 6, 3)


def test_a_folder_survives_pickling_another_working_folder_and_threads(make_folder, monkeypatch, tmp_path):
    root = make_folder("photos", {"cat": 20})
    monkeypatch.chdir(root.parent)
    source = pickle.loads(pickle.dumps(opened("photos").train))
    monkeypatch.chdir(tmp_path.parent)
    found = [b""] * 20

    def read(i):
        found[i] = Path(source[i].image).read_bytes()

    threads = [threading.Thread(target=read, args=(i,)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(root / "cat" / f"{i:03d}.png").read_bytes() for i in range(20)]


@pytest.mark.parametrize("name", ["val", "valid", "validation", "Val"])
def test_splits_are_detected_by_folder_names(make_folder, name):
    root = make_folder("photos", {"train/cat": 3, "train/dog": 3, f"{name}/cat": 1, f"{name}/dog": 2, "test/dog": 1})
    parts = opened(root)
    assert [len(p) for p in (parts.train, parts.validation, parts.test)] == [6, 3, 1]
    assert parts.validation.key(0) == f"{name}/cat/000.png"
    assert parts.test.targets.tolist() == [1]
    assert parts.validation.labels == parts.train.labels == ("cat", "dog")


@pytest.mark.parametrize(
    ("classes", "labels"),
    [
        ({"train": 2, "bus": 2}, ("bus", "train")),  # a train is a vehicle here
        ({"train/day": 2, "bus/day": 2}, ("bus", "train")),
        ({"train/bus": 2, "train/car": 2}, ("bus", "car")),
        ({"test/a": 2, "val/a": 2}, ("test", "val")),
    ],
)
def test_a_class_may_be_called_train(make_folder, classes, labels):
    assert opened(make_folder("photos", classes)).train.labels == labels


def test_skipped_files_are_noted(make_folder):
    root = make_folder("photos", {"cat": 2, "dog": 2, "empty": 0})
    (root / "cat" / "notes.txt").write_text("no image")
    (root / "cat" / ".hidden.png").write_bytes(b"")
    (root / ".git").mkdir()
    (root / "loose.png").write_bytes(b"")
    parts = opened(root)
    assert parts.train.labels == ("cat", "dog")
    assert len(parts.train) == 4
    assert parts.notes == (
        "skipped 1 folder (empty) without images",
        "skipped 1 file (cat/notes.txt) without an image file extension",
        "skipped 1 image (loose.png) not in a class folder",
    )


def test_a_note_lists_the_skipped_folders_next_to_the_splits(make_folder):
    parts = opened(make_folder("photos", {"train/cat": 2, "val/cat": 1, "raw/cat": 5, "val/dog": 0}))
    assert len(parts.train) == 2
    assert parts.notes == ("skipped 1 folder (dog) in val/ without images", "skipped 1 folder (raw) next to train/")


def test_an_empty_split_is_none(make_folder):
    assert opened(make_folder("photos", {"train/cat": 2, "test/cat": 0})).test is None


def test_given_classes_set_the_order_and_may_be_more(make_folder):
    parts = opened(make_folder("photos", {"cat": 1, "dog": 1}), class_names=["dog", "emu", "cat"])
    assert parts.train.targets.tolist() == [2, 0]
    assert parts.notes == ("1 class (emu) without training images",)
    with pytest.raises(DataError, match=r"cat/000\.png has the class 'cat', which is not in class_names="):
        opened(make_folder("photos", {"cat": 1}), class_names=["dog", "cats"])


def test_a_class_of_the_validation_split_must_be_a_training_class(make_folder):
    root = make_folder("photos", {"train/cat": 2, "val/Cat": 1})
    with pytest.raises(DataError, match=r"val/Cat/000\.png has the class 'Cat'.* did you mean 'cat'\?"):
        opened(root)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            ["a.jpg", "b.jpg"],
            r"contains 2 images \(a.jpg, b.jpg\) and no class folders; expected one folder per class",
        ),
        (["a.jpg", "labels.csv"], r"did you mean table:.*labels\.csv\?"),
        (["cat/readme.md"], r"the folders in .* \(1 folder \(cat\)\) contain no images"),
        ([], r"contains no folders with images; expected one folder per class"),
    ],
)
def test_a_folder_without_classes_is_an_error_that_says_what_is_expected(tmp_path, files, message):
    for name in files:
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    (tmp_path / "photos").mkdir(exist_ok=True)
    with pytest.raises(DataError, match=message):
        opened(tmp_path / "photos")


def test_images_may_be_anywhere_if_labels_are_not_required(make_folder, tmp_path):
    root = make_folder("photos", {"": 3, "cat": 2, "dog/old": 1})
    parts = open_source_splits(DataConfig(source=f"folder:{root}"), require_labels=False)
    source = parts.train
    assert [source.key(i) for i in range(6)] == [
        "000.png", "001.png", "002.png", "cat/000.png", "cat/001.png", "dog/old/000.png",
    ]  # fmt: skip
    assert (source.labels, source.targets.tolist()) == ((), [-1] * 6)
    assert parts.notes == ("the images have no labels",)
    assert decode(source[0].image).shape == (6, 6, 3)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty contains no images\."):
        open_source_splits(DataConfig(source=f"folder:{tmp_path / 'empty'}"), require_labels=False)


def test_folders_of_images_are_splits_if_labels_are_not_required(make_folder):
    config = DataConfig(source=f"folder:{make_folder('photos', {'train': 4, 'val': 2, 'test': 1})}")
    parts = open_source_splits(config, require_labels=False)
    assert [len(part) for part in (parts.train, parts.validation, parts.test)] == [4, 2, 1]
    assert parts.validation.key(0) == "val/000.png"
    assert open_source_splits(config).train.labels == ("test", "train", "val")


def test_class_folders_keep_their_labels_if_labels_are_not_required(make_folder):
    config = DataConfig(source=f"folder:{make_folder('photos', {'cat': 4, 'dog': 2})}")
    assert open_source_splits(config, require_labels=False).train.labels == ("cat", "dog")


def test_something_is_held_out_of_a_few_images_without_labels(make_folder):
    for count in (2, 3, 5):
        splits = open_data(
            DataConfig(source=f"folder:{make_folder(f'photos{count}', {'': count})}"), require_labels=False
        )
        assert len(splits.validation) >= 1
        assert len(splits.train) >= 1


def test_no_folder_is_not_found(tmp_path):
    with pytest.raises(NotFoundError, match=r"no folder .*nothing"):
        opened(tmp_path / "nothing")


def test_links_are_followed_and_those_in_circles_are_not(make_folder):
    root = make_folder("photos", {"cat": 2})
    other = make_folder("elsewhere", {"dogs": 3})
    (root / "dog").symlink_to(other / "dogs")
    (root / "cat" / "again").symlink_to(root / "cat")
    parts = opened(root)
    assert parts.train.labels == ("cat", "dog")
    assert np.bincount(parts.train.targets).tolist() == [2, 3]


def test_an_image_that_is_added_moves_no_other_on_disk(make_folder, png_bytes):
    root = make_folder("photos", {"cat": 60, "dog": 60})
    before = open_data(DataConfig(source=str(root)))
    (root / "cat" / "new.png").write_bytes(png_bytes(10**5))
    after = open_data(DataConfig(source=str(root)))
    held = {before.validation.key(i) for i in range(len(before.validation))}
    now = {after.validation.key(i) for i in range(len(after.validation))}
    assert held <= now <= held | {"cat/new.png"}
    assert before.eval_split == "held out"


def test_groups_stay_together(make_folder):
    root = make_folder("photos", {f"cat/p{i}": 4 for i in range(12)} | {f"dog/p{i}": 4 for i in range(12)})
    splits = open_data(DataConfig(source=str(root), groups=r"p\d+", held_out=0.3))
    keys = [[part.key(i) for i in range(len(part))] for part in (splits.train, splits.validation)]
    people = [{key.split("/")[1] for key in part} for part in keys]
    assert people[0].isdisjoint(people[1])
    assert people[0] | people[1] == {f"p{i}" for i in range(12)}
    assert splits.notes[0].endswith("by a hash of their group names")


def test_the_same_bytes_on_both_sides_are_reported(make_folder, logged_notes):
    root = make_folder("photos", {"train/cat": 3, "val/cat": 2, "test/cat": 2})
    (root / "val" / "cat" / "copy.png").write_bytes((root / "train" / "cat" / "001.png").read_bytes())
    (root / "test" / "cat" / "copy.png").write_bytes((root / "train" / "cat" / "002.png").read_bytes())
    open_data(DataConfig(source=str(root)))
    assert logged_notes == [
        "1 validation or test image is also in the training data, byte for byte: val/cat/copy.png = train/cat/001.png",
        "1 validation or test image is also in the training data, byte for byte: test/cat/copy.png = train/cat/002.png",
    ]


def test_equal_sizes_and_equal_middles_are_not_enough(tmp_path, logged_notes):
    for part, byte in (("train", b"a"), ("val", b"b")):
        folder = tmp_path / "photos" / part / "cat"
        folder.mkdir(parents=True)
        (folder / "x.jpg").write_bytes(byte + bytes(1000))
    open_data(DataConfig(source=str(tmp_path / "photos")))
    assert logged_notes == []


def test_too_many_images_are_not_compared_and_a_note_says_so(make_folder, logged_notes, monkeypatch):
    monkeypatch.setattr("vitrail.data.sources.duplicates.MAX_COMPARED", 3)
    open_data(DataConfig(source=str(make_folder("photos", {"train/cat": 3, "val/cat": 2}))))
    assert logged_notes == ["not searched for duplicates: more than 3 images"]


@pytest.mark.slow
def test_twenty_thousand_images_open_in_the_time_of_a_few_directory_walks(tmp_path):
    """Compared, within one run, with os.walk and os.stat on the same folders."""
    rng = np.random.default_rng(0)
    for c in range(20):
        folder = tmp_path / "photos" / f"class{c:03d}"
        folder.mkdir(parents=True)
        for i in range(1000):
            (folder / f"{i:05d}.jpg").write_bytes(rng.bytes(int(rng.integers(100, 3000))))

    def walk():
        for folder, _, names in os.walk(tmp_path / "photos"):
            for name in names:
                os.stat(os.path.join(folder, name))

    def timed(call):
        start = time.process_time()
        call()
        return time.process_time() - start

    walk()
    walked = min(timed(walk) for _ in range(3))
    taken = min(timed(lambda: open_data(DataConfig(source=str(tmp_path / "photos")))) for _ in range(3))
    assert taken < 6 * walked
