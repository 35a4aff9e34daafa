"""Parsing of source names, and the choice of the validation split."""

from __future__ import annotations

import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vitrail.config import DataConfig
from vitrail.data.sources import open_data, open_source_splits
from vitrail.data.sources.catalog import CATALOG
from vitrail.data.sources.source_spec import SourceSpec, canonical_name, parse_source
from vitrail.errors import ConfigError, DataError, NotFoundError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("digits", SourceSpec("builtin", "digits")),
        ("CIFAR-10", SourceSpec("builtin", "cifar10")),
        ("fashion_mnist", SourceSpec("builtin", "fashion-mnist")),
        ("FashionMNIST", SourceSpec("builtin", "fashion-mnist")),
        ("builtin:MNIST", SourceSpec("builtin", "mnist")),
        ("folder:photos/", SourceSpec("folder", "photos/")),
        ("Folder: photos", SourceSpec("folder", "photos")),
        ("table:x", SourceSpec("table", "x")),
        ("labels.csv", SourceSpec("table", "labels.csv")),
        ("labels.TSV", SourceSpec("table", "labels.TSV")),
        ("a/b.parquet", SourceSpec("table", "a/b.parquet")),
        ("train-{000..009}.tar", SourceSpec("shards", "train-{000..009}.tar")),
        ("https://host/train.tar?key=1", SourceSpec("shards", "https://host/train.tar?key=1")),
        ("s3://bucket/*.tar", SourceSpec("shards", "s3://bucket/*.tar")),
        ("stream:x.tar", SourceSpec("stream", "x.tar")),
        ("hf:user/name", SourceSpec("hf", "user/name")),
        ("https://huggingface.co/datasets/user/name", SourceSpec("hf", "https://huggingface.co/datasets/user/name")),
        ("folder:C:\\photos", SourceSpec("folder", "C:\\photos")),
    ],
)
def test_names_are_parsed(text, expected):
    assert parse_source(text) == expected


def test_a_tilde_is_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse_source("folder:~/photos") == SourceSpec("folder", f"{tmp_path}/photos")
    assert parse_source("~/t.csv") == SourceSpec("table", f"{tmp_path}/t.csv")


def test_every_dataset_of_the_catalog_is_known_by_its_name():
    assert all(canonical_name(name) == name for name in CATALOG)
    assert canonical_name("./mnist") is None


def test_the_kind_of_a_folder_is_detected_by_its_contents(make_folder, shards, tmp_path):
    assert parse_source(str(make_folder("photos", {"cat": 1}))).kind == "folder"
    assert parse_source(str(shards("web", 1, 1))).kind == "shards"
    for name in ("flat", "deep/data"):
        (tmp_path / name).mkdir(parents=True)
        pq.write_table(pa.table({"label": [1]}), tmp_path / name / "train.parquet")
    assert parse_source(str(tmp_path / "flat")).kind == "table"
    assert parse_source(str(tmp_path / "deep")).kind == "table"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "cifr10",
            r"unknown data source 'cifr10': not a built-in dataset, and not a file or .*; did you mean 'cifar10'\?",
        ),
        ("foldr:x", r"unknown kind of data source 'foldr' in 'foldr:x'; did you mean 'folder'\?"),
        ("no/such/place", r"no file or folder no/such/place \(relative to "),
        ("builtin:imagenet", r"unknown built-in dataset 'imagenet'; available: cifar10"),
        ("folder:", r"'folder:' has nothing after the colon; try folder:photos/"),
        ("https://host/page.html", r"is not the URL of a tar file"),
    ],
)
def test_unknown_sources_are_errors_that_suggest_a_name(text, message):
    with pytest.raises(NotFoundError, match=message):
        parse_source(text)


def test_a_file_of_another_kind_is_not_a_data_source(tmp_path):
    (tmp_path / "x.zip").write_bytes(b"")
    with pytest.raises(NotFoundError, match=r"x\.zip is not a data source; expected class folders, \.csv"):
        parse_source(str(tmp_path / "x.zip"))


# What is measured on


def sizes(splits):
    return [len(p) if p is not None else None for p in (splits.train, splits.validation, splits.test)]


def test_the_sources_own_validation_split_comes_first(make_folder):
    root = make_folder("photos", {"train/a": 5, "val/a": 2, "test/a": 3})
    splits = open_data(DataConfig(source=str(root)))
    assert (sizes(splits), splits.eval_split) == ([5, 2, 3], "validation")


def test_then_its_test_split(make_folder):
    splits = open_data(DataConfig(source=str(make_folder("photos", {"train/a": 5, "test/a": 3}))))
    assert (sizes(splits), splits.eval_split) == ([5, 3, 3], "test")
    assert splits.test is splits.validation


def test_then_a_tenth_with_a_note(make_folder, logged_notes):
    splits = open_data(DataConfig(source=str(make_folder("photos", {"a": 40, "b": 40}))))
    assert splits.eval_split == "held out"
    assert splits.test is None
    assert len(splits.train) + len(splits.validation) == 80
    assert logged_notes == [
        f"{len(splits.validation)} of 80 images are held out for validation, by a hash of their names"
    ]
    assert splits.notes == tuple(logged_notes)


def test_held_out_keeps_the_test_split_for_the_final_score(make_folder):
    root = make_folder("photos", {"train/a": 40, "val/a": 2, "test/a": 3})
    splits = open_data(DataConfig(source=str(root), held_out=0.25))
    assert splits.eval_split == "held out"
    assert len(splits.train) + len(splits.validation) == 40
    assert len(splits.test) == 3
    keys = {s.key(i) for s in (splits.train, splits.validation) for i in range(len(s))}
    assert all(key.startswith("train/") for key in keys)
    without = make_folder("others", {"train/a": 40, "val/a": 2})
    assert sizes(open_data(DataConfig(source=str(without), held_out=0.25)))[2] == 2


def test_a_validation_source_has_the_training_classes(make_folder):
    root = make_folder("photos", {"a": 4, "b": 4})
    other = make_folder("others", {"b": 3})
    splits = open_data(DataConfig(source=str(root), validation=str(other)))
    assert (sizes(splits), splits.eval_split) == ([8, 3, None], "validation")
    assert splits.validation.labels == ("a", "b")
    assert splits.validation.targets.tolist() == [1, 1, 1]
    parted = make_folder("parted", {"train/a": 9, "val/b": 2, "train/b": 1})
    assert sizes(open_data(DataConfig(source=str(root), validation=str(parted))))[1] == 2


def test_validation_and_held_out_exclude_each_other(make_folder):
    root = make_folder("photos", {"a": 4})
    with pytest.raises(ConfigError, match=r"validation='digits' and held_out=0\.1 both define the validation split"):
        open_data(DataConfig(source=str(root), validation="digits", held_out=0.1))


def test_a_validation_source_with_other_classes_is_refused(make_folder):
    root, other = make_folder("photos", {"a": 4}), make_folder("others", {"c": 4})
    with pytest.raises(DataError, match=r"has the class 'c', which is not in class_names="):
        open_data(DataConfig(source=str(root), validation=str(other)))


def test_single_label_and_multi_label_sources_cannot_be_combined(make_folder, tmp_path):
    root = make_folder("photos", {"a": 4, "b": 1})
    (tmp_path / "t.csv").write_text("image,label\nphotos/a/000.png,a|b\n")
    with pytest.raises(DataError, match=r"t\.csv is multi-label and .*photos has one label per image"):
        open_data(DataConfig(source=str(root), validation=str(tmp_path / "t.csv")))


def test_one_image_of_each_class_is_not_enough_to_hold_any_out(make_folder):
    root = make_folder("photos", {"a": 1, "b": 1})
    with pytest.raises(DataError, match=r"no images of .*photos can be held out: the classes a, b have only one image"):
        open_data(DataConfig(source=str(root)))


def test_a_single_image_of_a_class_is_noted_and_used_for_training(make_folder, logged_notes):
    splits = open_data(DataConfig(source=str(make_folder("photos", {"a": 20, "b": 1}))))
    assert logged_notes[1] == "the class b has only one image, which is used for training"
    assert 1 in splits.train.targets
    assert 1 not in splits.validation.targets


def keys_of(source):
    return [source.key(i) for i in range(len(source))]


def test_a_fraction_selects_training_images_only(make_folder):
    root = make_folder("photos", {"train/a": 40, "train/b": 20, "test/a": 3, "test/b": 3})
    every, tenth = (open_data(DataConfig(source=str(root), held_out=0.25, fraction=f)) for f in (None, 0.1))
    assert keys_of(tenth.validation) == keys_of(every.validation)
    assert keys_of(tenth.test) == keys_of(every.test)
    assert set(keys_of(tenth.train)) < set(keys_of(every.train))
    for number in (0, 1):
        count, whole = (int((splits.train.targets == number).sum()) for splits in (tenth, every))
        assert count == max(round(0.1 * whole), 1)
    assert tenth.train.name == f"{every.train.name}, 0.1 of each class"
    assert (tenth.eval_split, tenth.train.labels) == ("held out", ("a", "b"))


def test_the_selected_images_have_their_own_pixels_and_targets():
    every, part = (open_data(DataConfig(source="digits", held_out=0.2, fraction=f)).train for f in (None, (0.5, 1.0)))
    index = {key: i for i, key in enumerate(keys_of(every))}
    where = [index[key] for key in keys_of(part)]
    assert np.array_equal(part.pixels, every.pixels[where])
    assert np.array_equal(part.targets, every.targets[where])


def test_two_halves_are_all_training_images():
    def train(fraction):
        return open_data(DataConfig(source="digits", held_out=0.2, fraction=fraction)).train

    first, second = (set(keys_of(train(half))) for half in (0.5, (0.5, 1.0)))
    assert first.isdisjoint(second)
    assert first | second == set(keys_of(train(None))) == set(keys_of(train(1.0)))
    assert train((0.5, 1.0)).name.endswith(", 0.5 to 1 of each class")


def test_a_fraction_of_multi_label_images_ignores_their_classes(make_folder, tmp_path):
    make_folder("photos", {"a": 20})
    rows = [f"photos/a/{i:03d}.png,{'a|b' if i % 2 else 'b'}" for i in range(20)]
    (tmp_path / "t.csv").write_text("\n".join(["image,label", *rows]))
    every, half = (open_data(DataConfig(source=str(tmp_path / "t.csv"), held_out=0.2, fraction=f)) for f in (None, 0.5))
    assert half.train.multi_label
    assert len(half.train) == round(0.5 * len(every.train))


def test_no_fraction_of_a_stream_can_be_selected(shards):
    root = shards("web", 1, 4)
    config = DataConfig(source=f"stream:{root}/*.tar", validation="digits", class_names=tuple("0123456789"))
    with pytest.raises(DataError, match=r"no part of stream:.* can be selected: a stream has no random access"):
        open_data(config.replace(fraction=0.5))


def test_an_evaluation_reads_the_test_split_or_everything(make_folder):
    parts = open_source_splits(DataConfig(source=str(make_folder("photos", {"a": 3, "b": 2}))))
    assert len(parts.evaluation_source) == 5
    assert not parts.has_eval_split
    parts = open_source_splits(DataConfig(source="digits"))
    assert parts.evaluation_source is parts.test


def test_several_tables_of_text_are_refused(tmp_path):
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("image,label\nx.png,1\n")
    with pytest.raises(DataError, match="matches several text tables; join them into one"):
        open_data(DataConfig(source=f"table:{tmp_path}{os.sep}*.csv"))
    with pytest.raises(NotFoundError, match="contains no tables"):
        open_data(DataConfig(source=f"table:{tmp_path}"))
    with pytest.raises(DataError, match="is not a table; expected a name that ends in"):
        open_data(DataConfig(source="table:x.txt"))
