"""Local tar shards with an index."""

from __future__ import annotations

import json
import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest

from vitrail.config import DataConfig
from vitrail.data import decode
from vitrail.data.sources import open_data, open_source_splits, shard_index
from vitrail.data.sources.shards import display_name, expand_braces, short_names
from vitrail.errors import DataError, ImageError, NotFoundError


def opened(spec, **settings):
    return open_source_splits(DataConfig(source=str(spec), **settings))


@pytest.mark.parametrize("spec", ["{}", "shards:{}", "shards:{}/train-{{000..002}}.tar", "{}/*.tar"])
def test_every_sample_has_random_access(shards, png_bytes, spec):
    source = opened(spec.format(shards("web", 3, 4))).train
    assert (len(source), source.blocks, source.labels) == (12, (4, 4, 4), ("0", "1", "2"))
    assert source.targets.tolist() == [i % 3 for i in range(12)]
    for i in (11, 0, 6, -1):
        sample = source[i]
        assert (sample.image, sample.target) == (png_bytes(i % 12), i % 12 % 3)
        assert sample.key == source.key(i) == f"train-{i % 12 // 4:03d}/{i % 12:06d}"
    with pytest.raises(IndexError):
        source[12]


def test_shards_survive_pickling_and_threads(shards, png_bytes):
    source = pickle.loads(pickle.dumps(opened(shards("web", 3, 20)).train))
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda i: source[i].image, range(60))) == [png_bytes(i) for i in range(60)]


def test_splits_are_detected_by_shard_names(shards):
    folder = shards("web", 2, 4)
    shards("web", 1, 3, prefix="val")
    shards("web", 1, 2, prefix="my-test")
    parts = opened(folder)
    assert [len(p) for p in (parts.train, parts.validation, parts.test)] == [8, 3, 2]
    assert parts.validation.name == "web/validation"


def test_class_names_are_read_next_to_the_shards(shards):
    folder = shards("web", 1, 3)
    (folder / "classes.json").write_text(json.dumps(["ant", "bee", "cow", "dog"]))
    assert opened(folder).train.labels == ("ant", "bee", "cow", "dog")
    (folder / "classes.json").write_text("{")
    with pytest.raises(DataError, match=r"classes\.json is not valid JSON"):
        opened(folder)


def test_a_subset_keeps_the_blocks_of_its_shards(shards):
    splits = open_data(DataConfig(source=str(shards("web", 3, 30)), held_out=0.3))
    assert sum(splits.train.blocks) == len(splits.train)
    first = splits.train.blocks[0]
    assert {splits.train.key(i).split("/")[0] for i in range(first)} == {"train-000"}
    assert splits.train.key(first).startswith("train-001/")


LABELS = {
    "cls": ([("a.png", b"x"), ("a.cls", b" 1\n")], {}, "1"),
    "txt": ([("a.png", b"x"), ("a.txt", b"cat")], {}, "cat"),
    "json": ([("a.png", b"x"), ("a.json", b'{"width": 3, "label": "cat"}')], {}, "cat"),
    "json, named": ([("a.png", b"x"), ("a.json", b'{"kind": 4, "label": "cat"}')], {"label_column": "kind"}, "4"),
    "bare json": ([("a.png", b"x"), ("a.json", b"5")], {}, "5"),
    "cls goes first": ([("a.txt", b"a caption"), ("a.png", b"x"), ("a.cls", b"2")], {}, "2"),
    "txt, named": ([("a.txt", b"cat"), ("a.png", b"x"), ("a.cls", b"2")], {"label_column": "txt"}, "cat"),
    "folder": ([("train/cat/a.png", b"x")], {}, "cat"),
}


@pytest.mark.parametrize("case", LABELS)
def test_labels_are_found_where_people_put_them(tmp_path, make_tar, case):
    members, settings, expected = LABELS[case]
    (tmp_path / "x.tar").write_bytes(make_tar(members))
    source = opened(tmp_path / "x.tar", **settings).train
    assert source.labels == (expected,)
    assert source[0].image == b"x"


def test_multi_label_targets_may_be_empty(tmp_path, make_tar):
    members = [("a.png", b"x"), ("a.json", b'{"labels": ["b", "a"]}'), ("b.png", b"y"), ("b.json", b'{"labels": "a"}')]
    (tmp_path / "x.tar").write_bytes(make_tar([*members, ("c.png", b"z")]))
    source = opened(tmp_path / "x.tar").train
    assert source.multi_label
    assert source.targets.tolist() == [[1, 1], [1, 0], [0, 0]]
    assert source[0].target == (0, 1)
    (tmp_path / "y.tar").write_bytes(make_tar([("a.png", b"x"), ("b.png", b"y"), ("b.cls", b"0")]))
    parts = opened(tmp_path / "y.tar")
    assert parts.train.targets.tolist() == [-1, 0]
    assert parts.notes == ("1 of 2 images of y have no label",)


def test_samples_without_an_image_are_skipped_with_a_note(tmp_path, make_tar):
    (tmp_path / "x.tar").write_bytes(make_tar([("a.cls", b"0"), ("b.png", b"y"), ("b.cls", b"1")]))
    parts = opened(tmp_path / "x.tar")
    assert (len(parts.train), parts.notes) == (1, ("skipped 1 samples of x without an image",))
    with pytest.raises(DataError, match=r"has no sample with a \.jpg file"):
        opened(tmp_path / "x.tar", image_column="jpg")


def test_keys_stay_unique(tmp_path, make_tar):
    (tmp_path / "x.tar").write_bytes(make_tar([("a.png", b"1"), ("a.png", b"2"), ("b.png", b"3")]))
    source = opened(tmp_path / "x.tar").train
    assert [source.key(i) for i in range(3)] == ["x/a", "x/a#2", "x/b"]
    assert [source[i].image for i in range(3)] == [b"1", b"2", b"3"]


# The index


def test_the_index_is_next_to_the_shard_and_is_built_once(shards, monkeypatch):
    folder = shards("web", 2, 4)
    first = opened(folder).train
    assert sorted(p.name for p in folder.glob("*.index")) == ["train-000.tar.index", "train-001.tar.index"]
    monkeypatch.setattr(shard_index, "build_index", lambda shard: pytest.fail(f"{shard} was indexed again"))
    second = opened(folder).train
    assert [second.key(i) for i in range(8)] == [first.key(i) for i in range(8)]
    assert second[5].image == first[5].image


def test_an_index_is_rebuilt_when_the_shard_has_changed(shards, make_tar):
    folder = shards("web", 1, 4)
    assert len(opened(folder).train) == 4
    (folder / "train-000.tar").write_bytes(make_tar([("z.png", b"new"), ("z.cls", b"9")]))
    source = opened(folder).train
    assert (len(source), source[0].image, source.labels) == (1, b"new", ("9",))
    before = (folder / "train-000.tar").stat()
    (folder / "train-000.tar").write_bytes(make_tar([("y.png", b"new"), ("y.cls", b"9")]))  # of the same size
    os.utime(folder / "train-000.tar", ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert opened(folder).train.key(0) == "train-000/y"


@pytest.mark.parametrize("damage", ["{", "[]", '{"version": 1}', "null"])
def test_a_damaged_index_is_rebuilt(shards, damage):
    folder = shards("web", 1, 4)
    opened(folder)
    (folder / "train-000.tar.index").write_text(damage)
    assert len(opened(folder).train) == 4
    assert json.loads((folder / "train-000.tar.index").read_text())["version"] == 1


def test_a_folder_that_is_not_writable_has_its_index_in_the_cache(shards, cache):
    folder = shards("web", 2, 4)
    folder.chmod(0o555)
    try:
        assert len(opened(folder).train) == 8
        assert not list(folder.glob("*.index"))
        assert len(list((cache / "shards").glob("*.index"))) == 2
        assert len(opened(folder).train) == 8
    finally:
        folder.chmod(0o755)


def test_a_truncated_shard_is_named(shards):
    folder = shards("web", 2, 4)
    shard = folder / "train-001.tar"
    shard.write_bytes(shard.read_bytes()[:3000])
    with pytest.raises(DataError, match=r"train-001\.tar is truncated.*copy or download it again"):
        opened(folder)
    assert not (folder / "train-001.tar.index").exists()


def test_a_shard_that_shrank_after_it_was_opened_is_an_unreadable_image(shards):
    folder = shards("web", 1, 4)
    source = opened(folder).train
    (folder / "train-000.tar").write_bytes(b"")
    with pytest.raises(ImageError, match=r"train-000/000003 is truncated: .* has changed since it was indexed"):
        source[3]
    (folder / "train-000.tar").unlink()
    with pytest.raises(ImageError, match=r"cannot read .*train-000\.tar: No such file"):
        source[3]


# Names


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a.tar", ["a.tar"]),
        ("a-{08..11}.tar", ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]),
        ("{a,b}-{1..2}", ["a-1", "a-2", "b-1", "b-2"]),
        ("{2..0}", ["2", "1", "0"]),
    ],
)
def test_patterns_are_expanded_as_in_a_shell(pattern, expected):
    assert list(expand_braces(pattern)) == expected


def test_invalid_patterns_and_missing_shards_are_errors(tmp_path, shards):
    with pytest.raises(DataError, match=r"'\{a\.\.b\}' in .* is not a range"):
        list(expand_braces("x-{a..b}.tar"))
    folder = shards("web", 2, 1)
    with pytest.raises(NotFoundError, match=r"no shard .*train-002\.tar; did you mean 'train-00[01]\.tar'\?"):
        opened(folder / "train-{000..002}.tar")
    with pytest.raises(NotFoundError, match="no shards match"):
        opened(f"shards:{tmp_path}/*.tar")


def test_shards_with_one_name_in_two_folders_have_different_keys():
    assert short_names(["a/x.tar", "b/x.tar"]) == ["a/x", "b/x"]
    assert short_names(["http://h/x-0.tar?key=1", "http://h/x-1.tar?key=1"]) == ["x-0", "x-1"]
    assert display_name("data/imagenet/train-{000..063}.tar") == "train"
    assert display_name("data/imagenet/{000..063}.tar") == "imagenet"


def test_the_real_shards_open(imagenet_val):
    parts = opened(imagenet_val)
    source = parts.evaluation_source
    assert (len(source), source.blocks, len(source.labels)) == (1000, (500, 500), 1000)
    assert sorted(source.targets.tolist()) == list(range(1000))
    assert (source.key(0), source[0].target) == ("val-00000/000000", 573)
    for i in (0, 500, 999):
        assert min(decode(source[i].image).shape[:2]) == 256
    with pytest.raises(
        DataError, match=r"no images of .* can be held out: the classes tench, goldfish.* only one image"
    ):
        open_data(DataConfig(source=str(imagenet_val)))
