"""A folder of parts: written by any number of processes, recognised when complete, never mixed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from bulk.folders import numbers_folder, write_numbers
from conftest import ROOT

from vitrail.errors import ConfigError, DataError, FormatError, NotFoundError
from vitrail.storage.part_folder import PartFolder, format_ranges, join_parts, read_manifest


def test_parts_written_in_any_order_are_joined_in_order(tmp_path):
    folder = numbers_folder(tmp_path / "parts", 8, parts=range(0))
    for number in (2, 0, 1):
        write_numbers(folder, number)
    join_parts(folder.part_paths(), {"about": "numbers"}, tmp_path / "all.parquet")
    table = pq.read_table(tmp_path / "all.parquet")
    assert table["key"].to_pylist() == [f"{n}.png" for n in range(8)]
    assert json.loads(table.schema.metadata[b"vitrail"]) == {"about": "numbers"}


@pytest.mark.parametrize(("num_parts", "last"), [(3, "part-00002"), (100_000, "part-99999"), (100_001, "part-100000")])
def test_names_of_parts_are_in_the_order_of_their_numbers(tmp_path, num_parts: int, last: str):
    folder = numbers_folder(tmp_path / "parts", parts=range(0))
    folder = replace(folder, manifest=replace(folder.manifest, num_parts=num_parts))
    names = [folder.part_path(number).stem for number in (0, 1, num_parts - 1)]
    assert (names, names[-1]) == (sorted(names), last)


def test_complete_json_is_written_when_all_parts_exist(tmp_path):
    folder = numbers_folder(tmp_path / "parts", 8, parts=range(2))
    assert folder.missing() == [2]
    write_numbers(folder, 2, {"7.png": "broken"})
    (tmp_path / "parts" / ".part-00002.parquet.0123abcd.tmp").touch()  # of a process that was killed
    assert not folder.is_complete
    assert folder.finish() == (8, {"7.png": "broken"})
    assert folder.is_complete
    stored = json.loads((tmp_path / "parts" / "complete.json").read_text())
    assert stored == {"num_parts": 3, "num_rows": 8, "num_unreadable": 1}
    assert {p.name for p in folder.path.glob(".*")} == set()


def test_a_part_may_be_finished_by_another_process_while_it_is_written(tmp_path, monkeypatch):
    """A failed task of a job array, submitted again, computes the parts of tasks that still run, too."""
    folder, write = numbers_folder(tmp_path / "parts", parts=range(2)), pq.write_table

    def write_late(*arguments, **options):
        write(*arguments, **options)
        monkeypatch.setattr(pq, "write_table", write)
        write_numbers(folder, 2)
        folder.finish()  # deletes the temporary files

    monkeypatch.setattr(pq, "write_table", write_late)
    write_numbers(folder, 2)
    assert folder.finish() == (7, {})


def test_a_part_of_another_run_is_refused(tmp_path):
    ours, theirs = numbers_folder(tmp_path / "a"), numbers_folder(tmp_path / "b", features="other")
    theirs.part_path(1).replace(ours.part_path(1))
    with pytest.raises(DataError, match=r"part-00001\.parquet belongs to another run than"):
        ours.finish()
    ours.part_path(2).replace(ours.part_path(1))  # a part under another number
    with pytest.raises(DataError, match=r"part-00001\.parquet belongs to another run than"):
        ours.finish()


def test_a_damaged_part_is_named(tmp_path):
    folder = numbers_folder(tmp_path / "parts")
    folder.part_path(1).write_bytes(folder.part_path(1).read_bytes()[:-20])
    with pytest.raises(DataError, match=r"part-00001\.parquet is damaged .*; delete it and run the command again"):
        folder.finish()


def test_another_setting_is_refused_and_named(tmp_path):
    numbers_folder(tmp_path / "parts")
    with pytest.raises(ConfigError, match=r"parts was made with features=last, not first; choose another --out"):
        numbers_folder(tmp_path / "parts", features="first")
    with pytest.raises(ConfigError, match=r"was made by vitrail embed, not predict"):
        numbers_folder(tmp_path / "parts", task="predict")


def test_another_processor_is_a_note(tmp_path, caplog):
    folder = numbers_folder(tmp_path / "parts")
    values = folder.manifest.to_dict() | {"processor": "another CPU"}
    (folder.path / "manifest.json").write_text(json.dumps(values))
    assert PartFolder.begin(folder.path, folder.manifest).manifest.digest == folder.manifest.digest
    assert "begun on another CPU, continued on" not in caplog.text, "this one is not known"
    PartFolder.begin(folder.path, replace(folder.manifest, processor="this CPU"))
    assert "begun on another CPU, continued on this CPU" in caplog.text


def test_a_folder_with_other_files_is_not_used(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(ConfigError, match=r"photos is not empty and has no manifest\.json"):
        numbers_folder(tmp_path / "photos")
    with pytest.raises(ConfigError, match=r"cat\.jpg is a file"):
        numbers_folder(tmp_path / "photos" / "cat.jpg")


def test_shards_that_begin_a_folder_at_once_agree(tmp_path, monkeypatch):
    """Another one writes the manifest and a part while this one looks whether the folder is empty."""
    (tmp_path / "parts").mkdir()
    look = Path.iterdir

    def look_late(folder: Path):
        monkeypatch.setattr(Path, "iterdir", look)
        numbers_folder(tmp_path / "parts", parts=range(1))
        return look(folder)

    monkeypatch.setattr(Path, "iterdir", look_late)
    folder = numbers_folder(tmp_path / "parts", parts=range(1, 3))
    assert folder.finish() == (7, {})
    assert {p.name for p in folder.path.glob(".*")} == set()


def test_only_the_first_manifest_is_written(tmp_path, monkeypatch):
    numbers_folder(tmp_path / "parts", parts=range(0))
    exists, asked = Path.exists, []

    def exists_late(path: Path) -> bool:
        asked.append(path)
        return exists(path) and len(asked) > 2  # the first looks are those of a moment before

    monkeypatch.setattr(Path, "exists", exists_late)
    with pytest.raises(ConfigError, match="features=last, not other"):
        numbers_folder(tmp_path / "parts", parts=range(0), features="other")


def test_overwrite_deletes_the_parts_and_nothing_else(tmp_path):
    folder = numbers_folder(tmp_path / "parts")
    folder.finish()
    (folder.path / "notes.txt").write_text("mine")
    again = PartFolder.begin(folder.path, folder.manifest, overwrite=True)
    assert (again.missing(), again.is_complete) == ([0, 1, 2], False)
    assert (folder.path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format_version": 2, "task": "embed"}'])
def test_an_invalid_manifest_is_refused(tmp_path, text: str):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(DataError, match=r"has no readable manifest\.json"):
        read_manifest(tmp_path)


def test_a_newer_manifest_and_a_missing_folder_are_refused(tmp_path):
    (tmp_path / "manifest.json").write_text('{"format_version": 3}')
    with pytest.raises(FormatError, match="a newer vitrail wrote this file"):
        read_manifest(tmp_path)
    with pytest.raises(NotFoundError, match="there is no folder"):
        read_manifest(tmp_path / "none")


def test_attempts_are_counted_until_they_are_forgotten(tmp_path):
    folder = numbers_folder(tmp_path / "parts")
    assert [folder.count_attempt(1), folder.count_attempt(1), folder.count_attempt(2)] == [1, 2, 1]
    folder.forget_attempts(1)
    assert [folder.count_attempt(1), folder.count_attempt(2)] == [1, 2]
    folder.forget_attempts()
    assert folder.count_attempt(2) == 1


def test_ranges_are_written_shortly():
    assert format_ranges([0, 1, 2, 5]) == "0 to 2, 5"
    assert format_ranges(range(0, 20, 2)) == "0, 2, 4, 6, 8 and 5 more"


def run_python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


MANY_PARTS = """
import resource, sys
from pathlib import Path
from bulk.folders import numbers_folder
from vitrail.storage.part_folder import join_parts

folder = numbers_folder(Path(sys.argv[1]) / "parts", 240)
resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))
folder.finish()
join_parts(folder.part_paths(), {}, Path(sys.argv[1]) / "f.parquet")
"""


def test_more_parts_than_the_open_file_limit_are_joined(tmp_path):
    completed = run_python(MANY_PARTS, tmp_path)
    assert completed.returncode == 0, completed.stderr
    assert pq.read_metadata(tmp_path / "f.parquet").num_rows == 240


LOCK = """
import sys
from dataclasses import replace
from pathlib import Path
from vitrail.storage.part_folder import PartFolder
with PartFolder.open(Path(sys.argv[1])).lock(sys.argv[2]): print("mine")
"""


def test_the_second_writer_of_a_shard_is_refused(tmp_path):
    folder = numbers_folder(tmp_path / "f.parquet.parts")
    with folder.lock():
        refused, other_shard = run_python(LOCK, folder.path, ""), run_python(LOCK, folder.path, "1/2")
    shown = tmp_path / "f.parquet"
    assert f"another process is writing {shown}; wait for it to finish, or choose another --out." in refused.stderr
    assert other_shard.stdout == run_python(LOCK, folder.path, "").stdout == "mine\n"


OVERWRITE = """
import sys
from dataclasses import replace
from pathlib import Path
from bulk.folders import numbers_folder
from vitrail.storage.part_folder import delete_leftovers
delete_leftovers(Path(sys.argv[1]))
numbers_folder(Path(sys.argv[1]), parts=range(0), overwrite=True, features="other")
"""


def test_parts_that_another_process_writes_are_not_deleted(tmp_path):
    folder = numbers_folder(tmp_path / "parts", parts=range(2))
    with folder.lock("1/2"):
        refused = run_python(OVERWRITE, folder.path)
    assert f"another process is writing {folder.path}; wait for it to finish" in refused.stderr
    assert folder.missing() == [2]
    assert run_python(OVERWRITE, folder.path).returncode == 0
    assert read_manifest(folder.path).settings["features"] == "other"


def test_lock_is_refused_if_the_parts_have_just_been_joined(tmp_path):
    folder = numbers_folder(tmp_path / "f.parquet.parts")
    folder = PartFolder(Path(tmp_path / "gone.parts"), folder.manifest)
    with pytest.raises(ConfigError, match="another process is writing"), folder.lock():
        pass
