"""Stored features as rows: one file or parts, any row groups, float16, and files that are not features."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from retrieval.stored_features import SETTINGS, clustered, table, write_file, write_manifest, write_parts

from vitrail.errors import DataError, NotFoundError
from vitrail.retrieval.feature_store import FeatureStore


@pytest.fixture
def values() -> np.ndarray:
    return clustered(250)


def all_values(store: FeatureStore, rows: int) -> np.ndarray:
    blocks = list(store.blocks(rows))
    assert [start for start, _ in blocks] == np.cumsum([0, *[len(b) for _, b in blocks[:-1]]]).tolist()
    return np.concatenate([block.numpy() for _, block in blocks])


@pytest.mark.parametrize("rows", [1, 7, 64, 1000])
def test_file_and_parts_have_the_same_rows(tmp_path, values, rows):
    one = FeatureStore.open(write_file(tmp_path / "f.parquet", values))
    many = FeatureStore.open(write_parts(tmp_path / "parts", values, 4))
    assert (len(one), one.width, len(many), many.width) == (250, 16, 250, 16)
    np.testing.assert_array_equal(all_values(one, rows), values)
    np.testing.assert_array_equal(all_values(many, rows), values)
    numbers = [249, 0, 63, 64, 63, 130]
    assert one.rows(numbers) == many.rows(numbers)
    assert [one.rows(numbers)[n].key for n in numbers] == [f"{n}.png" for n in numbers]
    assert one.metadata["model"] == many.metadata["model"] == "small"


def test_float16_features_are_read_as_float32(tmp_path, values):
    store = FeatureStore.open(write_file(tmp_path / "f.parquet", values.astype(np.float16)))
    [(_, block)] = store.blocks()
    assert block.numpy().dtype == np.float32
    np.testing.assert_array_equal(block.numpy(), values.astype(np.float16))


def test_empty_parts_are_skipped(tmp_path):
    store = FeatureStore.open(write_parts(tmp_path / "parts", clustered(3), 5))
    assert store.counts == (1, 1, 1, 0, 0)
    assert store.rows([2])[2].key == "2.png"


def test_missing_part_is_named(tmp_path, values):
    folder = write_parts(tmp_path / "parts", values, 4)
    (folder / "part-00002.parquet").unlink()
    with pytest.raises(DataError, match="is not complete: part 2 of 4 is missing; run the command"):
        FeatureStore.open(folder)


def test_parts_of_different_widths_are_an_error(tmp_path, values):
    folder = write_parts(tmp_path / "parts", values, 2)
    pq.write_table(table(values[:, :8]), folder / "part-00001.parquet")
    with pytest.raises(DataError, match="8 features a row, not 16"):
        list(FeatureStore.open(folder).blocks())


def test_other_files_and_folders_are_named(tmp_path, values):
    with pytest.raises(NotFoundError, match="there is no file"):
        FeatureStore.open(tmp_path / "missing.parquet")
    (tmp_path / "text.parquet").write_text("text")
    with pytest.raises(DataError, match="not a feature file"):
        FeatureStore.open(tmp_path / "text.parquet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"has no readable manifest\.json"):
        FeatureStore.open(tmp_path / "empty")
    (tmp_path / "empty" / "manifest.json").write_text("[]")
    with pytest.raises(DataError, match=r"has no readable manifest\.json"):
        FeatureStore.open(tmp_path / "empty")
    write_manifest(tmp_path / "empty", "predict", 0, {"task": "predict"})
    with pytest.raises(DataError, match="made by vitrail predict"):
        FeatureStore.open(tmp_path / "empty")
    metadata = {"vitrail": json.dumps({"format_version": 2, **SETTINGS})}
    pq.write_table(table(values).drop(["label"]).replace_schema_metadata(metadata), tmp_path / "other.parquet")
    with pytest.raises(DataError, match="lacks the column label"):
        FeatureStore.open(tmp_path / "other.parquet")


def test_rows_without_features_are_an_error(tmp_path, values):
    rows = table(values).to_pylist()
    rows[3]["embedding"] = None
    path = write_file(tmp_path / "f.parquet", values)
    schema = pq.read_schema(path)
    pq.write_table(table(values).from_pylist(rows, schema=schema), path)
    with pytest.raises(DataError, match="rows without features"):
        list(FeatureStore.open(path).blocks())
