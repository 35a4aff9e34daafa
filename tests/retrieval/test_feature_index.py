"""FeatureIndex: exact and indexed search agree as far as stated; an index that does not fit is replaced."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal

import numpy as np
import pytest
import torch
from conftest import need_extra
from retrieval.stored_features import clustered, write_file, write_parts

from vitrail.errors import ConfigError, DataError, FormatError
from vitrail.evaluation.knn import nearest_neighbors
from vitrail.retrieval import feature_index, index_file, inverted_lists
from vitrail.retrieval.feature_index import FeatureIndex
from vitrail.retrieval.feature_store import FeatureStore
from vitrail.retrieval.index_file import index_folder, read_record

ROWS = 3000


@pytest.fixture(scope="module")
def values() -> np.ndarray:
    return clustered(ROWS)


@pytest.fixture
def features(tmp_path, values):
    return write_file(tmp_path / "f.parquet", values)


@pytest.fixture
def small_limit(monkeypatch):
    """Collections of 1,000 rows or more get an index."""
    need_extra("search")
    monkeypatch.setattr(feature_index, "EXACT_BELOW", 1000)


def queries(count: int = 50) -> torch.Tensor:
    return torch.from_numpy(clustered(count, seed=1))


def recall(index: FeatureIndex, values: np.ndarray, vectors: torch.Tensor) -> float:
    exact = nearest_neighbors(torch.from_numpy(values), vectors, 10).index.tolist()
    found = index.nearest(vectors, 10).row.tolist()
    return float(np.mean([len({*a} & {*b}) / 10 for a, b in zip(exact, found, strict=True)]))


def test_small_collection_is_searched_exactly_and_has_no_index(features, values):
    index = FeatureIndex.open(features)
    assert index.is_exact
    assert not index_folder(features).exists()
    assert recall(index, values, queries()) == 1
    assert str(index) == "3,000 images, searched exactly"


@pytest.mark.parametrize("blocks", [17, 100_000])
def test_exact_search_does_not_depend_on_blocks(features, values, blocks, monkeypatch):
    monkeypatch.setattr(feature_index, "EXACT_BELOW", 10)  # so that nothing is kept in memory
    monkeypatch.setattr("vitrail.retrieval.feature_store.BLOCK_VALUES", 16 * blocks)
    found = FeatureIndex.open(features, exact=True).nearest(queries(), 20)
    expected = nearest_neighbors(torch.from_numpy(values), queries(), 20)
    assert torch.equal(found.row, expected.index)
    torch.testing.assert_close(found.similarity, expected.similarity)


def test_index_reaches_the_recall_that_it_states(features, values, small_limit):
    for target in (0.5, 0.95, 0.99):
        index = FeatureIndex.open(features, recall=target)
        assert not index.is_exact
        assert index.recall >= target
        assert recall(index, values, queries(400)) == pytest.approx(index.recall, abs=0.05)
    cheap, good = (FeatureIndex.open(features, recall=target)._point for target in (0.5, 0.99))
    assert cheap.probes < good.probes


def test_index_of_parts_and_of_shards_finds_the_same(tmp_path, values, small_limit, monkeypatch):
    one = FeatureIndex.build(write_file(tmp_path / "f.parquet", values), lists=20)
    monkeypatch.setattr(inverted_lists, "SHARD_BYTES", 10_000)
    monkeypatch.setattr("vitrail.retrieval.feature_store.BLOCK_VALUES", 16 * 300)
    folder = write_parts(tmp_path / "parts", values, 7)
    many = FeatureIndex.build(folder, lists=20)
    assert len(list(index_folder(folder).glob("shard-*.bin"))) > 3
    a, b = one.nearest(queries()), many.nearest(queries())
    np.testing.assert_allclose(a.similarity, b.similarity, atol=2e-3)
    assert recall(many, values, queries()) >= 0.9
    assert [match.key for match in many.search(queries())[0]] == [f"{row}.png" for row in b.row[0].tolist()]


def test_index_is_reused_and_rebuilt_when_the_features_change(features, values, small_limit, monkeypatch):
    FeatureIndex.open(features)
    record = index_folder(features) / "index.json"
    built = record.stat().st_mtime_ns
    FeatureIndex.open(features)
    assert record.stat().st_mtime_ns == built
    write_file(features, values[::-1].copy())
    index = FeatureIndex.open(features)
    assert record.stat().st_mtime_ns != built
    assert recall(index, values[::-1].copy(), queries()) >= 0.9


def test_copied_features_keep_their_index(features, tmp_path, small_limit, monkeypatch):
    FeatureIndex.open(features)
    os.utime(features, ns=(1, 1))
    monkeypatch.setattr(feature_index, "_build", lambda *arguments: pytest.fail("built again"))
    assert not FeatureIndex.open(features).is_exact
    assert read_record(FeatureStore.open(features)).parts[0].mtime_ns == 1


def test_change_of_one_byte_is_noticed(features, small_limit):
    FeatureIndex.open(features)
    content = bytearray(features.read_bytes())
    content[len(content) // 3] ^= 1
    features.write_bytes(content)
    with pytest.raises(DataError, match="has changed since its index was made"):
        read_record(FeatureStore.open(features))


@pytest.mark.parametrize("damage", ["truncated", "head", "record", "gone", "empty record", "newer"])
def test_damaged_index_is_replaced(features, values, small_limit, damage, caplog):
    FeatureIndex.open(features)
    folder = index_folder(features)
    shard, record = folder / "shard-00000.bin", folder / "index.json"
    content = bytearray(shard.read_bytes())
    if damage == "truncated":
        shard.write_bytes(content[:-100])
    elif damage == "head":
        content[40] ^= 255
        shard.write_bytes(content)
    elif damage == "gone":
        shard.unlink()
    elif damage == "newer":
        record.write_text(json.dumps(json.loads(record.read_text()) | {"format_version": 99}))
    else:
        record.write_text("{" if damage == "record" else "{}")
    with pytest.raises((DataError, FormatError)):
        read_record(FeatureStore.open(features))
    index = FeatureIndex.open(features)
    assert recall(index, values, queries()) >= 0.9
    assert "it is not used" in caplog.text
    read_record(FeatureStore.open(features))


def test_damaged_vectors_do_not_end_the_process(features, small_limit):
    FeatureIndex.open(features)
    shard = index_folder(features) / "shard-00000.bin"
    content = bytearray(shard.read_bytes())
    content[-5000:] = os.urandom(5000)
    shard.write_bytes(content)
    index = FeatureIndex.open(features, recall=1.0)
    with pytest.raises(DataError, match="rows that do not exist"):
        index.nearest(torch.from_numpy(clustered(200, seed=3)), ROWS)


def test_folder_without_index_files_is_not_deleted(features, small_limit):
    folder = index_folder(features)
    folder.mkdir()
    (folder / "photo.jpg").write_text("mine")
    index = FeatureIndex.open(features)
    assert index.is_exact
    assert (folder / "photo.jpg").read_text() == "mine"


@pytest.mark.parametrize("missing", [124_000, 40_000, 1], ids=["all", "some", "the last byte"])
def test_full_disk_falls_back_to_exact_search(features, values, small_limit, missing, caplog):
    """A full disk is simulated with the kernel's limit of file size. FAISS does not notice when the last bytes fail."""
    FeatureIndex.open(features)
    size = (index_folder(features) / "shard-00000.bin").stat().st_size
    shutil.rmtree(index_folder(features))
    unlimited, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size - missing, unlimited[1]))
        index = FeatureIndex.open(features)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        signal.signal(signal.SIGXFSZ, ignored)
    assert index.is_exact
    assert f"FAISS could not write {index_folder(features)} (" in caplog.text
    assert "check the disk. Searching all 3,000 rows instead." in caplog.text
    assert recall(index, values, queries()) == 1
    assert [path.name for path in features.parent.iterdir() if path.is_dir()] == []


def test_index_of_a_killed_process_is_removed_by_the_next(features, small_limit):
    left = [features.with_name(f".{features.name}.index.{name}") for name in ("0a1b2c3d.tmp", "4e5f6a7b.old")]
    other = features.with_name(f".{features.name}.0a1b2c3d.tmp")
    for folder in (*left, other):
        folder.mkdir()
        (folder / "shard-00000.bin").touch()
    FeatureIndex.open(features)
    assert [folder.exists() for folder in (*left, other)] == [False, False, True]


def test_without_faiss_the_search_is_exact_with_a_note(features, values, monkeypatch, caplog):
    monkeypatch.setattr(feature_index, "EXACT_BELOW", 1000)
    monkeypatch.setattr(inverted_lists.importlib.util, "find_spec", lambda name: None)
    index = FeatureIndex.open(features)
    assert index.is_exact
    assert "FAISS is not installed: pip install 'vitrail[search]'" in caplog.text
    assert recall(index, values, queries()) == 1

    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(inverted_lists.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install 'vitrail\[search\]'"):
        FeatureIndex.build(features)


def test_lengths_of_vectors_do_not_matter(tmp_path, values, small_limit):
    lengths = np.random.default_rng(0).uniform(0.1, 100, (ROWS, 1)).astype(np.float32)
    plain = write_file(tmp_path / "plain.parquet", values)
    scaled = write_file(tmp_path / "scaled.parquet", values * lengths)
    for exact in (True, False):
        a, b = (FeatureIndex.open(path, exact=exact, recall=1.0) for path in (plain, scaled))
        similar = a.nearest(queries()).similarity
        torch.testing.assert_close(similar, b.nearest(7 * queries()).similarity, atol=2e-3, rtol=0)
        assert similar.max() <= 1


def test_float16_features_have_an_index(tmp_path, values, small_limit):
    index = FeatureIndex.open(write_file(tmp_path / "f.parquet", values.astype(np.float16)))
    assert recall(index, values, queries()) >= 0.9


def test_duplicates_are_all_found_and_do_not_lower_the_recall(tmp_path, small_limit):
    values = np.repeat(clustered(150), 20, axis=0)
    index = FeatureIndex.open(write_file(tmp_path / "f.parquet", values))
    assert index.recall >= 0.95
    rows = index.nearest(torch.from_numpy(values[100:101]), 20).row[0]
    assert sorted(rows.tolist()) == list(range(100, 120))


def test_more_neighbors_than_the_probed_lists_have_are_found(features, values, small_limit):
    index = FeatureIndex.open(features, recall=0.3)
    found = index.nearest(queries(5), 2500)
    assert all(len(set(row)) == 2500 and -1 not in row for row in found.row.tolist())
    assert FeatureIndex.open(features, exact=True).nearest(queries(2), 10**6).row.shape == (2, ROWS)


def test_no_queries_give_no_rows(features, small_limit):
    assert FeatureIndex.open(features).search(torch.empty(0, 16)) == []
    assert FeatureIndex.open(features, exact=True).search(torch.empty(0, 16)) == []


def test_invalid_arguments_are_named(features, small_limit, tmp_path):
    index = FeatureIndex.open(features, exact=True)
    with pytest.raises(DataError, match=r"shape \(1, 8\), expected N x 16"):
        index.search(torch.zeros(1, 8))
    with pytest.raises(ConfigError, match="top=0"):
        index.search(torch.zeros(1, 16), 0)
    with pytest.raises(ConfigError, match=r"recall=1.5"):
        FeatureIndex.open(features, recall=1.5)
    with pytest.raises(ConfigError, match=r"lists=1000 for 3,000 vectors; expected 1 to 67"):
        FeatureIndex.build(features, lists=1000)
    empty = write_file(tmp_path / "empty.parquet", np.empty((0, 16), np.float32))
    with pytest.raises(DataError, match="has no rows"):
        FeatureIndex.open(empty)
    with pytest.raises(DataError, match="has 0 rows, an index needs 100"):
        FeatureIndex.build(empty)
    values = clustered(100)
    values[50, 3] = np.nan
    with pytest.raises(DataError, match="NaN or infinite"):
        FeatureIndex.open(write_file(tmp_path / "nan.parquet", values)).search(queries(1))


def test_features_that_change_during_the_build_leave_no_index(features, values, small_limit, monkeypatch):
    write = inverted_lists.write_lists

    def change(*arguments):
        write(*arguments)
        os.utime(features, ns=(1, 1))

    monkeypatch.setattr(inverted_lists, "write_lists", change)
    with pytest.raises(DataError, match="changed while its index was built"):
        FeatureIndex.build(features)
    assert not index_folder(features).exists()


def test_index_moves_with_its_features(features, tmp_path, small_limit):
    FeatureIndex.open(features)
    (tmp_path / "new").mkdir()
    shutil.move(features, tmp_path / "new")
    shutil.move(index_folder(features), tmp_path / "new")
    read_record(FeatureStore.open(tmp_path / "new" / features.name))


def test_record_is_the_same_after_reading(features, small_limit):
    FeatureIndex.open(features)
    record = read_record(FeatureStore.open(features))
    assert index_file.IndexRecord.from_dict(json.loads(json.dumps(record.to_dict()))) == record
