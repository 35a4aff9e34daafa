"""Folders that several machines wrote are joined if together they have every part, made with the same settings."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest
from bulk.folders import numbers_folder, write_numbers

from vitrail.bulk.joining import join
from vitrail.errors import ConfigError, DataError


def keys(result) -> list[str]:
    paths = sorted(result.path.glob("part-*")) if result.path.is_dir() else [result.path]
    return [key for path in paths for key in pq.read_table(path)["key"].to_pylist()]


@pytest.mark.parametrize("out", ["joined", "joined.parquet"])
def test_every_row_is_there_once_in_order(tmp_path, out: str):
    numbers_folder(tmp_path / "a", 14, range(0, 3))
    other = numbers_folder(tmp_path / "b", 14, range(2, 5))  # part 2 is in both
    write_numbers(other, 4, {"13.png": "broken"})
    result = join([tmp_path / "a", tmp_path / "b"], tmp_path / out)
    assert keys(result) == [f"{n}.png" for n in range(14)]
    assert (result.num_images, result.width, result.unreadable) == (14, 2, {"13.png": "broken"})
    assert result.missing == ()
    whole = numbers_folder(tmp_path / "whole", 14)
    write_numbers(whole, 4, {"13.png": "broken"})
    if out == "joined":
        whole.finish()
        names = sorted(path.name for path in whole.path.iterdir())
        assert names == sorted(path.name for path in result.path.iterdir())
        assert all((whole.path / name).read_bytes() == (result.path / name).read_bytes() for name in names)
    else:
        metadata = json.loads(pq.read_schema(result.path).metadata[b"vitrail"])
        assert (metadata["features"], metadata["unreadable"]) == ("last", {"13.png": "broken"})


def test_missing_parts_are_named(tmp_path):
    numbers_folder(tmp_path / "a", 20, range(0, 2))
    numbers_folder(tmp_path / "b", 20, range(4, 6))
    with pytest.raises(DataError, match=r"^parts 2 to 3, 6 of 7 are missing in .*a, .*b; compute them first"):
        join([tmp_path / "a", tmp_path / "b"], tmp_path / "joined")
    assert not (tmp_path / "joined").exists()


def test_other_settings_are_refused(tmp_path):
    numbers_folder(tmp_path / "a", 6, range(1))
    numbers_folder(tmp_path / "b", 6, range(1, 2), features="first")
    with pytest.raises(ConfigError, match=r"b was made with features=first, not last; .*a has the latter, so they"):
        join([tmp_path / "a", tmp_path / "b"], tmp_path / "joined")
    numbers_folder(tmp_path / "c", 9, range(1, 2))
    with pytest.raises(ConfigError, match=r"c was made with images="):
        join([tmp_path / "a", tmp_path / "c"], tmp_path / "joined")


def test_a_part_that_differs_is_refused(tmp_path):
    numbers_folder(tmp_path / "a", 6)
    write_numbers(numbers_folder(tmp_path / "b", 6), 1, {"5.png": "broken"})
    with pytest.raises(DataError, match=r"part 1 differs between .*a and .*b"):
        join([tmp_path / "a", tmp_path / "b"], tmp_path / "joined.parquet")
    assert not (tmp_path / "joined.parquet").exists()


def test_parts_of_another_command_and_existing_files_are_refused(tmp_path):
    numbers_folder(tmp_path / "a", 6)
    with pytest.raises(ConfigError, match="was made by vitrail embed; join it with that command"):
        join([tmp_path / "a"], tmp_path / "b", task="predict")
    numbers_folder(tmp_path / "p", 6, task="predict")
    with pytest.raises(ConfigError, match=r"p was made by vitrail predict, not embed; .*a has the latter"):
        join([tmp_path / "a", tmp_path / "p"], tmp_path / "b")
    (tmp_path / "b.parquet").write_text("precious")
    with pytest.raises(ConfigError, match=r"b\.parquet already exists; choose another --out, or pass --overwrite"):
        join([tmp_path / "a"], tmp_path / "b.parquet")
    assert join([tmp_path / "a"], tmp_path / "b.parquet", overwrite=True).num_images == 6


def test_a_folder_can_be_completed_in_place(tmp_path):
    numbers_folder(tmp_path / "a", 9, range(2))
    numbers_folder(tmp_path / "b", 9, range(2, 3))
    result = join([tmp_path / "a", tmp_path / "b"], tmp_path / "a", overwrite=True)
    assert keys(result) == [f"{n}.png" for n in range(9)]
    assert (tmp_path / "a" / "complete.json").exists()
