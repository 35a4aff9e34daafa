"""CSV, TSV and Parquet: columns, labels and images."""

from __future__ import annotations

import json
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import need_extra

from vitrail.config import DataConfig
from vitrail.data import decode
from vitrail.data.sources import open_data, open_source_splits, parquet
from vitrail.errors import ConfigError, DataError, NotFoundError


def opened(path, **settings):
    return open_source_splits(DataConfig(source=str(path), **settings))


@pytest.fixture
def images(tmp_path, png_bytes):
    """Six images, 0.png to 5.png."""
    for i in range(6):
        (tmp_path / f"{i}.png").write_bytes(png_bytes(i))
    return tmp_path


def write(path, header, rows, between=","):
    lines = [between.join(map(str, row)) for row in [header, *rows]]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("name", "between", "header"),
    [
        ("t.csv", ",", ["image", "label"]),
        ("t.csv", ";", ["File Name", "Class"]),
        ("t.tsv", "\t", ["path", "category"]),
        ("t.csv", ",", ["anything", "target"]),  # found by its values
    ],
)
def test_columns_are_found(images, name, between, header):
    path = write(images / name, header, [("0.png", "cat"), ("1.png", "dog"), ("2.png", "cat")], between)
    source = opened(path).train
    assert (source.labels, source.targets.tolist(), source.name) == (("cat", "dog"), [0, 1, 0], "t")
    assert [source.key(i) for i in range(3)] == ["0.png", "1.png", "2.png"]
    assert decode(source[2].image).tolist() == decode((images / "2.png").read_bytes()).tolist()


def test_columns_can_be_named(images):
    path = write(images / "t.csv", ["image", "before", "label", "kind"], [("x", "0.png", "no", "a")])
    source = opened(path, image_column="before", label_column="kind").train
    assert (source.key(0), source.labels) == ("0.png", ("a",))
    with pytest.raises(DataError, match=r"has no column 'knd'; did you mean 'kind'\?"):
        opened(path, label_column="knd")


def test_lists_are_multi_label(images):
    path = write(images / "t.csv", ["image", "tags"], [("0.png", "a|b"), ("1.png", ""), ("2.png", "b")])
    source = opened(path).train
    assert source.multi_label
    assert source.targets.tolist() == [[1, 1], [0, 0], [0, 1]]
    assert [source[i].target for i in range(3)] == [(0, 1), (), (1,)]


def test_a_byte_order_mark_and_a_quoted_comma_are_read(images):
    (images / "a,b.png").write_bytes(b"x")
    (images / "t.csv").write_bytes('\ufeffimage,label\n"a,b.png",é\n'.encode())
    source = opened(images / "t.csv").train
    assert (source.key(0), source.labels) == ("a,b.png", ("é",))


def test_a_split_column_defines_the_splits(images):
    rows = [(f"{i}.png", "ab"[i % 2], ["train", "Train", "val", "val", "test", "train"][i]) for i in range(6)]
    parts = opened(write(images / "t.csv", ["image", "label", "split"], rows))
    assert [[p.key(i) for i in range(len(p))] for p in (parts.train, parts.validation, parts.test)] == [
        ["0.png", "1.png", "5.png"],
        ["2.png", "3.png"],
        ["4.png"],
    ]
    assert parts.validation.targets.tolist() == [0, 1]
    with pytest.raises(DataError, match="row 1 of t has the split 'fold1'; expected train, validation or test"):
        opened(write(images / "t.csv", ["image", "label", "split"], [("0.png", "a", "fold1")]))
    with pytest.raises(DataError, match="t has no rows with the split 'train', only test"):
        opened(write(images / "t.csv", ["image", "label", "split"], [("0.png", "a", "test")]))


def test_a_column_of_groups_keeps_them_together(images, png_bytes):
    for i in range(60):
        (images / f"{i}.png").write_bytes(png_bytes(i))
    rows = [(f"{i}.png", "ab"[i % 2], f"person {i // 6}") for i in range(60)]
    path = write(images / "t.csv", ["image", "label", "who"], rows)
    splits = open_data(DataConfig(source=str(path), groups="who", held_out=0.3))
    who = [{int(p.key(i)[:-4]) // 6 for i in range(len(p))} for p in (splits.train, splits.validation)]
    assert who[0].isdisjoint(who[1])
    assert len(who[0]) + len(who[1]) == 10
    with pytest.raises(ConfigError, match="groups='woh' matches no image's path"):
        open_data(DataConfig(source=str(path), groups="woh"))


def test_images_in_the_only_matching_subfolder_are_found(images, png_bytes):
    (images / "pics").mkdir()
    (images / "pics" / "x.png").write_bytes(png_bytes(0))
    parts = opened(write(images / "t.csv", ["image", "label"], [("x.png", 0)]))
    assert parts.train[0].image == str(images / "pics" / "x.png")
    assert parts.notes == ("the images of t.csv are in pics/",)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (
            "image,label\nnone.png,a\n",
            NotFoundError,
            r"the images of .* were not found, such as .*none\.png",
        ),
        (
            "0.png,cat\n1.png,dog\n",
            DataError,
            r"begins with '0\.png,cat'; expected a header line with the column names",
        ),
        (
            "image,color\n0.png,red\n",
            DataError,
            r"has no label column among image, color; name it with data.label_column=",
        ),
        ("a,label\nx,1\n", DataError, r"has no image column among a, label; name it with data.image_column="),
        ("image,label\n0.png,a,extra\n", DataError, r"does not match its header line"),
        ("", DataError, r"expected a header line with the column names"),
    ],
)
def test_unusable_tables_are_errors_that_say_why(images, text, error, message):
    (images / "t.csv").write_text(text)
    with pytest.raises(error, match=message):
        opened(images / "t.csv")


def test_a_table_without_labels_opens_if_labels_are_not_required(images, png_bytes):
    path = write(images / "t.csv", ["path"], [(f"{i}.png",) for i in range(6)])
    parts = open_source_splits(DataConfig(source=str(path)), require_labels=False)
    assert (len(parts.train), parts.train.labels, parts.train.targets.tolist()) == (6, (), [-1] * 6)
    assert parts.notes == ("the images have no labels",)
    pq.write_table(pa.table({"image": [png_bytes(i) for i in range(6)]}), images / "t.parquet")
    source = open_source_splits(DataConfig(source=str(images / "t.parquet")), require_labels=False).train
    assert (len(source), source.targets.tolist(), source[4].image) == (6, [-1] * 6, png_bytes(4))


def test_a_missing_table_and_a_binary_file_are_one_sentence(images):
    with pytest.raises(NotFoundError, match="no table"):
        opened(images / "none.csv")
    (images / "t.csv").write_bytes(b"image,label\n\xff\xfe")
    with pytest.raises(DataError, match=r"expected UTF-8|is not the table"):
        opened(images / "t.csv")
    (images / "t.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match=r"t\.parquet cannot be read as Parquet"):
        opened(images / "t.parquet")


def test_urls_are_downloaded(server, tmp_path, png_bytes):
    need_extra("cloud")
    server.files["a.png"] = png_bytes(7)
    path = write(tmp_path / "t.csv", ["url", "label"], [(f"{server.url}/a.png", "x")])
    sample = opened(path).train[0]
    assert sample.image == png_bytes(7)
    assert sample.key == f"{server.url}/a.png"


@pytest.fixture
def rows(tmp_path, png_bytes):
    """`rows("t.parquet", 0, 10)`: a file in the hub's layout, in row groups of `group` rows."""

    def make(name, first, last, label=lambda i: i % 3, names=("a", "b", "c"), as_bytes=False, group=4):
        images = [png_bytes(i) if as_bytes else {"bytes": png_bytes(i), "path": f"{i}.png"} for i in range(first, last)]
        table = pa.table({"img": images, "label": [label(i) for i in range(first, last)]})
        if names:
            told = {"info": {"features": {"label": {"names": list(names), "_type": "ClassLabel"}}}}
            table = table.replace_schema_metadata({"huggingface": json.dumps(told)})
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, tmp_path / name, row_group_size=group)
        return tmp_path / name

    return make


@pytest.mark.parametrize("as_bytes", [False, True])
def test_parquet_gives_bytes_by_row(rows, png_bytes, as_bytes):
    path = rows("t.parquet", 0, 10, as_bytes=as_bytes)
    source = opened(path).train
    assert (source.labels, len(source), source.blocks, source.pixels) == (("a", "b", "c"), 10, None, None)
    for i in (9, 0, 5, -1):
        assert source[i].image == png_bytes(i % 10)
        assert source[i].target == i % 10 % 3
        assert source[i].key == source.key(i) == f"t.parquet:{i % 10}"
    with pytest.raises(IndexError):
        source[10]


def test_a_folder_of_parquet_files_is_one_table_with_splits(rows, png_bytes, tmp_path):
    rows("set/data/train-00000-of-00002.parquet", 0, 6)
    rows("set/data/train-00001-of-00002.parquet", 6, 11)
    rows("set/data/test-00000-of-00001.parquet", 20, 23)
    parts = opened(tmp_path / "set")
    assert (len(parts.train), parts.validation, len(parts.test)) == (11, None, 3)
    assert [parts.train[i].image for i in range(11)] == [png_bytes(i) for i in range(11)]
    assert parts.train.key(6) == "train-00001-of-00002.parquet:0"
    assert parts.test[2].image == png_bytes(22)


def test_files_of_one_name_in_several_folders_have_keys_of_their_own(rows):
    files = [rows(f"set/{day}/images.parquet", 0, 3) for day in ("monday", "tuesday")]
    targets = np.zeros(6, np.int64)
    source = parquet.ParquetSource("set", files, "img", targets, ("a", "b", "c"), multi_label=False)
    assert [source.key(i) for i in (0, 5)] == ["monday/images.parquet:0", "tuesday/images.parquet:2"]


def test_large_tables_cache_few_row_groups_and_have_blocks(rows, png_bytes, monkeypatch):
    monkeypatch.setattr(parquet, "CACHE_BYTES", 900)  # four images have about 800 bytes
    source = opened(rows("t.parquet", 0, 10)).train
    assert source.blocks == (4, 4, 2)
    reads = []
    whole = pq.ParquetFile.read_row_group
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", lambda self, g, **k: reads.append(g) or whole(self, g, **k))
    assert [source[i].image for i in (0, 1, 2, 3, 9, 8, 0)] == [png_bytes(i) for i in (0, 1, 2, 3, 9, 8, 0)]
    assert reads == [0, 2, 0]


def in_turns(source, count):
    """Read in an order that needs every row group repeatedly."""
    return [source[(i * 7) % count].image for i in range(3 * count)]


def test_row_groups_that_are_read_repeatedly_are_copied_once(rows, png_bytes, monkeypatch, cache):
    monkeypatch.setattr(parquet, "CACHE_BYTES", 900)
    path = rows("t.parquet", 0, 40)
    source = opened(path).train
    assert in_turns(source, 40) == [png_bytes(i * 7 % 40) for i in range(120)]
    [copy] = (cache / "parquet").glob("*.bin")
    assert copy.stat().st_size == sum(len(png_bytes(i)) for i in range(40))
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", lambda *_, **__: pytest.fail("a row group was read"))
    assert in_turns(source, 40) == [png_bytes(i * 7 % 40) for i in range(120)]
    monkeypatch.undo()


def test_a_copy_serves_other_processes_until_the_table_changes(rows, png_bytes, monkeypatch, cache):
    monkeypatch.setattr(parquet, "CACHE_BYTES", 900)
    path = rows("t.parquet", 0, 40)
    in_turns(opened(path).train, 40)
    other = pickle.loads(pickle.dumps(opened(path).train))
    assert in_turns(other, 40) == [png_bytes(i * 7 % 40) for i in range(120)]
    assert len(list((cache / "parquet").glob("*.bin"))) == 1
    rows("t.parquet", 1, 41)
    assert in_turns(opened(path).train, 40) == [png_bytes(1 + i * 7 % 40) for i in range(120)]
    assert len(list((cache / "parquet").glob("*.bin"))) == 2


def test_without_disk_space_more_is_cached_in_memory_with_a_note(rows, png_bytes, monkeypatch, cache):
    monkeypatch.setattr(parquet, "CACHE_BYTES", 900)
    monkeypatch.setattr("vitrail.data.sources.parquet_cache.FREE_SPACE_FACTOR", 1e18)
    notes = []
    monkeypatch.setattr(parquet, "warn_once", lambda given, about: notes.extend(given))
    source = opened(rows("t.parquet", 0, 40)).train
    assert in_turns(source, 40) == [png_bytes(i * 7 % 40) for i in range(120)]
    assert not list((cache / "parquet").glob("*.bin"))
    assert len(notes) == 1
    assert notes[0].startswith("row groups are read repeatedly")


def test_reading_in_order_copies_nothing(rows, png_bytes, monkeypatch, cache):
    monkeypatch.setattr(parquet, "CACHE_BYTES", 900)
    source = opened(rows("t.parquet", 0, 120, group=30)).train
    assert source.blocks == (30, 30, 30, 30)
    for _ in range(6):
        assert [source[i].image for i in range(120)] == [png_bytes(i) for i in range(120)]
    assert not (cache / "parquet").exists()


def test_rows_survive_pickling_and_threads(rows, png_bytes):
    source = opened(rows("t.parquet", 0, 40)).train
    assert source[3].image == png_bytes(3)
    copy = pickle.loads(pickle.dumps(source))
    assert len(pickle.dumps(source)) < 4000  # the cached row groups are not pickled
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: copy[i % 40].image, range(200)))
    assert found == [png_bytes(i % 40) for i in range(200)]


def test_a_row_without_bytes_is_read_from_its_path(tmp_path, png_bytes):
    (tmp_path / "x.png").write_bytes(png_bytes(1))
    images = pa.array([{"bytes": None, "path": "x.png"}, {"bytes": None, "path": None}])
    pq.write_table(pa.table({"image": images, "label": [0, 0]}), tmp_path / "t.parquet")
    source = opened(tmp_path / "t.parquet").train
    assert source[0].image == str(tmp_path / "x.png")
    assert source[1].image == b""  # the decoder reports it as empty


def test_parquet_with_paths_lists_and_missing_labels(images):
    table = pa.table({"path": ["0.png", "1.png", "2.png"], "labels": [["a"], ["b", "a"], None]})
    pq.write_table(table, images / "several.parquet")
    assert opened(images / "several.parquet").train.targets.tolist() == [[1, 0], [1, 1], [0, 0]]
    pq.write_table(pa.table({"path": ["0.png", "1.png"], "label": [1, None]}), images / "one.parquet")
    parts = opened(images / "one.parquet")
    assert parts.train.targets.tolist() == [0, -1]
    assert parts.notes == ("1 of 2 images have no label",)


def test_the_real_cifar10_opens_without_being_read(shared):
    folder = shared / "data" / "cifar10"
    if not folder.exists():
        pytest.skip("no cifar10 beside the checkout")
    parts = opened(folder)
    assert (len(parts.train), len(parts.test)) == (50_000, 10_000)
    assert parts.train.labels[:3] == ("airplane", "automobile", "bird")
    assert (parts.train.targets.sum(), parts.test.targets.sum()) == (225_000, 45_000)
    assert decode(parts.train[49_999].image).shape == (32, 32, 3)
